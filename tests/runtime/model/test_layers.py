"""The arithmetic of ranks against `transformers` modules, where a whole model would not show the difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surgeon.runtime.model.layers import Norm, softcap, torch_dtype
from surgeon.runtime.plan.checks import make_plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_stored_without_their_one(dtype: torch.dtype, tiny_model: Callable[..., Any], tmp_path: Path) -> None:
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
