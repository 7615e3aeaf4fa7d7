"""Whitened and plain truncation against the formulas written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from surgeon.analysis.lowrank import decompose, effective_rank, energy_rank, kept_parameters, truncate
from surgeon.analysis.whitening import SecondMoment, Whitening, whiten

SIZES = [(12, 20), (20, 12), (16, 16)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int, features: int) -> Tensor:
    """Inputs of very different sizes, with directions that vary together and a mean."""
    mixed = draw(tokens, features, seed=1) @ draw(features, features, seed=2)
    return mixed * torch.logspace(-2, 2, features, dtype=torch.float64) + 3


def whitening_of(samples: Tensor, batches: int = 3) -> Whitening:
    moment = SecondMoment(samples.shape[1])
    for batch in samples.tensor_split(batches):
        moment.add(batch[None])
    assert moment.samples == len(samples)
    return whiten(moment)


def output_error(samples: Tensor, matrix: Tensor, other: Tensor) -> float:
    return float(np.linalg.norm(samples.numpy() @ (matrix - other).numpy().T))


@pytest.mark.parametrize("size", SIZES)
def test_the_error_of_a_truncation_is_what_its_values_say(size: tuple[int, int]) -> None:
    matrix, samples = draw(*size), inputs(50, size[1])
    whitening = whitening_of(samples)
    assert (whitening.how, whitening.rank) == ("cholesky", size[1])
    found = decompose(matrix, whitening)
    plain = decompose(matrix)
    for rank in range(1, min(size)):
        dropped = np.sqrt((found.values[rank:] ** 2).sum())
        error = output_error(samples, matrix, truncate(matrix, found.left, rank))
        assert error == pytest.approx(dropped, rel=1e-9)
        assert error < output_error(samples, matrix, truncate(matrix, plain.left, rank))
        weights = float((matrix - truncate(matrix, plain.left, rank)).norm())
        assert weights == pytest.approx(np.sqrt((plain.values[rank:] ** 2).sum()), rel=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_a_truncation_is_that_of_the_paper(size: tuple[int, int]) -> None:
    matrix, samples = draw(*size), inputs(50, size[1])
    factor = np.linalg.cholesky(samples.numpy().T @ samples.numpy())
    left, values, right = np.linalg.svd(matrix.numpy() @ factor, full_matrices=False)
    found = decompose(matrix, whitening_of(samples))
    np.testing.assert_allclose(found.values, values, rtol=1e-10)
    for rank in (1, 4, 11):
        written_out = left[:, :rank] @ np.diag(values[:rank]) @ right[:rank] @ np.linalg.inv(factor)
        ours = truncate(matrix, found.left, rank).numpy()
        np.testing.assert_allclose(ours, written_out, rtol=1e-6, atol=1e-9)
        assert np.linalg.matrix_rank(ours) == rank


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["few tokens", "features that move together", "a dead feature", "no input at all"])
def test_inputs_that_do_not_reach_everything(size: tuple[int, int], kind: str) -> None:
    matrix, samples = draw(*size), inputs(50, size[1])
    reached = size[1] - 1
    if kind == "few tokens":
        samples, reached = samples[:5], 5
    elif kind == "a dead feature":
        samples[:, 3] = 0
    elif kind == "no input at all":
        samples, reached = torch.zeros_like(samples), 0
    else:
        samples[:, 3] = samples[:, 4]
    whitening = whitening_of(samples)
    assert (whitening.how, whitening.rank) == ("eigenvalues", reached)
    moment = (samples.T @ samples).numpy()
    np.testing.assert_allclose((whitening.factor @ whitening.factor.T).numpy(), moment, atol=1e-10 * moment.max())
    found = decompose(matrix, whitening)
    full_rank = min(size)
    assert found.values.shape == (full_rank,)
    assert not found.values[reached:].any()
    scale = float(np.linalg.norm(samples.numpy() @ matrix.numpy().T))
    for rank in range(1, full_rank + 1):
        truncated = truncate(matrix, found.left, rank)
        assert np.linalg.matrix_rank(truncated.numpy()) == rank
        dropped = np.sqrt((found.values[rank:] ** 2).sum())
        assert output_error(samples, matrix, truncated) == pytest.approx(dropped, rel=1e-6, abs=1e-7 * scale)
    torch.testing.assert_close(truncated, matrix, rtol=1e-10, atol=1e-10)


def test_what_inputs_do_not_reach_follows_in_plain_order() -> None:
    matrix, samples = draw(16, 20), inputs(5, 20)
    found = decompose(matrix, whitening_of(samples))
    left = np.linalg.svd(matrix.numpy() @ samples.numpy().T, full_matrices=False)[0]
    rest = matrix.numpy() - left @ left.T @ matrix.numpy()
    beyond = np.linalg.svd(rest, compute_uv=False)
    for rank in (5, 8, 15):
        error = float((matrix - truncate(matrix, found.left, rank)).norm())
        assert error == pytest.approx(np.sqrt((beyond[rank - 5 :] ** 2).sum()), rel=1e-9)


def test_single_precision_inputs_are_summed_in_double() -> None:
    samples = inputs(3000, 6).float()
    exact = samples.double().T @ samples.double()
    moment = SecondMoment(6)
    for batch in samples.split(7):
        moment.add(batch)
    torch.testing.assert_close(moment.matrix, exact, rtol=1e-13, atol=0)


def test_matrices_of_low_rank_and_of_zeros() -> None:
    low = draw(14, 3) @ draw(3, 10, seed=5)
    for whitening in (None, whitening_of(inputs(40, 10))):
        found = decompose(low, whitening)
        assert found.values[3:].max() < 1e-8 * found.values[0]
        torch.testing.assert_close(truncate(low, found.left, 3), low)
        torch.testing.assert_close(truncate(low, found.left, 10), low)
        zeros = torch.zeros(4, 10, dtype=torch.float64)
        assert not decompose(zeros, whitening).values.any()
        assert not truncate(zeros, decompose(zeros, whitening).left, 2).any()


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
