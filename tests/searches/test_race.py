"""When a program is stopped: against Student's t by hand, and never for a tie."""

from __future__ import annotations

import numpy as np
import pytest

from surgeon.searches import evaluate
from surgeon.searches.evaluate import ROUNDING, blocks_per_window, is_lost

BEST = np.array([0.10, 0.20, 0.15, 0.12])


def test_the_rule_is_a_one_sided_paired_t_test_with_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantiles of Student's t with 3 degrees of freedom, from a table: 2.353 for 5%, 4.541 for 1%."""
    noise = np.array([0.01, -0.01, 0.02, -0.02])
    error = noise.std(ddof=1) / 2
    for alpha, quantile in ((0.05, 2.353), (0.01, 4.541)):
        monkeypatch.setattr(evaluate, "ALPHA", alpha)
        monkeypatch.setattr(evaluate, "MARGIN", 0.1)
        for factor, lost in ((0.99, False), (1.01, True)):
            own = BEST * 1.1 + ROUNDING + noise + factor * quantile * error
            assert is_lost(own, BEST) is lost


def test_blocks_of_a_window_count_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a correlation of 0.25, two blocks of a window have 1.25 times the variance of two independent ones."""
    noise = np.array([0.01, -0.01, 0.02, -0.02])
    error = noise.std(ddof=1) / 2 * 1.25**0.5
    monkeypatch.setattr(evaluate, "ALPHA", 0.05)
    monkeypatch.setattr(evaluate, "MARGIN", 0)
    for factor, lost in ((0.99, False), (1.01, True)):
        assert is_lost(BEST + ROUNDING + noise + factor * 2.353 * error, BEST, blocks=2) is lost


def test_ties_and_what_is_nearly_as_good_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "ALPHA", 0.4)
    assert not is_lost(BEST, BEST)
    assert not is_lost(BEST + 1e-7, BEST)  # rounding
    assert not is_lost(BEST * 1.0099, BEST)
    assert is_lost(BEST * 1.02 + 1e-5, BEST)
    assert not is_lost(BEST * 0.5, BEST)
    assert not is_lost(np.zeros(4), np.zeros(4))


def test_one_value_says_nothing() -> None:
    assert not is_lost(BEST[:1] + 10, BEST[:1])


def test_what_is_no_number_loses_at_once_unless_the_best_is_none_either() -> None:
    for nothing in (np.nan, np.inf):
        broken = np.array([0.1, nothing])
        assert is_lost(broken, BEST[:2])
        assert not is_lost(broken, broken)


def test_few_windows_are_cut_into_blocks() -> None:
    assert blocks_per_window(16, 511) == 7
    assert blocks_per_window(64, 511) == 4  # 256 values are enough
    assert blocks_per_window(1000, 511) == 1
    assert blocks_per_window(16, 40) == 1
