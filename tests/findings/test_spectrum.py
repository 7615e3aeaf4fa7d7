"""Pictures of a spectrum: what is in them, whatever the numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from surgeon.findings.drawing import save
from surgeon.findings.spectrum import Spectrum, parse_ranks
from tests.selection import case

RANKS = "1/4,1/2,3"
SIZES = {"q": (16, 16), "k": (8, 16)}


def example(layers: int = 3, damage: bool = True, asked: str = RANKS) -> Spectrum:
    """A spectrum whose numbers tell layer, weight and rank."""
    matrices, values, rows = [], [], []
    for layer in range(layers):
        for weight, (outputs, inputs) in SIZES.items():
            full = min(outputs, inputs)
            about = {"layer": layer, "weight": weight}
            ranks = {
                "rank95": full - layer % full,
                "rank95_whitened": 1 + layer % full,
                "kept95": 0.5,
                "kept95_whitened": 0.5,
            }
            sizes = {"out_features": outputs, "in_features": inputs, "full_rank": full}
            matrices.append(about | sizes | ranks)
            for method in ("plain", "whitened"):
                for index in range(full):
                    value = 0.0 if index == full - 1 else 10.0 ** -(index * (layer + 1) / 8)
                    values.append(about | {"method": method, "index": index, "value": value})
            for rank in sorted({rank.resolve(full) for rank in parse_ranks(RANKS)}):
                divergence = (layer + 1) / rank**2 / (10 if weight == "k" else 1)
                kept = (outputs + inputs) * rank / (outputs * inputs)
                rows.append(
                    about | {"method": "whitened", "rank": rank, "full_rank": full, "kept": kept}
                    | {"divergence": divergence, "perplexity": 10 + divergence}
                )  # fmt: skip
    table = pd.DataFrame(rows if damage else [], columns=list(rows[0]))
    record = {"model": "tiny", "tokens_predicted": 1016, "ranks": asked.split(",") if damage else []}
    return Spectrum(pd.DataFrame(matrices), table, pd.DataFrame(values), 10.0, record=record)


def test_damage_is_shown_at_its_layer_and_matrix() -> None:
    figure = example().plot("damage")
    panels = [axes for axes in figure.axes if axes.images]
    titles = ["1/4 of the rank (whitened)", "1/2 of the rank (whitened)", "rank 3 (whitened)"]
    assert [panel.get_title(loc="left") for panel in panels] == [
        f"One matrix cut down to {name}" for name in titles
    ]
    for panel, rank in zip(panels, parse_ranks(RANKS), strict=True):
        shown = panel.images[0].get_array()
        for layer in range(3):
            for row, (weight, size) in enumerate(SIZES.items()):
                expected = (layer + 1) / rank.resolve(min(size)) ** 2 / (10 if weight == "k" else 1)
                assert shown[row, layer] == pytest.approx(10 + expected)
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["q", "k"]


def test_the_page_and_the_file_have_the_same_pictures() -> None:
    found = example()
    pictures = found.pictures()
    for name in ("damage", "rank95"):
        files = [axes.images[0] for axes in found.plot(name).axes if axes.images]
        page = [item.figure.axes[0].images[0] for item in pictures[name].items]
        for one, other in zip(files, page, strict=True):
            np.testing.assert_array_equal(one.to_rgba(one.get_array()), other.to_rgba(other.get_array()))


def test_infinite_damage_is_not_blank() -> None:
    found = example()
    damage = found.damage
    damage.loc[1, "perplexity"] = math.inf
    figure = replace(found, damage=damage.drop(index=2)).plot("damage")
    images = [axes.images[0] for axes in figure.axes if axes.images]
    blank = [int(np.ma.getmaskarray(image.get_array()).sum()) for image in images]
    assert sum(blank) == 1, "only what was not measured"


def test_nothing_but_infinity_can_be_drawn(tmp_path: Path) -> None:
    for value in (10.0, math.inf, 10.3):
        found = example()
        figure = replace(found, damage=found.damage.assign(perplexity=value)).plot("damage")
        assert save(figure, tmp_path / f"{value}.png").stat().st_size > 10_000


def test_ranks_are_shares_of_the_full_one() -> None:
    figure = example().plot("rank95")
    plain, whitened = (axes.images[0].get_array().T for axes in figure.axes if axes.images)
    np.testing.assert_allclose(plain, [[1, 1], [15 / 16, 7 / 8], [14 / 16, 6 / 8]])
    np.testing.assert_allclose(whitened, [[1 / 16, 1 / 8], [2 / 16, 2 / 8], [3 / 16, 3 / 8]])


def test_a_line_for_each_layer() -> None:
    panels = [axes for axes in example().plot("singular-values-plain").axes if axes.lines]
    assert [panel.get_title(loc="left") for panel in panels] == ["q", "k"]
    for panel, full in zip(panels, (16, 8), strict=True):
        assert len(panel.lines) == 3
        line = panel.lines[2].get_xydata()
        assert line.shape == (full, 2)
        np.testing.assert_allclose(line[:-1, 1], 10.0 ** -(np.arange(full - 1) * 3 / 8))
        assert np.isnan(line[-1, 1]), "zero has no place on a logarithmic axis"
        assert panel.get_yscale() == "log"


@pytest.mark.parametrize(
    ("layers", "damage"),
    [
        case(n, damage, default=n == 3 or (n == 70 and damage))
        for n in (1, 3, 70)
        for damage in (True, False)
    ],
)
def test_all_files(layers: int, damage: bool, tmp_path: Path) -> None:
    found = example(layers, damage)
    written = found.draw(tmp_path)
    assert written == [path for path in written if path.stat().st_size > 5000]
    assert len(written) == (4 if damage else 3)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line.split() for line in lines if line.startswith("k "))
    assert row[1:4] == ["8", "x", "16"]
    if layers == 3:
        assert row[4:6] == ["0.88", "0.25"], "medians over layers"
        assert row[6:] == (["0.05", "0.0125", "0.0222"] if damage else [])


@pytest.mark.thorough
def test_many_ranks_take_several_tables() -> None:
    lines = str(example(asked=f"{RANKS},8,0.4999,2")).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[6:] for line in lines if line.startswith("k ")] == [
        ["0.05", "0.0125", "0.0222", "nan"], ["0.0125", "0.05"]
    ]  # fmt: skip
