"""One of two processes that hold a model together by transformers' own plan, for test_divided.py: FOLDER NAME..."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, dynamic_module_utils
from transformers.distributed import DistributedConfig

from surgeon.models.edit import edit

EDITED = "A0 F0 >A1 >F1 A1 F1 [A2 A0] [F2 F0]"
IDS = torch.arange(3, 25).view(2, 11)


def load(folder: Path, **options: Any) -> Any:
    """As users do without surgeon."""
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, **options
    ).eval()


def computed(model: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Its logits, the tokens that it generates, and the gradient of its loss, of all parameters by name."""
    with torch.no_grad():
        logits = model(IDS).logits
    tokens = model.generate(IDS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return (
        logits,
        tokens,
        {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()},
    )


def held(model: Any) -> int:
    """How many numbers of it this process holds."""
    return sum(
        (one.to_local() if isinstance(one, DTensor) else one).numel() for one in model.parameters()
    )


def main(folder: str, *names: str) -> None:
    """Compare each checkpoint with itself in one process; "stock" is edited when it is loaded, and "slices" refused."""
    torch.set_num_threads(1)
    dynamic_module_utils.HF_MODULES_CACHE = f"{folder}/modules"
    two = {"distributed_config": DistributedConfig(tp_size=2)}
    for name in names:
        whole, ours = load(Path(folder) / name), load(Path(folder) / name, **two)
        if name == "slices":
            with pytest.raises(ValueError, match="slices are of whole matrices"):
                ours(IDS)
            continue
        if name == "stock":
            whole, ours = edit(whole, EDITED), edit(ours, EDITED)
        assert held(ours) < 0.6 * held(whole), name
        expected, found = computed(whole), computed(ours)
        for wanted, got in zip(expected[:2], found[:2], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        assert expected[2].keys() == found[2].keys()
        for parameter, wanted in expected[2].items():
            error = (found[2][parameter] - wanted).norm() / wanted.norm()
            assert error < 1e-4, (name, parameter)
        if name == "stock":
            with pytest.raises(ValueError, match="A0~A1 has weights that are made of whole matrices"):
                edit(ours, "A0~A1 F0~F1")
