"""Bounds of operator norms against the largest singular values of dense Jacobians of plain sublayers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.func import jacrev

from surgeon.analysis.engine.machine import Walk
from surgeon.analysis.sensitivity import Lanczos, differentiable, push
from tests.reference import Reference
from tests.selection import case, one_in
from tests.tiny_models import VOCABULARY, tiny_model

TOKENS = 6
CLOSE = Lanczos(iterations=200, tolerance=2e-3)
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
        attention = CLOSE.norm(lambda x: walk.attention(1, x), walk.start)
        whole = CLOSE.norm(lambda x: walk.mlp(1, x), walk.start)
        by_token = CLOSE.norm(lambda x: walk.mlp(1, x), walk.start, by_token=True)
        start = walk.start.clone()
    assert 1 <= attention.value / largest(lambda x: plain.attention(1, x), start) <= 1.002
    expected = largest(lambda x: plain.feed_forward(1, x), start)
    assert 1 <= whole.value / expected <= 1.002
    assert 1 <= by_token.value / expected <= 1.002


def test_the_norm_of_a_whole_layers_map(ids: Tensor) -> None:
    model = tiny_model("llama", 2)
    plain = Reference(model)

    def layer(x: Tensor) -> Tensor:
        middle = x + plain.attention(1, x)
        return middle + plain.feed_forward(1, middle)

    with differentiable(model):
        walk = Walk(model, ids)
        found = CLOSE.norm(lambda x: walk.layer(1, x).after, walk.start)
        start = walk.start.clone()
    assert 1 <= found.value / largest(layer, start) <= 1.002


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

    found = CLOSE.norm(linear, point)
    assert found.converged
    assert 1 <= found.value / 3 <= 1.002
    few = Lanczos(iterations=3).norm(linear, point)
    assert (few.iterations, few.converged) == (3, False)
    assert 0 < few.value <= 3
    loose = Lanczos(tolerance=0.1).norm(linear, point)
    assert loose.converged
    assert loose.iterations < found.iterations
    assert 3 <= loose.value <= 3.3
    assert CLOSE.norm(lambda x: 0 * x, point).value == 0


@pytest.mark.parametrize("gap", [0.3, 1e-2, 1e-3, 1e-4, 0.0])
def test_what_is_found_is_not_below_the_norm_where_singular_values_are_close(gap: float) -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (
        torch.linalg.qr(torch.randn(96, 96, generator=generator, dtype=torch.float64))[0]
        for _ in range(2)
    )
    sizes = torch.linspace(0.9, 0, 96, dtype=torch.float64)
    sizes[:3] = torch.tensor([1.0, 1 - gap, 1 - 2 * gap])
    matrix, point = left @ sizes.diag() @ right, torch.zeros(1, 6, 16, dtype=torch.float64)
    for seed in range(5):
        found = Lanczos(seed=seed).norm(lambda x: (matrix @ x.flatten()).view_as(x), point)
        assert found.converged
        assert 1 <= found.value <= 1.01


@pytest.mark.parametrize("seed", range(8))
def test_norms_of_drawn_attentions_are_not_below_the_exact_ones(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, hidden, heads = 10, 8, 2
    q, k, v, o = (torch.randn(hidden, hidden, generator=generator) / hidden**0.5 for _ in range(4))
    hidden_above = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)

    def attention(x: Tensor) -> Tensor:
        split = [(x[0] @ weight).view(tokens, heads, -1).transpose(0, 1) for weight in (q, k, v)]
        scores = (split[0] @ split[1].mT / (hidden / heads) ** 0.5).masked_fill(hidden_above, -torch.inf)
        return ((scores.softmax(-1) @ split[2]).transpose(0, 1).reshape(tokens, hidden) @ o)[None]

    point = 2 * torch.randn(1, tokens, hidden, generator=generator)
    exact = float(
        torch.linalg.svdvals(jacrev(attention)(point).reshape(tokens * hidden, -1).double())[0]
    )
    found = Lanczos(seed=seed).norm(attention, point)
    assert found.converged
    assert exact <= found.value <= exact * 1.01


def test_the_start_is_that_of_the_seed(ids: Tensor) -> None:
    model = tiny_model("llama", 2)
    with differentiable(model):
        walk = Walk(model, ids)
        first, again, other = (
            Lanczos(iterations=2, seed=seed).norm(lambda x: walk.attention(1, x), walk.start)
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
