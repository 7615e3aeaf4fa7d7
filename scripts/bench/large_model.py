"""A random Llama in bfloat16 as a checkpoint in shards, of any size: one shard of it is in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

# Random numbers, of which all values are made, which is quick; a prime, so that rows differ.
BLOCK = 1_000_003


def make_model(folder: Path, config: LlamaConfig, shard: int) -> None:
    """Write it.

    Args:
        shard: bytes of a file, at most, unless a tensor alone has more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    # So that no two layers are the same one.
    places = {name: place for place, name in enumerate(outline)}
    shards = in_shards({name: tensor.nbytes for name, tensor in outline.items()}, shard)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _values(outline[name].shape, block.roll(places[name])) for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in outline.values())},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def in_shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names of tensors of these sizes in bytes, in their order, by file."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _values(shape: torch.Size, block: Tensor) -> Tensor:
    """Of a norm around one; of a matrix such that its products are as large as what they are made of."""
    if len(shape) == 1:
        return (1 + 0.1 * block[: shape[0]]).bfloat16()
    scaled = (block / math.sqrt(shape[-1])).bfloat16()
    return scaled.repeat(-(-shape.numel() // len(block)))[: shape.numel()].view(shape).clone()
