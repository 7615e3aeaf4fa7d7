"""What the sections of the page show, against the tables they are made from."""

from __future__ import annotations

import math
import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex

from surgeon.findings.speeds import Predictions
from tests.findings.read_page import colours_in, drawing_of, map_named, marks_in, page_of, render
from tests.findings.run_folders import (
    ALL,
    BASE,
    Cell,
    held_out,
    make_evaluation,
    make_prediction,
    make_scan,
    make_search,
    make_sensitivity,
    make_similarity,
    make_spectrum,
    quality_of,
    read_csv,
    write_csv,
)
from tests.findings.test_explore import STEPS, exploration


def test_every_cell_of_a_scan_is_in_its_map(tmp_path: Path) -> None:
    folder = make_scan(tmp_path / "scan", ALL, 7)
    page = page_of(folder)
    titles = ["Shuffle", "Prune", "Merge", "Parallel", "2-Parallel", "3-Parallel", "LP pairs", "Ladder"]
    titles += ["Prune attention", "Prune MLP"]
    rows = read_csv(folder / "cells.csv")
    for operation, title in zip(ALL, titles, strict=True):
        cells = map_named(page, title)
        wanted = {(row["first"], row["last"]): row for row in rows if row["operation"] == operation}
        assert len(cells["at"]) == len(wanted) == 28
        for index, place in enumerate(cells["at"]):
            row, column = divmod(place, len(cells["columns"]))
            cell = wanted[cells["rows"][row], cells["columns"][column]]
            for field in cells["fields"]:
                for key, ending in (("values", ""), ("low", "_low"), ("high", "_high")):
                    assert field[key][index] == pytest.approx(
                        float(cell[field["label"] + ending]), rel=6e-4
                    )
            assert cells["tokens"] == 4000


@pytest.mark.parametrize("others", [(), ("prune", "lp")])
def test_a_map_over_a_parameter(others: tuple[str, ...], tmp_path: Path) -> None:
    keeps = ("0.9", "0.6", "0.2")

    def with_keeps(cells: list[Cell]) -> None:
        layers = [
            cell for cell in cells if cell["operation"] == "prune" and cell["first"] == cell["last"]
        ]
        added = [
            cell
            | {
                "operation": "lowrank",
                "keep": keep,
                "perplexity": 10 * (1.5 - 0.5 * float(keep)) + cell["first"],
            }
            for cell in layers
            for keep in keeps
        ]
        cells[:] = [cell | {"keep": ""} for cell in cells if cell["operation"] in others] + added

    page = page_of(make_scan(tmp_path / "scan", ("prune", "lp"), 5, with_keeps))
    cells = map_named(page, "Low rank")
    assert (cells["rows"], cells["columns"]) == ([f"layer {k}" for k in range(5)], list(keeps))
    assert cells["at"] == list(range(15))
    wanted = [10 * (1.5 - 0.5 * float(keep)) + layer for layer in range(5) for keep in keeps]
    assert cells["fields"][0]["values"] == pytest.approx(wanted)
    assert cells["title"] == "{row}, keep {column}"
    named = (
        "a stretch of layers or a layer and a value of keep" if others else "a layer and a value of keep"
    )
    text = " ".join(re.sub(r"<[^>]*>", " ", render([tmp_path / "scan"])).split())
    assert f"cells, each {named}; " in text
    assert ("First layer of the stretch down" in text) == bool(others)
    assert "Each layer alone, with every value of a parameter." in text


def test_values_can_be_read_without_a_pointer(tmp_path: Path) -> None:
    folder = make_scan(tmp_path / "scan", ("prune",), 5)
    html = render([folder])
    table = re.search(r"<summary>Prune: perplexity</summary>(.*?)</details>", html, re.DOTALL)
    assert table is not None
    shown = [
        re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row)
        for row in re.findall(r"<tr>(.*?)</tr>", table[1], re.DOTALL)
    ]
    assert shown[0][1:] == ["0", "1", "2", "3", "4"]
    for row in read_csv(folder / "cells.csv"):
        value = shown[1 + int(row["first"])][1 + int(row["last"])]
        assert float(value.replace(",", "")) == pytest.approx(float(row["perplexity"]), rel=6e-4)
    assert shown[4][1] == "", "a stretch does not end before it begins"


def test_colours_follow_the_perplexity(tmp_path: Path) -> None:
    def change(cells: list[Cell]) -> None:
        for cell in cells:
            cell["perplexity"] = {(0, 1): BASE * 3.5, (0, 2): math.inf, (1, 1): BASE * 0.9}.get(
                (cell["first"], cell["last"]), cell["perplexity"]
            )

    folder = make_scan(tmp_path / "scan", ("prune",), 5, change)
    image = colours_in(render([folder]), "Prune")
    scale = matplotlib.colormaps["viridis"]
    rows = read_csv(folder / "cells.csv")
    assert image[..., 3].sum() == len(rows), "where there is no stretch there is no colour"
    beyond = to_hex(image[0, 1])
    assert beyond not in {to_hex(scale(i)) for i in range(256)}
    for row in rows:
        ratio = float(row["perplexity"]) / BASE
        colour = image[int(row["first"]), int(row["last"])]
        if ratio > 3:
            assert to_hex(colour) == beyond
            continue
        place = math.sqrt(max(0.0, math.log(ratio)) / math.log(3))
        near = [scale(max(0.0, min(1.0, place + shift / 256))) for shift in (-1, 0, 1)]
        assert min(np.abs(colour - one).max() for one in near) < 1.5 / 255, (row, colour)
    assert image[1, 1] == pytest.approx(scale(0.0), abs=1.5 / 255), (
        "better than the base is as good as the base"
    )


def test_points_of_a_chart(tmp_path: Path) -> None:
    """Further up is worse, and what lies beyond the axis is hollow."""
    folder = make_scan(tmp_path / "scan", ("lp",), 10)
    html = render([folder])
    marks = marks_in(drawing_of(html, "LP pairs: where the stretch ends"))
    rows = {
        (row["first"], row["last"]): float(row["perplexity"]) for row in read_csv(folder / "cells.csv")
    }
    assert len(marks) == sum(10 - length + 1 for length in (2, 4, 6, 8, 10))
    inside, hollow = [], []
    for _, y, is_hollow, tip in marks:
        said = re.fullmatch(r"layers (\d+) to (\d+):.*?perplexity ([\d.,]+) .*", tip)
        assert said is not None
        value = rows[said[1], said[2]]
        assert float(said[3].replace(",", "")) == pytest.approx(value, rel=6e-4)
        if is_hollow:
            hollow.append(value)
        else:
            inside.append((value, -y))
    assert [y for _, y in sorted(inside)] == sorted(y for _, y in inside)
    assert hollow
    assert min(hollow) > max(value for value, _ in inside)
    assert f"{len(hollow)} points of {len(marks)} lie above" in html


def test_a_screened_scan_says_what_each_cell_rests_on(tmp_path: Path) -> None:
    def fewer(cells: list[Cell]) -> None:
        for cell in cells:
            cell["tokens"] = 4000 if cell["first"] else 500

    page = page_of(make_scan(tmp_path / "scan", ("prune",), 4, fewer))
    assert "Screened: a cell rests on 500 to 4,000 of them." in page.text()
    cells = map_named(page, "Prune")
    assert [cells["tokens"][index] for index in range(len(cells["at"]))] == [500] * 4 + [4000] * 6


def test_layers_that_were_not_scanned_are_not_judged(tmp_path: Path) -> None:
    def part(cells: list[Cell]) -> None:
        cells[:] = [cell for cell in cells if cell["first"] >= 2 and cell["last"] <= 6]

    page = page_of(
        make_scan(tmp_path / "scan", ("prune",), 10, part, layers="2:7", every=1, max_length=5)
    )
    assert "Only layers 2 to 6 were scanned." in page.text()
    assert "has 10 layers" in page.text()
    said = page.text("model-1")
    assert "Layer 5: no measured way to remove it" in said
    assert not re.search(r"Layers? (0|1|7|8|9)\b", said)
    assert {place % 10 for place in map_named(page, "What each layer tolerates")["at"]} == {
        2,
        3,
        4,
        5,
        6,
    }


def test_permutations(tmp_path: Path) -> None:
    folder = make_scan(tmp_path / "scan", ("shuffle",), 4)
    orders = [
        {"operation": "shuffle", "first": f, "last": e, "seed": seed, "order": f"{e} {f}",
         "perplexity": 10 * (1 + seed), "divergence": 0.1, "tokens": 4000}
        for f in range(4) for e in range(f, 4) for seed in (0, 1)
    ]  # fmt: skip
    write_csv(folder / "permutations.csv", orders)
    page = page_of(folder)
    assert (
        "the mean over 2 random orders; in half of the cells the worst order's perplexity is more than 2.00 times"
        in (page.text())
    )


def test_similarity(tmp_path: Path) -> None:
    page = page_of(make_similarity(tmp_path / "similarity"))
    text = page.text()
    # 1, 0.2 is least; 3, 0.95 is most; 6 layers have 5 with a layer before them, two of which are named.
    assert "Layers 2 and 3 depend least on the layer before them" in text
    assert "layers 1 and 5 most (down to 0.200)" in text
    best = {
        "length": 0.55,
        "block influence (sum)": 0.75,
        "1 \N{MINUS SIGN} CKA, attention (max)": 0.775,
    }
    name = max(best, key=lambda key: best[key])
    assert (
        f"{name} orders the stretches most like their measured divergence: rank correlation 0.775"
        in text
    )
    cells = map_named(page, "Angle between the streams before and after a stretch")
    values = dict(zip(cells["at"], cells["fields"][0]["values"], strict=True))
    assert values[1 * 6 + 4] == pytest.approx(0.041)


def test_no_proxies_no_claim(tmp_path: Path) -> None:
    folder = make_similarity(tmp_path / "similarity")
    (folder / "proxies.csv").unlink()
    text = page_of(folder).text()
    assert "agrees best" not in text
    assert "Which cheap measure predicts a scan is not known" in text


def test_sensitivity(tmp_path: Path) -> None:
    text = page_of(make_sensitivity(tmp_path / "sensitivity")).text()
    assert (
        "As a single LP pair, 4+5 (0.010) and 3+4 (0.020) change the predictions least, 0+1 (0.50) and 1+2"
        in text
    )
    assert "below the paper's bound in 10 of 10 measurements; the bound is 20 times the error" in text
    assert re.search(r"first order ?0\.990", text)


def test_spectrum(tmp_path: Path) -> None:
    page = page_of(make_spectrum(tmp_path / "spectrum"))
    text = page.text()
    assert (
        "q needs least rank for 95% of its energy (12% of the full rank on average), down most (25%)"
        in text
    )
    assert (
        "1/8 of the rank (whitened) +8.0% (at most +58%, layer 2, down) and 1/2 of the rank (whitened) +2.0%"
        in text
    )
    cells = map_named(page, "One matrix cut down to 1/8 of the rank (whitened)")
    place = cells["rows"].index("down") * len(cells["columns"]) + 2
    assert cells["fields"][0]["values"][cells["at"].index(place)] == pytest.approx(15.8)
    share = map_named(page, "Rank with 95% of the energy of the matrix on its inputs (whitened)")
    assert set(share["fields"][0]["values"]) == {0.125, 0.25}


def test_spectrum_without_damage(tmp_path: Path) -> None:
    folder = make_spectrum(tmp_path / "spectrum")
    header = (folder / "damage.csv").read_text().splitlines()[0]
    (folder / "damage.csv").write_text(header + "\n")
    assert "What lower ranks cost was not measured" in page_of(folder).text()


def test_search(tmp_path: Path) -> None:
    recipe = "surgeon: 1\nmodel: tiny\noperations:\n  - pair: {layers: 3:5}\n"
    page = page_of(make_search(tmp_path / "search", recipe))
    text = page.text()
    assert "Of 4 trials the winner is trial 2 (the best within depth=5), at depth 5: pair 3:5." in text
    assert "0.03000 (95%: 0.02700 to 0.03300) on the text of the search and 0.05000" in text
    assert "On held-out text trial 2 is not told apart: trial 1; trial 2 is better: trial 0." in text
    assert "OVERTURNS" not in text
    assert " ".join(recipe.split()) in page.text("pre")
    assert "4 trials, 1 of them stopped early." in text
    assert "trial 3, depth 5, divergence 3 (estimate, stopped early): pair 0:2" in page.html
    shares = map_named(page, "Which layers the good trials change")
    assert shares["rows"] == ["pair"]
    assert shares["fields"][0]["values"] == [0, 0, 0, 1, 1, 0]  # of the best one
    assert shares["fields"][1]["values"] == [0.25, 0.5, 0.5, 0.5, 0.25, 0]  # of all four
    drawn = page.html[page.html.index("The winner, trial 2") :]
    for step in ("A3", "A4", "F3", "F4"):
        assert f">{step}</text>" in drawn
    assert "layers 0-2" in drawn
    assert ">A0<" not in drawn, "what is as it was is one box"


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        (
            ("not told apart", "not told apart"),
            "On held-out text trial 2 is not told apart: trial 1; trial 2 is not",
        ),
        (
            ("better", "better"),
            "On held-out text trial 2 is better: trial 1; trial 2 is better: trial 0.",
        ),
    ],
)
def test_a_search_is_ahead_only_where_its_interval_excludes_0(
    tmp_path: Path, verdicts: tuple[str, ...], said: str
) -> None:
    text = page_of(make_search(tmp_path / "search", held_out=held_out(verdicts))).text()
    assert said in text
    shown = text.replace("whether scattered edits do better", "").partition("search.json")[0]
    assert ("better" in shown) == ("better" in verdicts)


def test_a_search_that_held_out_text_overturned(tmp_path: Path) -> None:
    text = page_of(
        make_search(tmp_path / "search", held_out=held_out(("worse", "not told apart"), 1))
    ).text()
    assert text.count("HELD-OUT TEXT OVERTURNS THE SEARCH: trial 1 is the winner, not trial 2.") == 2
    assert "and 0.06000" in text, "the number on held-out text is the winner's"


def test_a_search_that_healed_its_candidates(tmp_path: Path) -> None:
    candidates = [
        {"trial": trial, "before": quality_of(seen + 0.02), "after": quality_of(after)}
        for trial, seen, after in ((2, 0.03, 0.021), (1, 0.04, 0.011), (0, 0.05, 0.031))
    ]
    last = "HEALING CHANGES THE CHOICE: trial 1 is the winner"
    healing = {
        "candidates": candidates,
        "winner": 1,
        "changed": True,
        "sentences": ["healed for 9 steps", last],
    }
    text = page_of(make_search(tmp_path / "search", healing=healing)).text()
    assert text.count(f"{last}.") == 2
    assert "healed for 9 steps. HEALING" in text
    assert "and 0.06000" in text, "the winner's number before any healing"
    for value in ("0.02100", "0.01100", "0.03100"):
        assert value in text


def test_a_search_without_held_out_text_or_terms(tmp_path: Path) -> None:
    folder = make_search(tmp_path / "search", held_out=None)
    (folder / "terms.csv").unlink()
    text = page_of(folder).text()
    assert "on the text of the search, where the unedited model's perplexity is 10.00." in text
    assert "held out" not in text
    assert "Each edit alone" not in text


def test_a_front_and_a_curve(tmp_path: Path) -> None:
    folder = make_search(tmp_path / "search", knees=["pair: the knee is at depth 4 of 6"])
    rows = read_csv(folder / "trials.csv")
    write_csv(
        folder / "trials.csv", [{**row, "latency@cpu-2": f"{2 - 0.1 * k}"} for k, row in enumerate(rows)]
    )
    point = {
        "divergence": 0.03,
        "latency@cpu-2": 1.8,
        "trial": 2,
        "depth": 5,
        "edits": "pair 3:5",
        "program": "A0",
    }
    write_csv(folder / "front.csv", [{"point": 1, **point}])
    ends = {"divergence_low": 0.02, "divergence_high": 0.04}
    quality: list[Cell] = [
        {"along": "depth", "space": "pair", "cost": 6, "divergence": 0, "divergence_low": 0, "divergence_high": 0,
         "knee": False, "trial": "", "edits": ""},
        {"along": "depth", "space": "pair", "cost": 5, "divergence": 0.03, **ends, "knee": True, "trial": 2,
         "edits": "pair 3:5"},
    ]  # fmt: skip
    write_csv(folder / "quality.csv", quality)
    page = page_of(folder)
    assert "By pair: the knee is at depth 4 of 6." in page.text()
    assert "The front: 1 program" in page.text()
    assert "point 1: latency@cpu-2 1.800, divergence 0.03000, trial 2: pair 3:5" in page.html
    assert "knee: pair, depth 5: divergence 0.03000 (95%: 0.02000 to 0.04000); pair 3:5" in page.html


def test_evaluations_side_by_side(tmp_path: Path) -> None:
    runs = [make_evaluation(tmp_path / name, value) for name, value in (("one", 0.25), ("two", 0.5))]
    page = page_of(*runs)
    text = page.text()
    assert re.search(r"arc ?acc ?0\.2500 ± 0\.010 ?0\.5000 ± 0\.010", text)
    assert "All evaluations side by side" in text
    assert "0.1235" not in text, "a group stands for its members"
    assert "secret of the machine" not in text
    assert "All evaluations side by side" not in page_of(runs[0]).text()


def test_predictions_are_drawn_and_told(tmp_path: Path) -> None:
    page = page_of(make_prediction(tmp_path / "predicted"))
    text = page.text()
    assert "What programs would cost on h100-sxm" in text
    assert "On h100-sxm, tracks:2 should win most on 8 ranks with batch 1: 1.40" in text
    for tip in ("dense, batch 64: 1.00, does not fit into memory", "tracks:2, batch 64: 1.40<"):
        assert tip in page.html
    assert "tracks:2, batch 1: 1.00" not in page.html  # on one rank there is none
    table = page.html[page.html.index("Every prediction") :]
    assert ">refused<" in table
    assert "80 GB!" in table
    assert "of 64 GB for it" in table


def test_predictions_of_nothing_that_can_be_shared_out(tmp_path: Path) -> None:
    folder = make_prediction(tmp_path / "predicted")
    kept = ("program", "ranks", "batch", "prompt", "new", "there_bytes", "refused")
    rows = [
        {name: value if name in kept else "nan" for name, value in row.items()}
        for row in read_csv(folder / "predict.csv")
    ]
    write_csv(folder / "predict.csv", [row | {"fits": 0} for row in rows])
    page = page_of(folder)
    assert page.html.count(">refused<") == len(rows)
    assert not list(page.maps())
    assert page.count("figure") == 0
    assert Predictions.read(folder).draw(tmp_path) == []


def test_an_exploration_begins_with_commands(tmp_path: Path) -> None:
    (tmp_path / "explored").mkdir()
    exploration().write(tmp_path / "explored")
    page = page_of(make_search(tmp_path / "search"), tmp_path / "explored")
    said = page.text("model-1-1")
    assert said.startswith("What to do next 1. Write it")
    assert all(f"{one.what} {one.why} {one.command}" in said for one in STEPS)
    assert "216 cells of shuffle" in said
    assert "Explored. In 4:05 of 10 minutes, on 4,096 tokens of a.txt." in page.text()
    assert "Search: it has no layers." in page.text()
