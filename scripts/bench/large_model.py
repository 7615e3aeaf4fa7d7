"""A random Llama as a checkpoint in shards, of any size: one tensor of it is in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from surgeon.checkpoint.tensor_file import PlannedTensor, Writing, split_into_shards

# All values are made of so many random numbers, which is quick; it is a prime, so that rows differ.
BLOCK = 1_000_003


def make_model(
    folder: Path, config: LlamaConfig, shard: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write it.

    Args:
        shard: bytes of a file, at most, unless a tensor alone has more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    config.save_pretrained(folder)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, dtype=dtype).state_dict()
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    tensors = [
        PlannedTensor(name, one.shape, dtype, False, partial(_values, one.shape, block, place))
        for place, (name, one) in enumerate(outline.items())
    ]
    with Writing(folder, split_into_shards(tensors, shard)) as writing:
        writing.finish()


def _values(shape: torch.Size, block: Tensor, place: int) -> Iterator[Tensor]:
    """Of a norm around one; of a matrix such that its products are as large as what they are made of.

    Args:
        place: of the tensor in the model, so that no two layers are the same one.
    """
    own = block.roll(place)
    if len(shape) == 1:
        yield 1 + 0.1 * own[: shape[0]]
        return
    left = shape.numel()
    scaled = own / math.sqrt(shape[-1])
    while left > 0:
        yield scaled[:left]
        left -= BLOCK
