"""Numbers that sum up singular values, against what they are by definition."""

from __future__ import annotations

import numpy as np
import pytest

from surgeon.analysis.factors.lowrank import effective_rank, energy_rank, kept_parameters


def test_energy_ranks() -> None:
    values = np.sort(np.abs(np.random.default_rng(3).standard_normal(30)))[::-1]
    for share in (0.5, 0.9, 0.95, 0.99, 1.0):
        energies = [sum(value**2 for value in values[:rank]) for rank in range(31)]
        wanted = next(rank for rank in range(31) if energies[rank] >= share * energies[-1] - 1e-9)
        assert energy_rank(values, share) == wanted
    assert energy_rank(np.sqrt(np.array([5.0, 4.0, 1.0])), 0.9) == 2, "reached exactly"
    assert energy_rank(np.sqrt(np.array([0.3, 0.3, 0.3, 0.1])), 0.9) == 3, "reached exactly, but for rounding"
    assert energy_rank(np.ones(10), 0.91) == 10
    assert energy_rank(np.zeros(4), 0.9) == 0
    assert energy_rank(np.array([2.0, 0.0]), 1.0) == 1


def test_effective_rank_and_parameters() -> None:
    assert effective_rank(np.full(7, 0.3)) == pytest.approx(7)
    assert effective_rank(np.array([5.0, 0.0, 0.0])) == pytest.approx(1)
    assert effective_rank(np.array([3.0, 1.0])) == pytest.approx(4 / 3**0.75)  # entropy log 4 - 3/4 log 3
    assert effective_rank(np.zeros(3)) == 0
    assert kept_parameters(8, 32, 4) == pytest.approx(160 / 256)
    assert kept_parameters(8, 8, 6) == pytest.approx(1.5)
