"""Ranks under a budget, against all ways there are to share it out."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.factors.ranks import (
    Curve,
    Ranks,
    allocate,
    by_damage,
    correct_curves,
    effective_rank,
    energy_rank,
    foreseen_damage,
    kept_parameters,
    parameters,
    total_cost,
    wire_values,
)
from surgeon.analysis.spectrum import SingularValues, Truncation, curves_of

SIZES = {"q": (12, 12), "k": (4, 12), "up": (16, 12), "down": (12, 16)}


def curve(layer: int, weight: str, seed: int, damage_scale: float = 1.0) -> Curve:
    """A matrix whose damage is a power of the energy that it loses."""
    draws = np.random.default_rng(seed)
    size = SIZES[weight]
    values = np.sort(draws.exponential(size=min(size)))[::-1]
    lost = 1 - np.cumsum(values**2) / (values**2).sum()
    damage = {rank: damage_scale * float(lost[rank - 1]) ** 1.3 for rank in (1, 2, min(size) // 2)}
    return Curve(Matrix.of(layer, weight), size, values, damage)


CURVES = [curve(0, "q", 1), curve(0, "k", 2, 0.3), curve(1, "up", 3, 2.0), curve(1, "down", 4)]


def every_way(curves: list[Curve]) -> list[Ranks]:
    ranks = [[*one.useful_ranks(), None] for one in curves]
    return [dict(zip((one.matrix for one in curves), some, strict=True)) for some in product(*ranks)]


def test_damage_between_and_beyond_measured_ranks() -> None:
    one = curve(0, "q", 7, 3.0)
    found, lost = one.damage_by_rank(), one.lost_energy()
    for rank, measured in one.damage.items():
        assert found[rank] == pytest.approx(measured)
    assert (np.diff(found) <= 0).all()
    assert found[-1] == 0
    assert found[4] == pytest.approx(3.0 * lost[4] ** 1.3), "the same power between measured ranks"
    assert found[9] == pytest.approx(found[6] * lost[9] / lost[6]), "proportional beyond them"
    assert found[0] == pytest.approx(found[1] * lost[0] / lost[1])


def test_noise_does_not_make_a_higher_rank_look_worse() -> None:
    noisy = Curve(CURVES[0].matrix, (12, 12), CURVES[0].values, {2: 0.5, 3: 0.7, 5: -0.1})
    found = noisy.damage_by_rank()
    assert found[2] == found[3] == pytest.approx(0.7)
    assert found[5] == pytest.approx(1e-12)
    assert (np.diff(found) <= 0).all()


def test_a_matrix_of_zeros_costs_least() -> None:
    zeros = Curve(Matrix.of(3, "q"), (12, 12), np.zeros(12), {2: 0.0})
    ranks = allocate([*CURVES, zeros], "damage", 400)
    assert ranks[zeros.matrix] == 1


def test_ranks_by_damage_are_the_best_there_are() -> None:
    """But for what is lost between points of the hulls, less than one step of them."""
    whole = total_cost(CURVES, dict.fromkeys((one.matrix for one in CURVES), None))
    damage = {one.matrix: one.damage_by_rank() for one in CURVES}
    ways = [
        (
            total_cost(CURVES, way),
            sum(damage[matrix][rank] for matrix, rank in way.items() if rank is not None),
        )
        for way in every_way(CURVES)
    ]
    for share in (0.2, 0.3, 0.5, 0.7, 0.9, 1.0):
        budget = share * whole
        ranks = by_damage(CURVES, budget)
        assert total_cost(CURVES, ranks) <= budget
        best = min(harm for paid, harm in ways if paid <= budget)
        assert best <= foreseen_damage(CURVES, ranks) < best * 1.1 + 1e-12
    assert not any(ranks.values())


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_damage_is_least_where_damage_decides(share: float) -> None:
    budget = share * sum(out * inside for out, inside in (one.size for one in CURVES))
    found = {how: allocate(CURVES, how, budget) for how in ("uniform", "energy", "damage")}
    assert all(total_cost(CURVES, ranks) <= budget for ranks in found.values())
    damages = {how: foreseen_damage(CURVES, ranks) for how, ranks in found.items()}
    assert damages["damage"] <= min(damages["uniform"], damages["energy"])


def test_uniform_and_equal_energy() -> None:
    whole = sum(out * inside for out, inside in (one.size for one in CURVES))
    uniform = allocate(CURVES, "uniform", 0.5 * whole)
    for one in CURVES:
        rank = uniform[one.matrix]
        assert rank is not None
        assert parameters(one, rank) <= 0.5 * one.size[0] * one.size[1] < parameters(one, rank + 1)
    energy = allocate(CURVES, "energy", 0.5 * whole)
    by_share = [
        {one.matrix: max(1, energy_rank(one.values, step / 1000)) for one in CURVES}
        for step in range(1001)
    ]
    fitting = [ranks for ranks in by_share if total_cost(CURVES, ranks) <= 0.5 * whole]
    assert energy == fitting[-1]
    assert total_cost(CURVES, allocate(CURVES, "uniform", whole)) <= whole


def test_budgets_in_bytes_and_on_the_wire() -> None:
    half = 0.5 * sum(out * inside for out, inside in (one.size for one in CURVES))
    in_two_bytes = allocate(CURVES, "damage", 2 * half, lambda curve, rank: 2 * parameters(curve, rank))
    assert in_two_bytes == allocate(CURVES, "damage", half)
    down, others = CURVES[3], CURVES[:3]
    assert wire_values(down, None) == 2 * 12
    assert wire_values(down, 5) == 2 * 5
    assert [wire_values(one, 3) for one in others] == [3, 3, 3]
    ranks = allocate(CURVES, "damage", 2 * 5, wire_values)
    assert ranks == {**{one.matrix: None for one in others}, down.matrix: 5}, (
        "what reads the stream sends nothing whole"
    )


def test_what_layers_do_together_moves_ranks() -> None:
    budget = 0.5 * sum(out * inside for out, inside in (one.size for one in CURVES))
    before = allocate(CURVES, "damage", budget)
    asked: list[Ranks] = []

    def together(ranks: Ranks) -> float:
        asked.append(ranks)
        (layer,) = {matrix.layer for matrix in ranks}
        return foreseen_damage([one for one in CURVES if one.matrix in ranks], ranks) * (
            9.0 if layer == 0 else 1.0
        )

    again = correct_curves(CURVES, before, together)
    assert [one.weight for one in again] == pytest.approx([9, 9, 1, 1])
    assert asked == [{m: before[m] for m in before if m.layer == layer} for layer in (0, 1)]
    assert [one.weight for one in correct_curves(again, before, together)] == pytest.approx(
        [9, 9, 1, 1]
    ), "not twice"
    after = allocate(again, "damage", budget)
    assert total_cost(CURVES[:2], after) > total_cost(CURVES[:2], before)


def test_curves_of_a_spectrum() -> None:
    matrix = Matrix.of(2, "k")
    values = {"plain": np.array([3.0, 2, 1, 0]), "whitened": np.array([9.0, 1, 1, 1])}
    spectra = {matrix: SingularValues((4, 12), values, "cholesky", 12)}
    measured = {
        Truncation(matrix, "whitened", 2): {"nll": np.zeros(2), "divergence": np.array([0.1, 0.3])},
        Truncation(matrix, "plain", 1): {"nll": np.zeros(2), "divergence": np.array([0.7, 0.9])},
    }
    (whitened,) = curves_of(spectra, measured, "whitened")
    assert (whitened.size, whitened.damage, whitened.values[0]) == ((4, 12), {2: pytest.approx(0.2)}, 9)
    (plain,) = curves_of(spectra, measured, "plain")
    assert (plain.damage, plain.values[0]) == ({1: pytest.approx(0.8)}, 3)


def test_what_cannot_be_allocated() -> None:
    with pytest.raises(
        ValueError, match="a budget of 10 is below 96, which rank 1 of every matrix costs"
    ):
        allocate(CURVES, "damage", 10)
    with pytest.raises(ValueError, match="a budget of 10 is below 96"):
        allocate(CURVES, "uniform", 10)
    with pytest.raises(
        ValueError, match="no damage was measured of q of layer 0; measure some of its ranks"
    ):
        allocate([Curve(CURVES[0].matrix, (12, 12), CURVES[0].values)], "damage", 100)
    with pytest.raises(ValueError, match="there is no allocation 'uniforn'; did you mean 'uniform'?"):
        allocate(CURVES, "uniforn", 100)  # type: ignore[arg-type]


def test_energy_ranks() -> None:
    values = np.sort(np.abs(np.random.default_rng(3).standard_normal(30)))[::-1]
    for share in (0.5, 0.9, 0.95, 0.99, 1.0):
        energies = [sum(value**2 for value in values[:rank]) for rank in range(31)]
        wanted = next(rank for rank in range(31) if energies[rank] >= share * energies[-1] - 1e-9)
        assert energy_rank(values, share) == wanted
    assert energy_rank(np.sqrt(np.array([5.0, 4.0, 1.0])), 0.9) == 2, "reached exactly"
    assert energy_rank(np.sqrt(np.array([0.3, 0.3, 0.3, 0.1])), 0.9) == 3, (
        "reached exactly, but for rounding"
    )
    assert energy_rank(np.ones(10), 0.91) == 10
    assert energy_rank(np.zeros(4), 0.9) == 0
    assert energy_rank(np.array([2.0, 0.0]), 1.0) == 1


def test_effective_rank_and_parameters() -> None:
    assert effective_rank(np.full(7, 0.3)) == pytest.approx(7)
    assert effective_rank(np.array([5.0, 0.0, 0.0])) == pytest.approx(1)
    # Entropy log 4 - 3/4 log 3.
    assert effective_rank(np.array([3.0, 1.0])) == pytest.approx(4 / 3**0.75)
    assert effective_rank(np.zeros(3)) == 0
    assert kept_parameters(8, 32, 4) == pytest.approx(160 / 256)
    assert kept_parameters(8, 8, 6) == pytest.approx(1.5)
