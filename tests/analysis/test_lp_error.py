"""The terms of an LP pair's error against the paper's equations on plain sublayers with dense Jacobians."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.analysis.engine.machine import Walk
from surgeon.analysis.sensitivity import TERMS, Lanczos, OperatorNorm, differentiable, pair_terms
from tests.analysis.test_jacobian import CLOSE, dense_jacobian
from tests.reference import Reference
from tests.tiny_models import VOCABULARY, tiny_model

TOKENS = 5
TOGETHER = "gpt_neox"  # attention and MLP of a layer read the same stream


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(2, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(3))


def terms_of_pair(
    model: Any, ids: Tensor, lanczos: Lanczos = CLOSE
) -> tuple[tuple[dict[str, float], list[OperatorNorm]], Tensor]:
    """The terms of layers 1 and 2, and the stream before layer 1."""
    with differentiable(model):
        walk = Walk(model, ids)
        stream = walk.layer(0, walk.start).after
        return pair_terms(walk, walk.layer(1, stream), lanczos), stream.clone()


def largest(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix.double())[0])


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_terms_are_those_of_equation_12(family: str, ids: Tensor) -> None:
    model = tiny_model(family, 3)
    found, x = terms_of_pair(model, ids)
    plain = Reference(model)
    a, b = plain.attention(1, x), plain.attention(2, x)
    u = x + a
    f = plain.feed_forward(1, u)
    h = u + f
    u_next = h + plain.attention(2, h)
    sequential = u_next + plain.feed_forward(2, u_next)
    shared = x + a + b
    parallel = shared + plain.feed_forward(1, shared) + plain.feed_forward(2, shared)
    jacobians = [
        dense_jacobian(lambda at: plain.attention(2, at), x),
        dense_jacobian(lambda at: plain.feed_forward(1, at), u),
        dense_jacobian(lambda at: plain.feed_forward(2, at), shared),
    ]
    ja, jf, jf_next = (largest(matrix) for matrix in jacobians)
    update, size_b, size_f = (float(t.norm()) for t in (a + f, b, f))
    along_attention = jacobians[0] @ (a + f).flatten()
    first_order = (
        along_attention - jacobians[1] @ b.flatten() + jacobians[2] @ (f.flatten() + along_attention)
    )
    expected = {
        "stream_norm": float(sequential.norm()),
        "update_norm": update,
        "attention_norm": size_b,
        "mlp_norm": size_f,
        "attention_jacobian": ja,
        "mlp_jacobian": jf,
        "next_mlp_jacobian": jf_next,
        "attention_shift": ja * update,
        "mlp_shift": jf * size_b,
        "next_mlp_shift": jf_next * (size_f + ja * update),
        "bound": ja * update + jf * size_b + jf_next * (size_f + ja * update),
        "first_order": float(first_order.norm()),
        "error": float((sequential - parallel).norm()),
    }
    assert tuple(found[0]) == TERMS
    above = {name for name in TERMS if name.endswith(("_jacobian", "_shift"))} | {"bound"}
    for name, value in expected.items():
        if name in above:
            assert 1 <= found[0][name] / value <= 1.005
        else:
            assert found[0][name] == pytest.approx(value, rel=2e-4)
    assert len(found[1]) == 3


def test_where_attention_and_mlp_read_the_same_stream(ids: Tensor) -> None:
    model = tiny_model(TOGETHER, 3)
    found, x = terms_of_pair(model, ids)
    plain = Reference(model)
    update = plain.attention(1, x) + plain.feed_forward(1, x)
    h = x + update
    sequential = h + plain.attention(2, h) + plain.feed_forward(2, h)
    parallel = x + update + plain.attention(2, x) + plain.feed_forward(2, x)
    attention = dense_jacobian(lambda at: plain.attention(2, at), x)
    mlp = dense_jacobian(lambda at: plain.feed_forward(2, at), x)
    shifts = [largest(attention) * float(update.norm()), 0, largest(mlp) * float(update.norm())]
    assert 1 <= found[0]["attention_shift"] / shifts[0] <= 1.002
    assert found[0]["mlp_shift"] == 0
    assert 1 <= found[0]["next_mlp_shift"] / shifts[2] <= 1.002
    assert 1 <= found[0]["bound"] / sum(shifts) <= 1.002
    assert found[0]["error"] == pytest.approx(float((sequential - parallel).norm()), rel=2e-4)
    first_order = (attention + mlp) @ update.flatten()
    assert found[0]["first_order"] == pytest.approx(float(first_order.norm()), rel=2e-4)


@pytest.mark.parametrize("family", ["llama", TOGETHER])
def test_first_order_becomes_exact_as_updates_become_small(family: str, ids: Tensor) -> None:
    off = []
    for scale in (0.3, 0.03):
        model = tiny_model(family, 3).double()
        spec = {"llama": ("o_proj", "down_proj"), TOGETHER: ("attention.dense", "dense_4h_to_h")}[family]
        for name, parameter in model.named_parameters():
            if any(part in name for part in spec):
                parameter.data *= scale
        found, _ = terms_of_pair(model, ids, Lanczos())
        assert 0 < found[0]["error"] <= found[0]["bound"]
        off.append(abs(found[0]["error"] / found[0]["first_order"] - 1))
    assert off[0] < 0.5
    assert off[1] < off[0] / 4  # what is neglected is of second order
