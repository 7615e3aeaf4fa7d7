"""The summary of the page, against an independent computation from the tables."""

from __future__ import annotations

import re
from pathlib import Path

from tests.findings.read_page import map_named, page_of, render
from tests.findings.run_folders import BASE, Cell, make_scan, read_csv


def plain(rows: list[dict[str, str]]) -> list[tuple[str, int, int, float]]:
    return [
        (r["operation"], int(r["first"]), int(r["last"]), float(r["perplexity"]) / BASE) for r in rows
    ]


def test_the_longest_stretch_of_pairs(tmp_path: Path) -> None:
    folder = make_scan(tmp_path / "scan", ("prune", "lp"), 12)
    text = page_of(folder).text("model-1")
    cells = [cell for cell in plain(read_csv(folder / "cells.csv")) if cell[0] == "lp"]
    within = [((e - s + 1) // 2, -ratio, -s) for _, s, e, ratio in cells if e > s and ratio <= 1.1]
    pairs, _, negative = max(within)
    assert (
        f"Within +10% of the perplexity: layers {-negative} to {-negative + 2 * pairs - 1}, for an effective "
        f"depth of {12 - pairs} of 12." in text
    )
    assert f"{12 - pairs} of 12effective depth with layers run as LP pairs, within +10%" in text.replace(
        "12 effective", "12effective"
    )


def test_no_stretch_of_pairs_will_do(tmp_path: Path) -> None:
    def change(cells: list[Cell]) -> None:
        for cell in cells:
            cell["perplexity"], cell["divergence"] = BASE * 9, 1.0

    text = page_of(make_scan(tmp_path / "scan", ("lp",), 4, change)).text()
    assert "No stretch stays within +10% of the perplexity." in text
    assert "Layers 0 to 3: no measured way to pair one of them stays within +25%" in text


def test_the_cheapest_and_the_dearest_layers(tmp_path: Path) -> None:
    folder = make_scan(tmp_path / "scan", ("prune",), 9)
    text = page_of(folder).text("model-1")
    alone = sorted((ratio, s) for _, s, e, ratio in plain(read_csv(folder / "cells.csv")) if s == e)
    said = re.search(r"costs least perplexity to leave out (.*?), and most (.*?\))\.", text)
    assert said is not None
    assert re.findall(r"layer (\d+)", said[1]) == [str(s) for _, s in alone[:3]]
    assert re.findall(r"layer (\d+)", said[2]) == [str(s) for _, s in alone[:-4:-1]]
    assert f"{100 * (alone[0][0] - 1):.1f}%" in said[1]


def test_layers_never_to_touch(tmp_path: Path) -> None:
    folder = make_scan(tmp_path / "scan", ("prune", "lp"), 12)
    text = page_of(folder).text("model-1")
    cells = plain(read_csv(folder / "cells.csv"))
    spared: dict[str, set[int]] = {"prune": set(), "lp": set()}
    for operation, s, e, ratio in cells:
        size = 2 if operation == "lp" else 1
        stretch = range(s, s + (e - s + 1) // size * size)
        if ratio <= 1.25:
            spared[operation].update(stretch)
    never = {name: set(range(12)) - layers for name, layers in spared.items()}
    assert never == {"prune": {0, 5}, "lp": {0}}, "what the made-up numbers are meant to say"
    assert "Layer 0: no measured way to remove or pair it stays within +25% of the perplexity." in text
    assert re.search(
        r"layer 0 ?is never to be touched: no measured way to remove or pair it within \+25%", text
    )


def test_how_far_each_change_goes(tmp_path: Path) -> None:
    folder = make_scan(tmp_path / "scan", ("prune", "merge", "2-parallel"), 8)
    html = render([folder])
    table = re.search(r"<caption>How far each change goes</caption>(.*?)</table>", html, re.DOTALL)
    assert table is not None
    cells = plain(read_csv(folder / "cells.csv"))
    saved = {"prune": lambda n: n, "merge": lambda n: n - 1, "2-parallel": lambda n: n // 2}
    for title, operation in (("Prune", "prune"), ("Merge", "merge"), ("2-Parallel", "2-parallel")):
        row = re.search(rf'<th scope="row">{title}</th>(.*?)</tr>', table[1])
        assert row is not None
        shown = re.findall(r"<td[^>]*>([^<]*)</td>", row[1])
        for tolerance, said in zip((1.05, 1.10, 1.25), shown, strict=True):
            size = 2 if operation == "2-parallel" else 1
            within = [
                ((e - s + 1) // size * size, -ratio, -s)
                for name, s, e, ratio in cells
                if name == operation
                and ratio <= tolerance
                and not (ratio == 1 and (s == e or operation != "prune"))
            ]
            if not within:
                assert said == "none"
                continue
            length, ratio, first = max(within)
            first = -first
            ends = f"layer {first}" if length == 1 else f"layers {first} to {first + length - 1}"
            depth = 8 - saved[operation](length)
            assert said == f"{ends} ({BASE * -ratio:.2f}, depth {depth})"


def test_what_was_not_scanned_is_said_and_nothing_else_of_it(tmp_path: Path) -> None:
    text = page_of(make_scan(tmp_path / "scan", ("prune",), 6)).text("model-1")
    assert (
        "Not scanned, so nothing is said about it: Shuffle, Merge, Parallel, 2-Parallel, 3-Parallel, LP pairs"
        in text
    )
    assert "No search: whether scattered edits do better" in text
    assert "as LP pairs" not in text.replace("LP pairs, Ladder", "")
    only_parallel = page_of(make_scan(tmp_path / "other", ("2-parallel",), 6)).text("model-1")
    assert "LP pairs themselves were not scanned" in only_parallel
    assert "Removing one layer" not in only_parallel


def test_a_scan_without_intervals(tmp_path: Path) -> None:
    def bare(cells: list[Cell]) -> None:
        for cell in cells:
            for name in [name for name in cell if name.endswith(("_low", "_high"))]:
                del cell[name]

    page = page_of(make_scan(tmp_path / "scan", ("prune", "lp"), 6, bare, base_interval=None))
    assert "95% interval" not in page.text("table")
    assert "The unedited model has 6 layers and a perplexity of 10.00, over 4,000 tokens" in page.text()


def test_a_part_of_the_stretches(tmp_path: Path) -> None:
    def coarse(cells: list[Cell]) -> None:
        cells[:] = [c for c in cells if c["first"] % 2 == 0 and (c["last"] - c["first"]) % 2 == 1]

    page = page_of(make_scan(tmp_path / "scan", ("lp",), 8, coarse, layers="0:8", every=2, max_length=8))
    assert "stretches begin every 2 layers only" in page.text().lower()
    cells = map_named(page, "LP pairs")
    assert cells["rows"] == ["0", "2", "4", "6"]
    assert cells["columns"] == ["1", "3", "5", "7"]


def test_a_model_with_a_program_of_its_own(tmp_path: Path) -> None:
    """Nothing is said of its depth, which is not the number of its layers."""
    program = "{A0 F0 A1 F1 | A2 F2 A3 F3}"
    text = page_of(make_scan(tmp_path / "scan", ("prune", "lp"), 4, program=program)).text("model-1")
    assert "The model as it runs has 4 layers" in text
    assert "effective depth" not in text.split("How far each change goes")[0]
