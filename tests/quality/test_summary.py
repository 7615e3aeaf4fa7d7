"""From per-window values to reported numbers, at the edges of what floats can say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from surgeon.quality.summary import interval, mean_divergence, perplexity


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
