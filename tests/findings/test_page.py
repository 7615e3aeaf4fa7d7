"""The page: runs and models are told apart, it harms nobody, needs nothing else, and errors name what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from surgeon.findings.page import KINDS, write_page
from tests.findings.read_page import Page, page_of, render
from tests.findings.run_folders import (
    ALL,
    BASE,
    Cell,
    everything,
    make_checkpoint,
    make_evaluation,
    make_scan,
    make_search,
    read_csv,
    record,
    write_csv,
)

BAD = "<script>alert('x')</script><img src=http://evil.example/a onerror=\"boom()\">&amp;\"'"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One of every kind of run, to be read only."""
    return everything(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page(folders: list[Path]) -> Page:
    return page_of(*folders)


def test_a_section_for_every_run(folders: list[Path], page: Page) -> None:
    sections = [a for tag, a in page.tags if tag == "section" and a.get("class") == "run"]
    assert len(sections) == len(folders) == len([kind for kind in KINDS if kind.OF_SURGERY])
    headings = page.text("h2")
    for kind in KINDS:
        assert (kind.TITLE in headings) == kind.OF_SURGERY
    assert "What this page cannot say" in page.text()
    provenance = page.text("model-1-1")
    for value in ("surgeon something tiny", "a" * 64, "d" * 64, "0.0.0-test"):
        assert value in provenance


def test_ids_are_unique_and_links_lead_to_them(page: Page) -> None:
    ids = page.ids()
    assert len(ids) == len(set(ids))
    links = [str(attributes["href"]) for tag, attributes in page.tags if tag in ("a", "use")]
    assert links
    assert {link.removeprefix("#") for link in links} <= set(ids)
    described = [attributes["data-cells"] for _, attributes in page.tags if attributes.get("data-cells")]
    assert set(described) == set(page.data)


def test_several_runs_of_one_kind(tmp_path: Path) -> None:
    first, second = make_scan(tmp_path / "wiki"), make_scan(tmp_path / "code")
    page = page_of(first, second, first)
    assert "Scan: wiki" in page.text("h2")
    assert "Scan: code" in page.text("h2")
    assert page.text().count("As it is (wiki).") == 1
    assert sum(a.get("class") == "run" for _, a in page.tags) == 2, (
        "a run that is named twice is shown once"
    )


def test_models_are_kept_apart(tmp_path: Path) -> None:
    def worse(cells: list[Cell]) -> None:
        for cell in cells:
            cell["perplexity"] = float(cell["perplexity"]) * 100

    one = make_scan(tmp_path / "one", ("prune",), 5, model="first-model")
    two = make_scan(
        tmp_path / "two",
        ("prune",),
        5,
        worse,
        model="second-model",
        model_hash="b" * 64,
        base_perplexity=1000.0,
    )
    search = make_search(tmp_path / "search", model="first-model")
    page = page_of(one, two, search)
    assert "2 models" in page.text("h1")
    chapters = {name: page.text(name) for name in ("model-1", "model-2")}
    assert "first-model" in chapters["model-1"]
    assert "first-model" not in chapters["model-2"]
    assert "second-model" not in chapters["model-1"]
    assert "perplexity of 10.00" in chapters["model-1"]
    assert "perplexity of 1,000" in chapters["model-2"]
    assert "Of 4 trials the winner is trial 2" in chapters["model-1"]
    assert "the winner" not in chapters["model-2"]
    assert "No search" in chapters["model-2"]


@pytest.mark.thorough
def test_an_exported_checkpoint_belongs_to_its_model(tmp_path: Path) -> None:
    scan, exported = make_scan(tmp_path / "scan"), make_checkpoint(tmp_path / "fused")
    measured = make_evaluation(tmp_path / "tasks", model=str(exported), model_hash="c" * 64)
    page = page_of(scan, exported, measured)
    assert sum(a.get("class") == "chapter" for _, a in page.tags) == 1
    assert page.text("h1") == "tiny"
    elsewhere = page_of(scan, measured)
    assert sum(a.get("class") == "chapter" for _, a in elsewhere.tags) == 2


def test_an_exported_checkpoint_says_that_it_was_trained(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "healed")
    assert "trained after the edit" not in render([folder])
    report = json.loads((folder / "surgeon.json").read_text())
    report["trained"] = {"steps": 400, "tokens": 12800, "data": "demo:1", "method": "the norms"}
    (folder / "surgeon.json").write_text(json.dumps(report))
    assert "400 steps on 12,800 tokens of demo:1, the norms" in render([folder])


def test_results_of_lm_eval_itself(tmp_path: Path) -> None:
    folder = make_evaluation(tmp_path / "tasks")
    path = next(folder.glob("results*.json"))
    results = json.loads(path.read_text())
    del results["surgeon"]
    path.write_text(json.dumps(results))
    assert "arc acc 0.2500 ± 0.010" in page_of(path).text()


def test_nothing_is_fetched(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
        assert not {"src", "srcset", "xlink:href", "style"} & set(attributes)
        own = "data:image/png;base64," if tag == "image" else "#"
        assert str(attributes.get("href", own)).startswith(own)
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttpRequest|import\(", page.html)


def test_what_files_say_is_text(page: Page, tmp_path: Path) -> None:
    folders = everything(tmp_path, model=BAD, data=BAD, command=BAD)
    recipe = tmp_path / "search" / "recipe.yaml"
    recipe.write_text(f"# </code></pre></script>{BAD}")
    for name, column in (
        ("spectrum/spectrum.csv", "weight"),
        ("search/trials.csv", "source"),
        ("search/terms.csv", "option"),
    ):
        rows = read_csv(tmp_path / name)
        for row in rows[: len(rows) // 2]:
            row[column] = BAD
        write_csv(tmp_path / name, rows)  # type: ignore[arg-type]
    bad = page_of(*folders)
    assert bad.count("img") == 0
    own = bad.count("script") - len(bad.data)
    assert own == page.count("script") - len(page.data) == 1
    assert not [tag for tag, attributes in bad.tags if any(name.startswith("on") for name in attributes)]
    assert BAD in bad.text()
    assert "alert('x')" not in re.sub(r"<script type=.*?</script>", "", bad.html), (
        "no bare quotes either"
    )


def test_headings_tables_and_drawings_can_be_read_out(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    for tag, attributes in page.tags:
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
        if tag == "th":
            assert attributes.get("scope") in {"row", "col"}
    assert page.count("caption") == page.count("table")
    assert ("html", {"lang": "en"}) in page.tags


@pytest.mark.parametrize(
    ("num_layers", "megabytes"), [(32, 1.5), pytest.param(80, 5.0, marks=pytest.mark.thorough)]
)
def test_size(num_layers: int, megabytes: float, tmp_path: Path) -> None:
    folder = make_scan(tmp_path / "scan", ALL, num_layers, steps_per_layer=2)
    assert len(render([folder]).encode()) < megabytes * 1e6


def test_the_same_runs_give_the_same_page(folders: list[Path], page: Page) -> None:
    assert render(folders) == page.html


def test_a_page_is_made_of_files_alone() -> None:
    """Neither weights nor what measures them is loaded for it."""
    left_out = ["torch", "transformers", "scipy", "surgeon.analysis", "surgeon.cost", "surgeon.runtime"]
    script = f"import sys\nimport surgeon.findings.page\nprint([name for name in {left_out} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


def test_one_layer_and_no_changes_at_all(tmp_path: Path) -> None:
    page = page_of(make_scan(tmp_path / "scan", ("lp", "merge"), 1))
    assert "perplexity of 10.00" in page.text()
    assert "Layers never to touch" not in page.text()


def test_numbers_of_an_older_version_are_refused(tmp_path: Path) -> None:
    folder = make_scan(tmp_path / "old")
    old = json.loads((folder / "scan.json").read_text())
    (folder / "scan.json").write_text(json.dumps(old | {"format": 2}))
    with pytest.raises(
        ValueError, match=r"scan.json .* \(format 2, not 3\).* dropout wrongly; run surgeon scan again"
    ):
        render([folder])


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"holds no run .* looked for explore.json, scan.json, similarity.json"
    ):
        render([tmp_path])
    with pytest.raises(FileNotFoundError, match="no folder"):
        render([tmp_path / "nothing"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace("perplexity,", "", 1), r"cells.csv has no column perplexity;"),
        (lambda text: text.splitlines()[0] + "\n", "cells.csv has no rows"),
        (lambda _: "", "cells.csv is no table"),
        (lambda text: text + "prune,1,2,3,4,5,6,7,8,9,10,11,12\n", "cells.csv is no table"),
        (
            lambda text: text.replace("prune,1,1,", "prune,1,1,oops", 1),
            r"'oops.* in column perplexity, line \d+",
        ),
        (lambda text: text.replace("prune,1,1,", "prune,1.5,1,", 1), r"1.5 in column first, line \d+"),
        (lambda text: text.replace("prune,1,1,", "prune,-1,1,", 1), "-1 in column first"),
        (lambda text: text.replace("prune,1,1,", "prune,1,99999999,", 1), "99999999 in column last"),
        (lambda text: text.replace("prune,1,1,", "prune,,1,", 1), "nan in column first"),
        (
            lambda text: text.replace("prune,1,1,", "prun,1,1,", 1),
            r"'prun' in column operation, line \d+; did you mean",
        ),
        (
            lambda text: text.replace("prune,", "0-parallel,"),
            r"'0-parallel' in column operation, line 2; did you mean",
        ),
        (
            lambda text: text.replace("prune,1,1,", "99999999999-parallel,1,1,", 1),
            "in column operation, line",
        ),
    ],
)
def test_a_damaged_table(damage: Any, message: str, tmp_path: Path) -> None:
    folder = make_scan(tmp_path / "scan", ("prune",), 4)
    path = folder / "cells.csv"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=message):
        render([folder])


def test_odd_intervals_and_numbers(tmp_path: Path) -> None:
    folder = make_scan(tmp_path / "scan", ("prune",), 4)
    rows = read_csv(folder / "cells.csv")
    for column, value, message in (
        (
            "perplexity_low",
            "x",
            "cells.csv has 'x' in column perplexity_low, line 2, where a number should be",
        ),
        (
            "tokens",
            "inf",
            r"scan.json, or a table beside it, holds what surgeon scan does not write \(OverflowError",
        ),
    ):
        write_csv(folder / "cells.csv", [rows[0] | {column: value}, *rows[1:]])
        with pytest.raises(ValueError, match=message):
            render([folder])
    folder = make_search(tmp_path / "search")
    rows = read_csv(folder / "trials.csv")
    write_csv(folder / "trials.csv", [rows[0] | {"edits": "pair 1:900000000"}, *rows[1:]])
    with pytest.raises(
        ValueError, match=r"search.json, or a table .*\(ValueError: edits of .* are more than any model"
    ):
        render([folder])


@pytest.mark.parametrize(
    ("make", "name", "entries"),
    [
        (make_scan, "scan.json", {"tokens_predicted": [1]}),
        (make_scan, "scan.json", {"base_interval": ["x", 2]}),
        (make_scan, "scan.json", {"sublayers_run": "x", "num_layers": None}),
        (make_scan, "scan.json", {"model": "a\0b"}),
        (make_checkpoint, "surgeon.json", {"source": 5}),
    ],
)
def test_a_record_with_odd_entries(
    make: Any, name: str, entries: dict[str, Any], tmp_path: Path
) -> None:
    path = make(tmp_path / "run") / name
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    with pytest.raises(ValueError, match=f"{name}|null byte"):
        render([path.parent])


def test_a_damaged_record(tmp_path: Path) -> None:
    folder = make_scan(tmp_path / "scan", ("prune",), 4)
    for content, message in (
        ("{", "scan.json is not valid JSON"),
        ("[]", "scan.json should hold a JSON object, not list"),
        (json.dumps(record()), "scan.json has no base_perplexity above 0"),
    ):
        (folder / "scan.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            render([folder])
    (folder / "scan.json").write_text(json.dumps(record(base_perplexity=BASE)))
    (folder / "cells.csv").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"has scan.json but no cells.csv; run surgeon scan to its end"
    ):
        render([folder])


def test_a_search_is_shown_without_its_study(tmp_path: Path) -> None:
    folder = make_search(tmp_path / "search")
    before = render([folder])
    (folder / "study.db").write_bytes(b"a database that this machine cannot open" * 100)
    assert render([folder]) == before


def test_a_page_is_replaced_when_the_new_one_is_whole(tmp_path: Path) -> None:
    scan, output = make_scan(tmp_path / "scan"), tmp_path / "new" / "page.html"
    write_page([scan], output)
    before = output.read_text()
    (scan / "cells.csv").write_text("damaged")
    with pytest.raises(ValueError, match="cells.csv"):
        write_page([scan], output)
    assert output.read_text() == before
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]
    with pytest.raises(ValueError, match="is a folder; give a file to write"):
        write_page([scan], tmp_path)
