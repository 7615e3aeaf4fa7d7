"""Operator norms by power iteration against the largest singular values of dense Jacobians of plain sublayers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from surgeon.analysis.engine.walk import Walk
from surgeon.analysis.jacobian import PowerIteration, differentiable, push
from tests.reference import Reference
from tests.selection import case, one_in
from tests.tiny_models import VOCABULARY, tiny_model

TOKENS = 6
EXACT = PowerIteration(iterations=5000, tolerance=1e-9)
FAMILIES = ("llama", "qwen3", "opt", "gpt2", "gpt_neox", "gemma2", "smollm3", "granite")


def dense_jacobian(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    matrix = jacobian(function, point)
    assert isinstance(matrix, Tensor)
    return matrix.reshape(point.numel(), point.numel())


def largest(function: Callable[[Tensor], Tensor], point: Tensor) -> float:
    return float(torch.linalg.svdvals(dense_jacobian(function, point).double())[0])


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(2, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", [*one_in(2, FAMILIES, 0), case("qwen3_next", default=False)])
def test_norms_are_the_largest_singular_values(family: str, ids: Tensor) -> None:
    kinds = {"layer_types": ["full_attention", "linear_attention"]} if family == "qwen3_next" else {}
    model = tiny_model(family, 2, **kinds)
    plain = Reference(model)
    with differentiable(model):
        walk = Walk(model, ids)
        attention = EXACT.norm(lambda x: walk.attention(1, x), walk.start)
        whole = EXACT.norm(lambda x: walk.mlp(1, x), walk.start)
        by_token = EXACT.norm(lambda x: walk.mlp(1, x), walk.start, by_token=True)
        start = walk.start.clone()
    assert attention.value == pytest.approx(largest(lambda x: plain.attention(1, x), start), rel=1e-4)
    expected = largest(lambda x: plain.feed_forward(1, x), start)
    assert whole.value == pytest.approx(expected, rel=1e-4)
    assert by_token.value == pytest.approx(expected, rel=1e-4)


def test_the_norm_of_a_whole_layers_map(ids: Tensor) -> None:
    model = tiny_model("llama", 2)
    plain = Reference(model)

    def layer(x: Tensor) -> Tensor:
        middle = x + plain.attention(1, x)
        return middle + plain.feed_forward(1, middle)

    with differentiable(model):
        walk = Walk(model, ids)
        found = EXACT.norm(lambda x: walk.layer(1, x).after, walk.start)
        start = walk.start.clone()
    assert found.value == pytest.approx(largest(layer, start), rel=1e-4)


def test_products_with_a_jacobian(ids: Tensor) -> None:
    model = tiny_model("llama", 2)
    plain = Reference(model)
    with differentiable(model):
        walk = Walk(model, ids)
        vector = torch.randn_like(walk.start)
        image = push(lambda x: walk.attention(0, x), walk.start, vector)
        start = walk.start.clone()
    expected = dense_jacobian(lambda x: plain.attention(0, x), start) @ vector.flatten()
    torch.testing.assert_close(image.flatten(), expected, rtol=1e-4, atol=1e-4)


def test_iterations_end_by_tolerance_or_number() -> None:
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))
    sizes = torch.tensor([3.0, 2.9, 2, 1, 1, 1, 0.5, 0], dtype=torch.float64)
    matrix = left @ sizes.diag() @ right
    point = torch.zeros(1, 2, 4, dtype=torch.float64)

    def linear(x: Tensor) -> Tensor:
        return (matrix @ x.flatten()).view_as(x)

    found = EXACT.norm(linear, point)
    assert found.converged
    assert found.value == pytest.approx(3, rel=1e-6)
    few = PowerIteration(iterations=3, tolerance=1e-9).norm(linear, point)
    assert (few.iterations, few.converged) == (3, False)
    assert 0 < few.value < 3
    loose = PowerIteration(tolerance=0.1).norm(linear, point)
    assert loose.converged
    assert loose.iterations < found.iterations
    assert EXACT.norm(lambda x: 0 * x, point).value == 0


def test_the_start_is_that_of_the_seed(ids: Tensor) -> None:
    model = tiny_model("llama", 2)
    with differentiable(model):
        walk = Walk(model, ids)
        first, again, other = (
            PowerIteration(iterations=2, tolerance=0, seed=seed).norm(lambda x: walk.attention(1, x), walk.start)
            for seed in (0, 0, 1)
        )
    assert first == again != other


def test_what_is_computed_stays_the_same(ids: Tensor) -> None:
    model = tiny_model("llama", 2)
    with torch.no_grad():
        walk = Walk(model, ids)
        usual = walk.layer(1, walk.start).after
    with differentiable(model):
        torch.testing.assert_close(Walk(model, ids).layer(1, walk.start).after, usual)
        assert not walk.layer(1, walk.start).after.requires_grad
