"""Proxies of stretches against hand-made tables, and rank correlation against its definition."""

from __future__ import annotations

import json
import math
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from surgeon.analysis.similarity import (
    correlate,
    damages,
    proxy_values,
    rank_correlation,
    read_scan,
    readers,
)
from surgeon.findings.sensitivity import Sensitivity
from surgeon.findings.similarity import Similarity

LAYERS = 4
BASE = 8.0


def stretches() -> list[tuple[int, int]]:
    return [(first, last) for first in range(LAYERS) for last in range(first, LAYERS)]


@pytest.fixture
def found() -> Similarity:
    layers = pd.DataFrame({"layer": range(LAYERS), "block_influence": [0.9, 0.1, 0.2, 0.3]})
    layers["attention_size"], layers["mlp_size"] = [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]
    layers["cka_attention"], layers["cka_mlp"] = [math.nan, 0.2, 0.9, 0.6], [math.nan, 0.5, 0.7, 0.8]
    layers["cka_attention_debiased"], layers["cka_mlp_debiased"] = (
        layers["cka_attention"] / 2,
        layers["cka_mlp"] / 2,
    )
    distances = pd.DataFrame(stretches(), columns=["first", "last"])
    for place, name in enumerate(("angular_distance", "angular_distance_last_token", "cosine_distance")):
        distances[name] = distances["first"] * 10 + distances["last"] + place / 10
    return Similarity(layers, distances)


def write_scan(folder: Path, cells: list[tuple[Any, ...]], **record: Any) -> None:
    columns = ["operation", "first", "last", "perplexity", "divergence"]
    pd.DataFrame(cells, columns=columns).assign(tokens=10).to_csv(
        folder / "cells.csv", index=False, na_rep="nan"
    )
    (folder / "scan.json").write_text(
        json.dumps({"model_hash": "ours", "model": "it", "base_perplexity": BASE} | record)
    )


@pytest.mark.parametrize(
    ("operation", "first", "last", "expected"),
    [
        ("prune", 1, 2, [2, 3]),
        ("prune", 3, 3, []),
        ("prune", 0, 0, [1]),
        ("parallel", 0, 2, [1, 2]),
        ("merge", 2, 2, []),
        ("2-parallel", 0, 3, [1, 3]),
        ("2-parallel", 0, 2, [1]),
        ("3-parallel", 0, 3, [1, 2]),
        ("lp", 0, 2, [1]),
        ("ladder", 0, 2, [1, 2]),
        ("ladder", 1, 2, [1, 2]),
        ("prune-mlp", 1, 1, [2]),
    ],
)
def test_readers(operation: str, first: int, last: int, expected: list[int]) -> None:
    assert readers(operation, first, last, LAYERS) == expected


def test_proxies_of_a_stretch(found: Similarity) -> None:
    cells = pd.DataFrame(
        [("prune", 0, 1), ("2-parallel", 0, 3), ("parallel", 1, 1)],
        columns=["operation", "first", "last"],
    )
    pairs = pd.DataFrame({"first": [0, 1, 2], "last": [1, 2, 3], "bound": [5.0, 7.0, 11.0]})
    for name in ("relative_bound", "relative_first_order", "relative_error"):
        pairs[name] = 0.0
    values = proxy_values(cells, found, pairs)
    assert values["length", ""].tolist() == [2, 4, 1]
    assert values["block_influence", "sum"] == pytest.approx([1.0, 1.5, 0.1])
    assert values["mlp_size", "sum"] == pytest.approx([7, 10, 3])
    assert values["angular_distance", ""] == pytest.approx([1, 3, 11])
    assert values["cosine_distance", ""] == pytest.approx([1.2, 3.2, 11.2])
    nan = math.nan  # one layer in parallel with itself robs nobody
    assert values["cka_attention", "sum"] == pytest.approx([0.8 + 0.1, 0.8 + 0.4, nan], nan_ok=True)
    assert values["cka_attention", "mean"] == pytest.approx([0.45, 0.6, nan], nan_ok=True)
    assert values["cka_mlp", "max"] == pytest.approx([0.5, 0.5, nan], nan_ok=True)
    assert values["cka_mlp_debiased", "sum"] == pytest.approx(
        [0.75 + 0.65, 0.75 + 0.6, nan], nan_ok=True
    )
    assert values["bound", "sum"] == pytest.approx([12, 16, nan], nan_ok=True)


def test_the_proxy_that_orders_like_the_damage_wins(found: Similarity, tmp_path: Path) -> None:
    order = found.distances.set_index(["first", "last"])["angular_distance"]
    # The same order, another scale.
    divergence = {stretch: float(order[stretch]) ** 3 for stretch in stretches()}
    cells = [
        ("prune", *stretch, BASE * math.exp(-order[stretch]), divergence[stretch] + 1)
        for stretch in stretches()
    ]
    write_scan(tmp_path, cells)
    table = correlate(damages(read_scan(tmp_path, "ours")), found).set_index(
        ["damage", "proxy", "aggregate"]
    )
    assert table.loc[("divergence", "angular_distance", ""), "rho"] == pytest.approx(1)
    assert table.loc[("log_perplexity_ratio", "angular_distance", ""), "rho"] == pytest.approx(-1)
    assert table.loc[("divergence", "angular_distance", ""), "rho_at_equal_length"] == pytest.approx(1)
    assert math.isnan(table.loc[("divergence", "length", ""), "rho_at_equal_length"])
    # Pruning the last layer robs nobody.
    assert table.loc[("divergence", "cka_mlp", "sum"), "n"] == len(cells) - 1


def test_cells_that_measure_nothing_of_their_own_are_left_out(tmp_path: Path) -> None:
    cells = [
        ("2-parallel", 0, 0, BASE, 0.0),  # one layer beside nothing: unchanged
        ("2-parallel", 0, 1, 9.0, 0.5),
        ("2-parallel", 0, 2, 9.0, 0.5),  # the odd layer stays: the same program again
        ("2-parallel", 1, 2, 9.0, 0.5),  # the same numbers, of another stretch
        ("prune", 0, 1, 9.0, 0.5),
        ("prune", 0, 2, math.inf, math.inf),
    ]
    write_scan(tmp_path, cells)
    own = damages(read_scan(tmp_path, "ours"))
    kept = list(zip(own["operation"], own["first"], own["last"], strict=True))
    assert kept == [("2-parallel", 0, 1), ("2-parallel", 1, 2), ("prune", 0, 1), ("prune", 0, 2)]
    ratios = own["log_perplexity_ratio"].tolist()
    assert ratios == pytest.approx([math.log(9 / 8)] * 3 + [math.inf])


def by_definition(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rho of values without ties."""
    ranks = [np.array([(values < value).sum() for value in values]) for values in (x, y)]
    n = len(x)
    return 1 - 6 * ((ranks[0] - ranks[1]) ** 2).sum() / (n * (n**2 - 1))


def test_rank_correlation_is_spearmans() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=50)
    y = x + random.normal(size=50)
    found = rank_correlation(np.exp(x), y)
    assert (found.rho, found.n) == (pytest.approx(by_definition(x, y)), 50)
    assert found.p < 1e-4
    holes = rank_correlation([math.nan, *x, 3.0], [1.0, *y, math.nan])
    assert (holes.rho, holes.n) == (pytest.approx(found.rho), 50)


def test_partial_correlation_is_that_of_what_the_third_leaves() -> None:
    random = np.random.default_rng(1)
    third = random.permutation(200).astype(float)
    x, y = (third + random.normal(scale=40, size=200) for _ in range(2))
    found = rank_correlation(x, y, third)
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in (x, y, third)]
    rest = [r - np.polyval(np.polyfit(ranks[2], r, 1), ranks[2]) for r in ranks[:2]]
    assert found.rho > 0.5
    assert found.rho_given == pytest.approx(np.corrcoef(*rest)[0, 1])
    assert rank_correlation(x, y, np.ones(200)).rho_given == pytest.approx(found.rho)


def test_ranks_of_infinite_and_of_constant_values() -> None:
    assert rank_correlation([1, 2, 3, 4], [1, 2, 3, math.inf]).rho == pytest.approx(1)
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]).rho)
    assert math.isnan(rank_correlation([1, 2], [1, 2]).rho)


def test_p_of_a_few_values_is_exact() -> None:
    assert rank_correlation([1, 2, 3, 4], [8, 6, 5, 1]).p == pytest.approx(2 / 24)
    x, y = np.arange(6.0), np.array([1.0, 0, 2, 4, 3, 5])
    assert by_definition(x, y) == pytest.approx(31 / 35)
    found = [abs(by_definition(x, np.array(order))) for order in permutations(range(6))]
    assert rank_correlation(x, y).p == pytest.approx(np.mean(np.array(found) >= 31 / 35 - 1e-9))
    assert rank_correlation(range(10), range(10)).p == pytest.approx(2 / math.factorial(10))


def test_a_scan_with_an_operation_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """Which layers it robs of what the layers before them add cannot be told."""
    write_scan(tmp_path, [("prune", 0, 0, 9.0, 0.5), ("4-parallel", 0, 0, 9.0, 0.5)])
    with pytest.raises(
        ValueError,
        match="cells.csv has '4-parallel' in column operation, line 3; did you mean '3-parallel'",
    ):
        read_scan(tmp_path, "ours")


def test_maps_that_are_not_over_stretches_are_left_out(tmp_path: Path) -> None:
    write_scan(
        tmp_path, [("prune", 0, 1, 9.0, 0.5), ("lowrank", 1, 1, 8.5, 0.1), ("lowrank", 1, 1, 8.2, 0.05)]
    )
    assert damages(read_scan(tmp_path, "ours"))["operation"].tolist() == ["prune"]
    write_scan(tmp_path, [("lowrank", 1, 1, 8.5, 0.1)])
    with pytest.raises(ValueError, match="has no map over stretches of layers; scan one, such as prune"):
        read_scan(tmp_path, "ours")


def test_a_scan_of_another_model_is_refused(tmp_path: Path) -> None:
    write_scan(tmp_path, [("prune", 0, 0, 9.0, 0.1)], model_hash="t" * 64, model="theirs")
    with pytest.raises(
        ValueError, match="scan of another model: theirs with the hash tttttttttttt, .* has ours;"
    ):
        read_scan(tmp_path, "ours")
    (tmp_path / "sensitivity.json").write_text(json.dumps({"model_hash": "other", "model": "theirs"}))
    with pytest.raises(ValueError, match="sensitivity of another model"):
        Sensitivity.read(tmp_path, "ours")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "scan.json").unlink(),
            "has no scan.json; give the output folder of a finished",
        ),
        (
            lambda folder: (folder / "cells.csv").unlink(),
            "but no cells.csv; run surgeon scan to its end",
        ),
        (lambda folder: (folder / "cells.csv").write_text(""), "no table of comma-separated"),
        (
            lambda folder: (folder / "cells.csv").write_text("operation,first\nprune,0\n"),
            "has no column last",
        ),
        (
            lambda folder: (folder / "scan.json").write_text('{"model_hash": "ours"}'),
            "no base_perplexity",
        ),
    ],
)
def test_damaged_scans(damage: Any, message: str, tmp_path: Path) -> None:
    write_scan(tmp_path, [("prune", 0, 0, 9.0, 0.1)])
    damage(tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        read_scan(tmp_path, "ours")


def test_operations_are_told_apart(found: Similarity) -> None:
    rows = [(name, *stretch) for name in ("prune", "merge") for stretch in stretches()]
    cells = pd.DataFrame(rows, columns=["operation", "first", "last"])
    length = cells["last"] - cells["first"] + 1.0
    cells["divergence"] = length.where(cells["operation"] == "prune", -length)
    cells["log_perplexity_ratio"] = cells["divergence"]
    table = correlate(cells, found)
    rho = table[table["proxy"] == "length"].set_index(["operation", "damage"])["rho"]
    assert rho["prune", "divergence"] == pytest.approx(1)
    assert rho["merge", "divergence"] == pytest.approx(-1)
