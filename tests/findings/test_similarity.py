"""Pictures of similarity and of sensitivity show what is in the tables, edge cases included."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from surgeon.findings.drawing import COLOURS, save
from surgeon.findings.sensitivity import Sensitivity
from surgeon.findings.similarity import Similarity

PALE = "#fff6c2"
BLUE, ORANGE = COLOURS[:2]


def pixels_of(path: Path, colour: str) -> int:
    image = matplotlib.image.imread(path)[..., :3]
    return int((np.abs(image - np.array(to_rgb(colour))).max(-1) < 0.02).sum())


def layers(cka: list[float], debiased: list[float]) -> pd.DataFrame:
    table = pd.DataFrame(
        {"layer": range(len(cka)), "cka_attention": cka, "cka_mlp": [math.nan] * len(cka)}
    )
    table["cka_attention_debiased"], table["cka_mlp_debiased"] = debiased, math.nan
    return table.assign(block_influence=0.1, attention_size=math.nan, mlp_size=math.nan)


def test_lines_of_cka(tmp_path: Path) -> None:
    table = layers([math.nan, 0.5, 0.9, 0.7], [math.nan, 0.4, 0.8, 0.6])
    path = save(Similarity(table).plot(), tmp_path / "a.png")
    attention = pixels_of(path, BLUE)
    swapped = table.rename(columns={"cka_attention": "cka_mlp", "cka_mlp": "cka_attention"})
    other = save(Similarity(swapped).plot(), tmp_path / "b.png")
    assert attention > 2 * pixels_of(other, BLUE)  # what is left is the legend
    assert pixels_of(other, ORANGE) > 2 * pixels_of(path, ORANGE)


def test_a_model_of_one_layer_and_values_below_zero(tmp_path: Path) -> None:
    assert save(Similarity(layers([math.nan], [math.nan])).plot(), tmp_path / "one.png").exists()
    negative = layers([math.nan, 0.1], [math.nan, -0.2])
    assert save(Similarity(negative).plot(), tmp_path / "negative.png").exists()


@pytest.mark.parametrize(("of_layer_0", "is_beyond"), [(0.49, True), (0.1, False)])
def test_distances_beyond_those_of_the_other_layers_are_pale(
    of_layer_0: float, is_beyond: bool, tmp_path: Path
) -> None:
    rows = [(first, last, 0.1 * (last - first + 1)) for first in range(3) for last in range(first, 3)]
    table = pd.DataFrame(rows, columns=["first", "last", "angular_distance"])
    table.loc[table["first"] == 0, "angular_distance"] = of_layer_0
    table = table.assign(angular_distance_last_token=0.1)
    path = save(Similarity(layers([1.0], [1.0]), table).plot("distances"), tmp_path / "d.png")
    assert (pixels_of(path, PALE) > 10_000) == is_beyond
    alone = save(
        Similarity(layers([1.0], [1.0]), table[:1].assign(last=0)).plot("distances"),
        tmp_path / "alone.png",
    )
    assert pixels_of(alone, PALE) < 100


def test_the_best_proxy_of_each_operation_is_printed() -> None:
    rows = [
        (operation, damage, proxy, aggregate, rho, 0.01, 9, equal)
        for operation, values in (
            ("prune", (0.5, 0.9, 0.99, math.nan)),
            ("merge", (0.8, 0.7, 0.99, -0.1)),
        )
        for (proxy, aggregate), rho, equal in zip(
            (("length", ""), ("block_influence", "sum"), ("cka_mlp_debiased", "sum"), ("bound", "max")),
            values,
            (math.nan, 0.2, 0.3, 0.4),
            strict=True,
        )
        for damage in ("divergence", "log_perplexity_ratio")
    ]
    columns = ["operation", "damage", "proxy", "aggregate", "rho", "p", "n", "rho_at_equal_length"]
    found = Similarity(pd.DataFrame(), proxies=pd.DataFrame(rows, columns=columns))
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    (prune,), (merge,) = (
        [line for line in lines if line.startswith(name)] for name in ("prune", "merge")
    )
    assert prune.split() == ["prune", "9", "block_influence", "0.900", "0.500", "bound,", "max", "0.400"]
    assert merge.split() == ["merge", "9", "length", "0.800", "0.800", "bound,", "max", "0.400"]


def test_pairs_with_nothing_to_show_on_a_logarithmic_scale() -> None:
    names = ("bound", "attention_shift", "next_mlp_shift", "first_order", "error", "attention_jacobian")
    table = pd.DataFrame({"first": range(3), **{name: [3.0, 1.0, 2.0] for name in names}})
    table = table.assign(
        mlp_shift=0.0, mlp_jacobian=1.0, next_mlp_jacobian=1.0, divergence=[0.0, 0.1, math.inf]
    )
    table = table.assign(
        divergence_low=[-math.inf, 0.05, math.inf], divergence_high=[math.inf, 0.2, math.inf]
    )
    table = table.assign(
        last=table["first"] + 1, relative_bound=0.3, relative_first_order=0.2, relative_error=0.1
    )
    table = table.assign(perplexity=9.0)
    correlations = pd.DataFrame(
        [("bound", "divergence", 0.5, 0.25, 3), ("error", "divergence", math.nan, math.nan, 3)],
        columns=["predictor", "damage", "rho", "p", "n"],
    )
    found = Sensitivity(table, correlations, record={"errors_within_bound": 5, "errors": 6})
    found.plot().draw_without_rendering()
    out = str(found)
    assert "0.500* (2e-01)" in out
    assert "below the paper's bound in 5 of 6 measurements" in out.replace("\n", " ")
    assert "the bound is 1.0 times the error" in out.replace("\n", " ")
