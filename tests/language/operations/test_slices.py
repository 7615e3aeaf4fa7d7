"""Tracks, dropped synchronisation and fused layers against their equations, computed in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.language.operations import desync, fuse_attention_mlp, tracks
from surgeon.models.edit import edit, program_of
from tests.reference import Reference
from tests.tiny_models import VOCABULARY, tiny_model

IDS = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
LAYERS = 4
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {},
    "opt": {},
    "gpt_neo": {},
    "gpt_neox": {},
}


def slices(reference: Reference, count: int) -> list[Reference]:
    """Copies of a model that each add one slice of the heads and neurons to the stream, and one of them the biases.

    A slice is what is left when the other slices' columns of the projections that write to the stream are zero.
    """
    found = []
    for index in range(count):
        other = object.__new__(type(reference))
        other.__dict__.update(reference.__dict__, w=dict(reference.w))
        for name, tensor in reference.w.items():
            if f".{reference.output}." in name or f".{reference.down}." in name:
                if name.endswith("bias"):
                    other.w[name] = tensor if index == 0 else torch.zeros_like(tensor)
                else:
                    columns = torch.arange(tensor.shape[1]) // (tensor.shape[1] // count)
                    other.w[name] = tensor * (columns == index)
        found.append(other)
    return found


def one_track(r: Reference, x: Tensor, layers: range) -> Tensor:
    for k in layers:
        x = r.layer(k, x)
    return x


def tracked(r: Reference, x: Tensor, count: int, stretches: list[range]) -> Tensor:
    """Between two meetings every track runs alone; at a meeting, x gets what all of them have added."""
    for layers in stretches:
        x = x + sum(one_track(track, x, layers) - x for track in slices(r, count))
    return x


def logits_of(model: Any, program: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = edit(model, program)(input_ids=IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("family", OVERRIDES)
@pytest.mark.parametrize(("depth", "stretches"), [(2, [(1, 3), (3, 4)]), (3, [(1, 4)])])
def test_tracks(family: str, depth: int, stretches: list[tuple[int, int]]) -> None:
    model = tiny_model(family, LAYERS, **OVERRIDES[family])
    reference = Reference(model)
    x = one_track(reference, reference.embed(IDS), range(0, 1))
    expected = reference.logits(tracked(reference, x, 2, [range(*bounds) for bounds in stretches]))
    found = logits_of(model, tracks(program_of(model), range(1, LAYERS), count=2, depth=depth))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neo"])
def test_desync(family: str) -> None:
    """Slice s of a layer: its feed-forward reads x + attention_s(x), and x becomes the sum over all slices."""
    model = tiny_model(family, LAYERS, **OVERRIDES[family])
    reference = Reference(model)
    x = reference.embed(IDS)
    for k in range(LAYERS):
        attended = [part.attention(k, x) for part in slices(reference, 2)]
        mixed = [
            part.feed_forward(k, x + own)
            for part, own in zip(slices(reference, 2), attended, strict=True)
        ]
        x = x + sum(attended) + sum(mixed)
    found = logits_of(model, desync(program_of(model), range(0, LAYERS), count=2))
    torch.testing.assert_close(found, reference.logits(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_fused_attention_and_feed_forward(family: str) -> None:
    model = tiny_model(family, LAYERS, **OVERRIDES[family])
    reference = Reference(model)
    x = one_track(reference, reference.embed(IDS), range(0, 1))
    for k in range(1, LAYERS):
        x = x + reference.attention(k, x) + reference.feed_forward(k, x)
    found = logits_of(model, fuse_attention_mlp(program_of(model), range(1, LAYERS)))
    torch.testing.assert_close(found, reference.logits(x), rtol=2e-5, atol=2e-5)


def test_slices_that_the_model_cannot_have() -> None:
    model = tiny_model("llama", LAYERS)
    with pytest.raises(ValueError, match="do not divide into 3 slices"):
        edit(model, tracks(program_of(model), range(0, 2), count=3, depth=2))
