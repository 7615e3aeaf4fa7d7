"""What is concluded from a cell's values on all or on some of the windows."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from surgeon.quality.summary import estimate, perplexity_interval

GENERATOR = np.random.default_rng(0)
BASE = GENERATOR.normal(2.5, 0.6, 40)  # windows differ by far more than programs do
NLL = BASE + GENERATOR.normal(0.3, 0.05, 40)
DIVERGENCE = GENERATOR.uniform(0.1, 0.4, 40)
EVERYTHING = range(40)


def test_on_all_windows() -> None:
    found = estimate(NLL, DIVERGENCE, BASE, EVERYTHING)
    assert found.perplexity == pytest.approx(math.exp(statistics.fmean(NLL)))
    low, high = stats.ttest_1samp(NLL, 0).confidence_interval(0.95)
    assert (found.perplexity_low, found.perplexity_high) == pytest.approx(
        (math.exp(low), math.exp(high))
    )
    assert found.divergence == pytest.approx(statistics.fmean(DIVERGENCE))
    low, high = stats.ttest_1samp(DIVERGENCE, 0).confidence_interval(0.95)
    assert (found.divergence_low, found.divergence_high) == pytest.approx((low, high))


def test_all_windows_need_no_base() -> None:
    assert estimate(NLL, DIVERGENCE) == estimate(NLL, DIVERGENCE, BASE, EVERYTHING)


def test_on_some_windows_the_base_makes_them_comparable() -> None:
    easy = [int(place) for place in np.argsort(BASE)[:10]]
    found = estimate(NLL[easy], DIVERGENCE[easy], BASE, easy)
    ratio = math.exp(statistics.fmean(NLL[easy] - BASE[easy]))
    assert found.perplexity == pytest.approx(math.exp(statistics.fmean(BASE)) * ratio)
    everywhere = math.exp(statistics.fmean(NLL))
    assert found.perplexity == pytest.approx(everywhere, rel=0.05)
    assert math.exp(statistics.fmean(NLL[easy])) < 0.6 * everywhere, (
        "which the mean over these windows is not"
    )
    assert found.perplexity_low < found.perplexity < found.perplexity_high
    assert found.divergence == pytest.approx(statistics.fmean(DIVERGENCE[easy]))


def test_the_interval_on_some_windows_holds_as_often_as_it_says() -> None:
    """Many samples of a known population: how often the truth lies inside, and where the width comes from."""
    generator = np.random.default_rng(1)
    held, trials = 0, 2000
    for _ in range(trials):
        base = generator.normal(2.0, 0.5, 24)
        nll = 1.2 * base + generator.normal(0.1, 0.2, 24)
        some = range(8)
        found = estimate(nll[:8], nll[:8] * 0, base, some)
        held += found.perplexity_low <= math.exp(1.2 * 2.0 + 0.1) <= found.perplexity_high
    assert 0.93 < held / trials < 0.98


def test_where_there_is_no_interval() -> None:
    one = estimate(NLL[:1], DIVERGENCE[:1], BASE, [0])
    assert one.perplexity == pytest.approx(math.exp(statistics.fmean(BASE) + NLL[0] - BASE[0]))
    overflow = np.array([1.0, math.inf, 2.0])
    lost = estimate(overflow, np.array([0.1, math.nan, 0.1]), BASE, [0, 1, 2])
    assert lost.perplexity == lost.divergence == math.inf
    for found in (one, lost):
        ends = (found.perplexity_low, found.perplexity_high, found.divergence_low, found.divergence_high)
        assert all(map(math.isnan, ends))


def test_numbers_too_large_for_exp() -> None:
    found = estimate(BASE + np.linspace(600, 800, 40), DIVERGENCE, BASE, EVERYTHING)
    assert math.isfinite(found.perplexity_low)
    assert found.perplexity == found.perplexity_high == math.inf


def test_divergence_is_never_below_zero() -> None:
    found = estimate(NLL, GENERATOR.normal(1e-8, 1e-6, 40), BASE, EVERYTHING)
    assert found.divergence_low == 0.0 <= found.divergence <= found.divergence_high


def test_the_base_has_an_interval_too() -> None:
    low, high = stats.ttest_1samp(BASE, 0).confidence_interval(0.95)
    assert perplexity_interval(BASE) == pytest.approx((math.exp(low), math.exp(high)))
    assert perplexity_interval(BASE[:1]) is None
