"""Decompositions and factors against the published formulas written out in numpy, and least squares by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from surgeon.language.sublayer import Sublayer
from surgeon.models.weights import decompose as decomposing
from surgeon.models.weights.decompose import (
    METHODS,
    Decomposition,
    SecondMoment,
    Statistics,
    TruncatedSVD,
    Whitening,
    decompose,
    decomposer,
    factorise,
    factors_by,
    fit_second_factor,
    truncate,
    truncation_loss,
    whiten,
)
from surgeon.models.weights.quantised.methods import Method
from surgeon.models.weights.store import Factors


class Given:
    """A matrix that is there already."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.dtype, self.shape = values, values.dtype, (values.shape[0], values.shape[1])

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.values.to(dtype)

    def rows(self, first: int, end: int) -> Tensor:
        return self.values[first:end]


SIZES = [(12, 20), (20, 12), (16, 16)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int, features: int) -> Tensor:
    """Inputs of very different sizes, with directions that vary together and a mean."""
    mixed = draw(tokens, features, seed=1) @ draw(features, features, seed=2)
    return mixed * torch.logspace(-2, 2, features, dtype=torch.float64) + 3


def moment_of(samples: Tensor, batches: int = 3) -> SecondMoment:
    moment = SecondMoment(samples.shape[1])
    for batch in samples.tensor_split(batches):
        moment.add(batch[None])
    assert moment.samples == len(samples)
    return moment


def whitening_of(samples: Tensor) -> Whitening:
    return whiten(moment_of(samples))


def statistics_of(samples: Tensor) -> Statistics:
    return Statistics(moment_of(samples), samples.abs().mean(0))


def output_error(samples: Tensor, matrix: Tensor, other: Tensor) -> float:
    return float(np.linalg.norm(samples.numpy() @ (matrix - other).numpy().T))


@pytest.mark.parametrize("size", SIZES)
def test_the_error_of_a_truncation_is_what_its_values_say(size: tuple[int, int]) -> None:
    matrix, samples = draw(*size), inputs(50, size[1])
    whitening = whitening_of(samples)
    assert (whitening.how, whitening.rank) == ("cholesky", size[1])
    found = decompose(matrix, whitening.factor)
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
    found = decompose(matrix, whitening_of(samples).factor)
    np.testing.assert_allclose(found.values, values, rtol=1e-10)
    for rank in (1, 4, 11):
        written_out = left[:, :rank] @ np.diag(values[:rank]) @ right[:rank] @ np.linalg.inv(factor)
        ours = truncate(matrix, found.left, rank).numpy()
        np.testing.assert_allclose(ours, written_out, rtol=1e-6, atol=1e-9)
        assert np.linalg.matrix_rank(ours) == rank


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "kind", ["few tokens", "features that move together", "a dead feature", "no input at all"]
)
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
    np.testing.assert_allclose(
        (whitening.factor @ whitening.factor.T).numpy(), moment, atol=1e-10 * moment.max()
    )
    found = decompose(matrix, whitening.factor)
    full_rank = min(size)
    assert found.values.shape == (full_rank,)
    assert not found.values[reached:].any()
    scale = float(np.linalg.norm(samples.numpy() @ matrix.numpy().T))
    for rank in range(1, full_rank + 1):
        truncated = truncate(matrix, found.left, rank)
        assert np.linalg.matrix_rank(truncated.numpy()) == rank
        dropped = np.sqrt((found.values[rank:] ** 2).sum())
        assert output_error(samples, matrix, truncated) == pytest.approx(
            dropped, rel=1e-6, abs=1e-7 * scale
        )
    torch.testing.assert_close(truncated, matrix, rtol=1e-10, atol=1e-10)


def test_what_inputs_do_not_reach_follows_in_plain_order() -> None:
    matrix, samples = draw(16, 20), inputs(5, 20)
    found = decompose(matrix, whitening_of(samples).factor)
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
    for whitening in (None, whitening_of(inputs(40, 10)).factor):
        found = decompose(low, whitening)
        assert found.values[3:].max() < 1e-8 * found.values[0]
        torch.testing.assert_close(truncate(low, found.left, 3), low)
        torch.testing.assert_close(truncate(low, found.left, 10), low)
        zeros = torch.zeros(4, 10, dtype=torch.float64)
        assert not decompose(zeros, whitening).values.any()
        assert not truncate(zeros, decompose(zeros, whitening).left, 2).any()


@pytest.mark.parametrize("size", SIZES)
def test_large_matrices_have_the_same_directions(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, factor = draw(*size), whitening_of(inputs(50, size[1])).factor
    low = draw(size[0], 3) @ draw(3, size[1], seed=5)
    whole = [decompose(matrix), decompose(matrix.float()), decompose(matrix, factor), decompose(low)]
    monkeypatch.setattr(decomposing, "LARGE", 0)
    monkeypatch.setattr(decomposing, "_BLOCK", 3 * max(size))
    large = [decompose(matrix), decompose(matrix.float()), decompose(matrix, factor), decompose(low)]
    for own, other, of in zip(large, whole, [matrix, matrix.float(), matrix, low], strict=True):
        np.testing.assert_allclose(own.values, other.values, rtol=1e-6, atol=1e-7 * other.values[0])
        assert own.reached == other.reached
        torch.testing.assert_close(
            own.left.T @ own.left, torch.eye(own.left.shape[1], dtype=torch.float64)
        )
        for rank in (1, 3, min(size)):
            torch.testing.assert_close(
                truncate(of, own.left, rank), truncate(of, other.left, rank), rtol=1e-6, atol=1e-6
            )


def published(method: Method, matrix: Tensor, samples: Tensor, rank: int) -> NDArray[np.float64]:
    """U_r diag(s_r) V_r' inv(D), with W D = U diag(s) V'."""
    known, features = statistics_of(samples), samples.shape[1]
    assert known.magnitude is not None
    weighing = {
        "plain": np.eye(features),
        "activation": np.diag(np.abs(samples.numpy()).mean(0) ** 0.5),
        "whitened": np.linalg.cholesky(samples.numpy().T @ samples.numpy()),
    }
    left, values, right = np.linalg.svd(matrix.numpy() @ weighing[method], full_matrices=False)
    truncated: NDArray[np.float64] = (
        left[:, :rank] * values[:rank] @ right[:rank] @ np.linalg.inv(weighing[method])
    )
    return truncated


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_the_published_one(method: Method, size: tuple[int, int]) -> None:
    matrix, samples = draw(*size), inputs(50, size[1])
    statistics = statistics_of(samples)
    decomposed = decomposer(method, statistics)(matrix)
    assert decomposed.reached == min(size)
    highest = factorise(matrix, min(size), method, statistics)
    torch.testing.assert_close(highest.second @ highest.first, matrix)
    for rank in (1, 4, 11):
        factors = factorise(matrix, rank, method, statistics)
        assert (tuple(factors.first.shape), tuple(factors.second.shape)) == (
            (rank, size[1]),
            (size[0], rank),
        )
        product = factors.second @ factors.first
        written_out = published(method, matrix, samples, rank)
        np.testing.assert_allclose(product.numpy(), written_out, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(product, truncate(matrix, decomposed.left, rank))
        # The factors of a lower rank are the first rows and columns of those of the full one, and equally large.
        torch.testing.assert_close(factors.first, highest.first[:rank])
        torch.testing.assert_close(factors.second, highest.second[:, :rank])
        torch.testing.assert_close(factors.first.norm(dim=1), factors.second.norm(dim=0))


@pytest.mark.parametrize("size", SIZES)
def test_plain_factors_split_singular_values_as_roots(size: tuple[int, int]) -> None:
    """Equation 1 of DeInfer, but for the signs, which are free."""
    matrix, rank = draw(*size), 5
    left, values, right = np.linalg.svd(matrix.numpy(), full_matrices=False)
    factors = factorise(matrix, rank)
    second, first = (
        left[:, :rank] * np.sqrt(values[:rank]),
        np.sqrt(values[:rank])[:, None] * right[:rank],
    )
    signs = np.sign((factors.second.numpy() * second).sum(0))
    np.testing.assert_allclose(factors.second.numpy(), second * signs, atol=1e-12)
    np.testing.assert_allclose(factors.first.numpy(), first * signs[:, None], atol=1e-12)


def test_directions_that_are_remembered_serve_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = {
        (layer, role): Given(draw(9, 7, seed=layer + len(role)))
        for layer in (0, 1)
        for role in ("q", "k")
    }
    asked = [(0, "q", 5), (0, "k", 2), (0, "q", 2), (0, "k", 7), (1, "q", 3), (1, "q", 1), (0, "q", 4)]
    made: list[Tensor] = []

    def counted(matrix: Tensor) -> Decomposition:
        made.append(matrix)
        return decompose(matrix)

    expected = [
        TruncatedSVD().factors(
            Sublayer("A", (layer,), None, ((role, rank),)), role, matrices[layer, role]
        )
        for layer, role, rank in asked
    ]
    monkeypatch.setattr("surgeon.models.weights.decompose.decompose", counted)
    source = TruncatedSVD(remembers=True)
    for (layer, role, rank), wanted in zip(asked, expected, strict=True):
        found = source.factors(
            Sublayer("A", (layer,), None, ((role, rank),)), role, matrices[layer, role]
        )
        torch.testing.assert_close(found, wanted)
    # Q and k of layer 0, q of layer 1, which takes their place, and q of layer 0 again.
    assert len(made) == 4
    assert set(source.kept) == {((0,), "q")}
    made.clear()
    one = source.kept[(0,), "q"].nbytes
    for room, decomposed in ((one, 4), (8 * one, 3)):
        made.clear()
        source = TruncatedSVD(remembers=True, room=room)
        for (layer, role, rank), wanted in zip(
            [*asked, *asked[:1]], [*expected, *expected[:1]], strict=True
        ):
            found = source.factors(
                Sublayer("A", (layer,), None, ((role, rank),)), role, matrices[layer, role]
            )
            torch.testing.assert_close(found, wanted)
        assert len(made) == decomposed


@pytest.mark.parametrize("size", SIZES)
def test_nothing_of_the_same_rank_loses_less_than_whitened_factors(size: tuple[int, int]) -> None:
    """No other method, no candidate that is drawn, none that a few rounds of alternating least squares find."""
    matrix, samples = draw(*size), inputs(50, size[1])
    moment, statistics, rank = moment_of(samples), statistics_of(samples), 4
    best = factorise(matrix, rank, "whitened", statistics)
    loss = truncation_loss(matrix, best, moment)
    assert loss == pytest.approx(output_error(samples, matrix, best.second @ best.first), rel=1e-6)
    for method in ("plain", "activation"):
        assert truncation_loss(matrix, factorise(matrix, rank, method, statistics), moment) > loss
    for seed in range(20):
        noise = draw(rank, size[1], seed=seed)
        for first in (noise, best.first + 0.01 * noise):
            assert (
                truncation_loss(
                    matrix, fit_second_factor(matrix, Factors(first, best.second), moment), moment
                )
                > loss
            )
    second = draw(size[0], rank, seed=3)
    for _ in range(300):
        first = torch.linalg.lstsq(second, matrix).solution
        second = fit_second_factor(matrix, Factors(first, second), moment).second
    assert loss * (1 - 1e-9) < truncation_loss(matrix, Factors(first, second), moment) < 1.01 * loss


def by_hand(inputs: Tensor, outputs: Tensor) -> Tensor:
    """B that minimises |outputs - inputs B'|, the shortest where there are several."""
    return torch.from_numpy(np.linalg.lstsq(inputs.numpy(), outputs.numpy(), rcond=1e-10)[0].T)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [3, 50])
def test_the_second_factor_is_fitted_by_least_squares(size: tuple[int, int], tokens: int) -> None:
    """To the outputs on the same inputs, and to those on others that come token by token."""
    matrix, samples = draw(*size), inputs(tokens, size[1])
    others = samples + 0.3 * inputs(tokens, size[1]) * draw(tokens, size[1], seed=9)
    factors = factorise(matrix, 5, "plain")
    for seen, cross in ((samples, None), (others, samples.T @ others)):
        best = by_hand(seen @ factors.first.T, samples @ matrix.T)
        found = fit_second_factor(matrix, factors, moment_of(seen), cross)
        torch.testing.assert_close(found.first, factors.first, rtol=0, atol=0)
        outputs = seen @ factors.first.T
        scale = float((samples @ matrix.T).abs().max())
        torch.testing.assert_close(
            outputs @ found.second.T, outputs @ best.T, rtol=1e-6, atol=1e-6 * scale
        )
        if tokens > 5:
            torch.testing.assert_close(found.second, best, rtol=1e-5, atol=1e-7)
        else:  # as far as inputs reach, and not beyond
            change = found.second - factors.second
            assert np.linalg.matrix_rank(change.numpy(), tol=1e-6 * float(change.norm())) <= tokens


DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@st.composite
def deficient(draws: st.DrawFn) -> dict[str, Any]:
    """Inputs that span fewer directions than they have features, or of fewer tokens than the rank, of any scaling."""
    features, outputs = draws(st.integers(2, 24)), draws(st.integers(2, 24))
    return {
        "size": (outputs, features),
        "rank": draws(st.integers(1, min(features, outputs))),
        "span": draws(st.integers(1, features)),
        "tokens": draws(st.sampled_from([1, 2, 5, 20, 100])),
        # Of directions, of features.
        "decades": draws(st.tuples(st.sampled_from([0, 2, 4]), st.sampled_from([0, 3]))),
        "mean": draws(st.sampled_from([0, 30])),
        "method": draws(st.sampled_from(["plain", "activation", "whitened"])),
        "drift": draws(
            st.sampled_from([0.0, 0.01, 0.5])
        ),  # of the inputs that the factors get from those of the matrix
        "seed": draws(st.integers(0, 1 << 20)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(deficient())
def test_an_update_is_never_worse_than_none(
    dtype: torch.dtype, kept: torch.dtype, case: dict[str, Any]
) -> None:
    """On its own text, with inputs rounded anew, as on another machine, and factors rounded to what keeps them."""
    outputs, features = case["size"]
    tokens, span, seed = case["tokens"], case["span"], case["seed"]
    directions, sizes = (
        torch.logspace(0, -of, n).double()
        for of, n in zip(case["decades"], (span, features), strict=True)
    )
    spread = draw(tokens, span, seed=seed) * directions @ draw(span, features, seed=seed + 1)
    exact = (spread + case["mean"] * draw(features, seed=seed + 2)) * sizes
    original = exact + case["drift"] * draw(tokens, features, seed=seed + 3) * sizes
    seen, again = (
        (exact * (1 + torch.finfo(dtype).eps / 2 * draw(tokens, features, seed=seed + turn))).to(dtype)
        for turn in (4, 5)
    )
    matrix = draw(outputs, features, seed=seed + 6)
    moment = SecondMoment(features)
    moment.add(seen)
    statistics = Statistics(moment, seen.double().abs().mean(0))
    factors = factorise(matrix, case["rank"], case["method"], statistics)
    updated = fit_second_factor(matrix, factors, moment, original.T @ seen.double(), kept)

    def error(of: Factors) -> float:
        first, second = (factor.to(kept).double() for factor in of)
        wanted = original @ matrix.T
        return float((wanted - again.double() @ first.T @ second.T).norm() / wanted.norm())

    assert error(updated) <= error(factors) + 8 * max(torch.finfo(dtype).eps, torch.finfo(kept).eps)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_what_rounding_adds_to_inputs_is_no_direction(dtype: torch.dtype, least: float) -> None:
    """Three directions in 16 features, rounded, are three; a fourth counts as soon as it is larger than rounding."""
    exact = draw(200, 3) @ draw(3, 16, seed=1)
    fourth = draw(200, 1, seed=2) @ draw(1, 16, seed=3)
    for size, rank in ((0.0, 3), (20 * least, 4)):
        moment = SecondMoment(16)
        moment.add((exact + size * fourth).to(dtype))
        assert whiten(moment).rank == rank
        found = decomposer("whitened", Statistics(moment))(draw(12, 16, seed=4))
        assert found.reached == rank
        assert not found.values[rank:].any()


def test_whitened_factors_are_fitted_already() -> None:
    matrix, samples = draw(12, 20), inputs(50, 20)
    factors = factorise(matrix, 5, "whitened", statistics_of(samples))
    torch.testing.assert_close(
        fit_second_factor(matrix, factors, moment_of(samples)).second, factors.second
    )


@pytest.mark.parametrize("method", ["activation", "whitened"])
def test_calibration_on_few_tokens_leaves_the_full_rank_exact(method: Method) -> None:
    matrix, samples = draw(12, 20), inputs(5, 20)
    samples[:, 3] = 0
    statistics = statistics_of(samples)
    found = decomposer(method, statistics)(matrix)
    assert found.reached == (12 if method == "activation" else 5)
    full = factorise(matrix, 12, method, statistics)
    torch.testing.assert_close(full.second @ full.first, matrix)
    if method != "activation":
        reached = factorise(matrix, 5, method, statistics)
        assert output_error(samples, matrix, reached.second @ reached.first) < 1e-6 * float(
            (samples @ matrix.T).norm()
        )


def test_factors_of_a_matrix_of_low_rank_end_with_zeros() -> None:
    low = draw(14, 3) @ draw(3, 10, seed=5)
    found = decomposer("whitened", statistics_of(inputs(40, 10)))(low)
    factors = factors_by(low, found.left, 6)
    assert (tuple(factors.first.shape), tuple(factors.second.shape)) == ((6, 10), (14, 6))
    torch.testing.assert_close(factors.second @ factors.first, low)
    zeros = factorise(torch.zeros(4, 10), 2, "whitened", statistics_of(inputs(40, 10)))
    assert not zeros.first.any()
    assert not zeros.second.any()


def test_what_cannot_be_factorised_is_refused() -> None:
    for rank in (0, 5):
        with pytest.raises(
            ValueError, match=f"a matrix of 4 x 7 must be from 1 to the lesser of these, not {rank}"
        ):
            factorise(torch.ones(4, 7), rank)
    wrong: Any = "whitend"
    with pytest.raises(ValueError, match="there is no method 'whitend'; did you mean 'whitened'?"):
        factorise(torch.ones(4, 7), 2, wrong)
