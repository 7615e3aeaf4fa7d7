"""Codas for tiny models: the first rack's, made of the layers behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from surgeon.checkpoint.codas import Coda, write_codas
from surgeon.models.edit import program_of
from surgeon.models.families import family_of
from surgeon.quality.head import OutputHead
from surgeon.training.racks.model import build_stretch, feed_stream, rack_of
from surgeon.training.racks.partition import Racks


def save_codas(
    folder: Path, model: Any, cut: int = 2, depth: int = 1, noise: float = 0.0, tied: bool = False
) -> None:
    """Write a coda behind layer `cut`: the model's last `depth` layers, its norm and its head.

    With as many layers as lie behind the cut, and no noise, it says what the model says.

    Args:
        noise: that is added to its head, relative to that.
        tied: leave the head out, so that the embedding stands for it.
    """
    racks = Racks.parse(f"0:{cut},{cut}:{int(model.config.num_hidden_layers)}", program_of(model), depth)
    coda, head = rack_of(model, racks, 0).coda(), f"{family_of(model.config).head}.weight"
    disturbance = torch.randn(coda.tensors[head].shape, generator=torch.Generator().manual_seed(1))
    disturbed = coda.tensors[head] + noise * coda.tensors[head].std() * disturbance
    tensors = {name: tensor for name, tensor in coda.tensors.items() if name != head}
    coda = replace(coda, tensors=tensors if tied else tensors | {head: disturbed})
    write_codas(folder, racks.texts, [rack.nodes.stop for rack in racks.ranges], depth, [coda])


@torch.no_grad()
def coda_logits(coda: Coda, ids: Tensor, stream: Tensor) -> Tensor:
    """What a coda predicts, (batch, tokens, vocabulary), in float32.

    Args:
        ids: (batch, tokens); masks and positions go by them.
        stream: (batch, tokens, hidden), after the last node of its rack.
    """
    if len(coda.program):
        model: Any = build_stretch(coda.config, coda.program, coda.tensors, embeds=False)
        with feed_stream(model, stream):
            found: Tensor = model(input_ids=ids, use_cache=False).logits.float()
        return found
    model = AutoModelForCausalLM.from_config(coda.config)
    assert not model.load_state_dict(coda.tensors, strict=False).unexpected_keys
    head = OutputHead(model)
    return head.logits(head.norm(stream).flatten(0, 1)).reshape(*stream.shape[:2], -1)
