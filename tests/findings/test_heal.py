"""The section on healing: shares of what was lost, by hand; curves against their tables; several runs side by side."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from surgeon.findings.training import Healing
from tests.findings.read_page import drawing_of, marks_in, page_of, render
from tests.findings.run_folders import make_healing, read_csv, state, write_csv

BAND = r'fill-opacity="0.14"'


def test_before_and_after(tmp_path: Path) -> None:
    text = page_of(make_healing(tmp_path / "pairs.run")).text("model-1-1")
    assert "trained for 40 steps on 20,480 tokens of text.txt in 2:00" in text
    assert "4,000 held-out tokens were predicted (demo)" in text
    assert re.search(r"original ?10\.00 ?9\.000 to 11\.00 ", text)
    assert re.search(r"edited ?14\.92 ?13\.43 to 16\.41 ?0\.4000 ?0\.3600 to 0\.4400", text)
    # Of ln 14.92 - ln 10 = 0.4 a fourth is left; of the divergence, too.
    assert re.search(
        r"healed ?20,480 ?11\.05 ?9\.947 to 12\.16 ?75% ?0\.1000 ?0\.09000 to 0\.1100 ?75%", text
    )
    assert "A0 F0" in text


def test_what_the_summary_says(tmp_path: Path) -> None:
    text = page_of(make_healing(tmp_path / "pairs.run")).text()
    assert "75% of the edit's divergence regained by healing" in text.replace("75%of", "75% of")
    assert (
        "perplexity from 14.92 to 11.05, the original's being 10.00, and its divergence from 0.4000 to 0.1000."
        in text
    )
    assert "No healing" not in text


def test_shares_by_hand() -> None:
    healing = Healing.of(
        {"original": state(10, None), "edited": state(40, 0.8), "healed": state(20, 0.6)}
    )
    assert healing.of_perplexity == pytest.approx(0.5)  # a factor of 2 of a factor of 4
    assert healing.of_divergence == pytest.approx(0.25)
    worse = Healing.of({"original": None, "edited": state(40, 0.8), "healed": state(20, 1)})
    assert worse.of_perplexity is None
    assert worse.of_divergence == pytest.approx(-0.25)


def test_the_curves_hold_the_tables_numbers(tmp_path: Path) -> None:
    folder = make_healing(tmp_path / "pairs.run")
    html = render([folder])
    for name in ("perplexity", "divergence"):
        chart = re.search(
            rf'aria-label="{name.capitalize()} on held-out text".*?</svg>', html, re.DOTALL
        )
        assert chart is not None
        tips = re.findall(
            rf"<title>pairs.run, step (\d+): {name} ([\d.]+) \(95%: ([\d.]+) to ([\d.]+)\)", chart[0]
        )
        rows = read_csv(folder / "held_out.csv")
        assert len(tips) == len(rows)
        for row, (step, *values) in zip(rows, tips, strict=True):
            assert step == row["step"]
            wanted = [float(row[name + end]) for end in ("", "_low", "_high")]
            assert [float(value) for value in values] == pytest.approx(wanted, rel=6e-4)
        heights = [
            y for _, y, _, _ in marks_in(drawing_of(html, f"{name.capitalize()} on held-out text"))
        ]
        assert heights == sorted(heights), "less lies further down"
        assert len(re.findall(BAND, chart[0])) == 1
        assert ('stroke="var(--soft)" stroke-width="1.2"' in chart[0]) == (name == "perplexity"), (
            "the original's"
        )
    assert "Dashed: the original&#39;s perplexity, 10.00." in html


def test_intervals_that_would_hide_the_curve_are_told_not_drawn(tmp_path: Path) -> None:
    folder = make_healing(tmp_path / "pairs.run")
    wide = {"perplexity_low": "2", "perplexity_high": "60"}
    write_csv(folder / "held_out.csv", [row | wide for row in read_csv(folder / "held_out.csv")])
    html = render([folder])
    chart = re.search(r'aria-label="Perplexity on held-out text".*?</svg>', html, re.DOTALL)
    assert chart is not None
    assert not re.search(BAND, chart[0])
    assert "perplexity 14.92 (95%: 2.000 to 60.00)" in chart[0]
    assert "95% intervals are far wider than the picture. Dashed" in html
    assert len(re.findall(BAND, html)) == 1, "those of the divergence are drawn"


@pytest.mark.parametrize(("steps", "smoothed"), [(40, False), (120, True)])
def test_the_loss_is_smoothed_where_there_are_many_rows(
    steps: int, smoothed: bool, tmp_path: Path
) -> None:
    folder = make_healing(tmp_path / "pairs.run", steps=steps)
    rows = [
        {**row, "logits": 1.0, "hidden": 0.5, "text": ""} for row in read_csv(folder / "training.csv")
    ]
    write_csv(folder / "training.csv", rows)
    page = page_of(folder)
    assert ("loss, mean of 3 rows" in page.text()) == smoothed
    assert "hidden states' part" in page.text()
    assert "text's part" not in page.text(), "an empty column is none"
    losses = [float(value) for value in re.findall(r"<title>step \d+: loss ([\d.]+)", page.html)]
    wanted = [float(row["loss"]) for row in rows]
    if smoothed:
        assert losses[:steps] == pytest.approx(wanted, rel=6e-4)
    else:
        assert losses == pytest.approx(wanted, rel=6e-4)


def test_several_runs_of_one_edit_side_by_side(tmp_path: Path) -> None:
    one = make_healing(tmp_path / "lora.run")
    two = make_healing(tmp_path / "full.run", (0.4, 0.2))
    page = page_of(one, two)
    text = page.text()
    table = text[text.index("All healings side by side") :]
    assert re.search(r"original ?10\.00", table)
    assert len(re.findall(r"edited ?14\.92", table)) == 1
    assert re.search(r"lora\.run ?20,480 ?11\.05 ?9\.947 to 12\.16 ?75%", table)
    assert re.search(r"full\.run ?20,480 ?12\.21 ?10\.99 to 13\.44 ?50%", table)
    chart = re.search(
        r'aria-label="Divergence on held-out text, all healings".*?</svg>', page.html, re.DOTALL
    )
    assert chart is not None
    assert len(re.findall(BAND, chart[0])) == 2
    assert ">step<" in chart[0]
    assert "All healings" not in page_of(one).text()


def test_runs_with_other_batches_lie_by_tokens(tmp_path: Path) -> None:
    runs = [
        make_healing(tmp_path / f"{tokens}.run", tokens=tokens, program=f"A{place}")
        for place, tokens in enumerate((20480, 40960, 20481, 20482))
    ]
    html = render(runs)
    chart = re.search(
        r'aria-label="Divergence on held-out text, all healings".*?</svg>', html, re.DOTALL
    )
    assert chart is not None
    assert ">tokens trained on<" in chart[0]
    assert not re.search(BAND, chart[0]), "four areas could not be told apart"
    assert chart[0].count('stroke-opacity="0.65"') == 4 * 11
    assert html.count("edited, for") == 4


def test_other_texts_are_not_compared(tmp_path: Path) -> None:
    runs = [make_healing(tmp_path / f"{name}.run", held_out_hash=name) for name in ("one", "two")]
    table = page_of(*runs).text().partition("All healings side by side")[2]
    assert "only shares can be compared" in table
    assert not table.startswith("original")


def test_a_run_without_a_row_of_training(tmp_path: Path) -> None:
    folder = make_healing(tmp_path / "pairs.run")
    (folder / "training.csv").write_text((folder / "training.csv").read_text().splitlines()[0] + "\n")
    page = page_of(folder)
    assert "Loss while it trained" not in page.html
    assert "Divergence on held-out text" in page.html


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("held_out.csv", lambda text: text.replace("divergence_low,", "", 1), "held_out.csv has no column diverg"),
        ("held_out.csv", lambda text: text.splitlines()[0] + "\n", "held_out.csv has no rows"),
        ("held_out.csv", lambda text: text.replace("\n40,", "\ninf,", 1), r"run.json, or a table .*a step of inf"),
        ("training.csv", lambda text: text.replace("\n3,", "\noops,", 1), "training.csv has 'oops' in column step"),
        ("run.json", lambda text: text.replace('"perplexity": 10.0', '"perplexity": 0', 1), "perplexity of 0 is not"),
        ("run.json", lambda text: text.replace('"healed"', '"cured"'), r"run.json, or a table .*KeyError"),
        ("run.json", lambda text: text.replace('"steps": 40', '"steps": "x"'), r"run.json, or a table .*ValueError"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(name: str, damage: Any, message: str, tmp_path: Path) -> None:
    path = make_healing(tmp_path / "pairs.run") / name
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=message):
        render([path.parent])


def test_without_the_original(tmp_path: Path) -> None:
    alone = {name: state(ppl, None) for name, ppl in (("edited", 14.0), ("healed", 11.0))}
    folders = [make_healing(tmp_path / f"{name}.run", **alone, original=None) for name in ("one", "two")]
    for folder in folders:
        none = {f"divergence{end}": "nan" for end in ("", "_low", "_high")}
        write_csv(
            folder / "held_out.csv", [{**row, **none} for row in read_csv(folder / "held_out.csv")]
        )
    page = page_of(*folders)
    assert "perplexity from 14.00 to 11.00." in page.text()
    assert "The original is not known" in page.text()
    assert "Divergence on held-out text" not in page.html
    assert "Dashed" not in page.html
    assert "<td data-marked" not in page.html.partition("All healings side by side")[0]


def test_a_run_that_has_not_ended(tmp_path: Path) -> None:
    folder = make_healing(tmp_path / "pairs.run")
    (folder / "run.json").write_text(json.dumps({"identity": {"original": "a" * 64}}))
    with pytest.raises(
        ValueError, match=r"run.json is of a run that has not ended; give the same surgeon heal"
    ):
        render([folder])


def test_a_run_without_its_files(tmp_path: Path) -> None:
    folder = make_healing(tmp_path / "pairs.run")
    (folder / "training.csv").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"has run.json but no training.csv; run surgeon heal to its end"
    ):
        render([folder])
    (folder / "run.json").unlink()
    with pytest.raises(ValueError, match="holds no run of a surgeon command"):
        render([folder])


def test_numbers_that_are_none_are_shown_as_none(tmp_path: Path) -> None:
    """Training that ended in nonsense."""
    folder = make_healing(
        tmp_path / "pairs.run", healed=json.loads(json.dumps(state(math.inf, math.inf)))
    )
    rows = read_csv(folder / "held_out.csv")
    write_csv(
        folder / "held_out.csv", [*rows[:-1], rows[-1] | {"perplexity": "inf", "divergence": "inf"}]
    )
    text = page_of(folder).text()
    assert re.search("healed ?20,480 ?∞ ?∞ to ∞ ?\N{EN DASH} ?∞", text)
