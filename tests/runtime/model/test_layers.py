"""The arithmetic of ranks against `transformers` modules, where a whole model would not show the difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from surgeon.runtime.kernels.functions import Weighting
from surgeon.runtime.model.attending import attention, softcap
from surgeon.runtime.model.layers import Norm, torch_dtype
from surgeon.runtime.plan.checks import make_plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_stored_without_their_one(
    dtype: torch.dtype, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """In 16 bits too, where 1 + gain would lose the gain's digits."""
    model = tiny_model("gemma2").to(dtype)
    model.save_pretrained(tmp_path)
    plan = make_plan(tmp_path, 1, 8, device="cuda")
    theirs = model.model.norm
    with torch.no_grad():
        theirs.weight.copy_(0.01 * torch.randn(32))
        own = Norm({"norm.weight": theirs.weight}, "norm", plan)
        stream = torch.randn(7, 32).to(dtype)
        found, expected = own(stream), theirs(stream)
    assert found.dtype == torch_dtype(plan) == dtype
    if dtype == torch.bfloat16:
        assert torch.equal(found, expected)
    else:
        assert torch.allclose(found, expected, atol=1e-6)


def test_softcap() -> None:
    numbers = torch.linspace(-400, 400, 101)
    capped = softcap(numbers, 50.0)
    assert capped.abs().max() <= 50.0
    assert torch.allclose(capped, 50 * (numbers / 50).tanh())
    assert numbers[0] == -400


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("looks", ["behind a mask", "causally"])
def test_attention_of_grouped_heads(group: int, cap: float | None, sunk: bool, looks: str) -> None:
    """Of a part of a prompt behind a mask, and of a whole one; a mask and `enable_gqa` never come together."""
    tokens, keys = (3, 7) if looks == "behind a mask" else (5, 5)
    queries, *given = (
        torch.randn(1, 2 * group, tokens, 4),
        torch.randn(1, 2, keys, 4),
        torch.randn(1, 2, keys, 4),
    )
    mask = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
    scores = 0.3 * queries @ given[0].repeat_interleave(group, 1).mT
    scores = scores if cap is None else cap * (scores / cap).tanh()
    sinks = torch.randn(2 * group) if sunk else None
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(1, -1, tokens, 1)], -1)
    expected = scores.softmax(-1)[..., :keys] @ given[1].repeat_interleave(group, 1)
    causal = looks == "causally"
    with NoMaskBesideGroups():
        found = attention(
            queries, *given, Weighting(0.3, None, cap, sinks), None if causal else mask, causal
        )
    torch.testing.assert_close(found, expected)


def test_sinks_of_heads_that_are_given_as_queries() -> None:
    """As one token of several texts is, whose heads of a KV group look at the same keys."""
    queries, keys, values, sinks = (
        torch.randn(2, 3, 4, 8),
        torch.randn(2, 3, 5, 8),
        torch.randn(2, 3, 5, 8),
        torch.randn(12),
    )
    scores = torch.cat([queries @ keys.mT * 8**-0.5, sinks.view(3, 4, 1).expand(2, -1, -1, -1)], -1)
    torch.testing.assert_close(
        attention(queries, keys, values, Weighting(sinks=sinks)), scores.softmax(-1)[..., :5] @ values
    )


class NoMaskBesideGroups(TorchFunctionMode):
    """Fails where heads are grouped behind a mask, which takes the memory of all scores on GPUs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            assert kwargs["attn_mask"] is None or not kwargs["enable_gqa"]
        return func(*args, **(kwargs or {}))
