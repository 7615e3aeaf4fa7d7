"""From per-window values to reported numbers, at the edges of what floats can say."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import numpy as np
import pytest

from surgeon.quality.summary import Quality, interval, mean_divergence, perplexity, pool_windows

PACKAGE = Path(__file__).resolve().parents[2] / "surgeon"


def test_perplexity_is_exp_of_the_mean() -> None:
    assert perplexity(np.log([2.0, 8.0])) == pytest.approx(4.0)
    assert perplexity(np.array([1e6, 0.0])) == math.inf
    assert perplexity(np.array([math.nan, 1.0])) == math.inf


def test_divergence_is_a_mean_that_rounding_does_not_make_negative() -> None:
    assert mean_divergence(np.array([0.1, 0.3])) == pytest.approx(0.2)
    assert mean_divergence(np.array([-1e-9, 0.0])) == 0.0
    assert mean_divergence(np.array([math.inf, 0.0])) == math.inf
    assert mean_divergence(np.array([math.nan])) == math.inf


def test_the_interval_covers_the_true_mean_19_times_in_20() -> None:
    dice = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        low, high = interval(dice.exponential(size=40))
        covered += low < 1.0 < high
    assert 0.90 < covered / 2000 < 0.97  # exponential values are skewed, which costs a little
    assert interval(np.array([0.5])) == (-math.inf, math.inf)
    assert interval(np.array([0.5, math.inf])) == (-math.inf, math.inf)
    assert interval(np.array([0.5, 0.5])) == (0.5, 0.5)


def test_windows_of_unlike_counts_have_the_mean_and_the_interval_of_all_that_was_counted() -> None:
    values, counts = np.array([1.0, 2.0, 4.0]), np.array([10.0, 1.0, 5.0])
    assert pool_windows(values, counts).mean() == pytest.approx(np.average(values, weights=counts))
    assert pool_windows(values, np.full(3, 7.0)) == pytest.approx(values)
    dice, covered = np.random.default_rng(0), 0
    # What windows count for is part of their values: 5 / 3 over all that is counted, not 3 / 2.
    for _ in range(400):
        counts = dice.integers(1, 3, size=60).astype(float)
        low, high = interval(pool_windows(counts + dice.normal(size=60) / counts**0.5, counts))
        covered += low < 5 / 3 < high
    assert 0.92 < covered / 400 < 0.98


def test_a_quality_is_one_type() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                fields = {each.target.id for each in node.body
                          if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}  # fmt: skip
                if "perplexity" in fields:
                    found.add(node.name)
    assert found == {"Quality"}


def test_what_is_not_known_stays_unknown() -> None:
    found = Quality(7.5, 7.0, 8.0, tokens=40)
    stored = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (stored["perplexity"], stored["perplexity_interval"]) == (7.5, [7.0, 8.0])
    assert (stored["divergence"], stored["divergence_interval"]) == (None, None)
    again = Quality.from_json(stored)
    assert again == found
    assert not again.knows("divergence")
    assert again.line() == "perplexity 7.5 (7 to 8) over 40 tokens"
    assert list(again.table()["metric"]) == ["perplexity"]
    assert math.isnan(again.estimates["divergence_low"])
