"""Model folders as they are found: what a saved tiny model lacks, added to its folder.

Every function changes a folder in place that `save_pretrained` wrote as one safetensors file, and returns it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgeon.models.families import Family, family_named

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """What the one file of a folder holds, in its order."""
    return load_file(folder / SINGLE)


def store(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Put other tensors into the one file."""
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / SINGLE,
        {"format": "pt"},
    )
    return folder


def configure(folder: Path, **entries: Any) -> Path:
    """Change entries of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


def family_in(folder: Path) -> Family:
    """The family that config.json names."""
    return family_named(json.loads((folder / "config.json").read_text())["model_type"])


def end_names(folder: Path) -> tuple[str, str]:
    """What embedding and head are called in the file."""
    family = family_in(folder)
    return f"{family.embedding}.weight", f"{family.stored_head or family.head}.weight"


def with_own_head(folder: Path, seed: int = 7) -> Path:
    """Store a head of other numbers beside embeddings that config.json says are tied."""
    tensors, (embedding, head) = tensors_of(folder), end_names(folder)
    noise = torch.randn(tensors[embedding].shape, generator=torch.Generator().manual_seed(seed))
    return store(
        configure(folder, tie_word_embeddings=True), tensors | {head: noise.to(tensors[embedding].dtype)}
    )


def with_copied_head(folder: Path) -> Path:
    """Store tied embeddings twice."""
    tensors, (embedding, head) = tensors_of(folder), end_names(folder)
    return store(
        configure(folder, tie_word_embeddings=True), tensors | {head: tensors[embedding].clone()}
    )


def with_head_only(folder: Path) -> Path:
    """Store tied embeddings under the head's name."""
    tensors, (embedding, head) = tensors_of(folder), end_names(folder)
    matrix = tensors.pop(embedding)
    return store(configure(folder, tie_word_embeddings=True), tensors | {head: matrix})


def with_buffers(folder: Path) -> Path:
    """Store buffers that older versions stored, in other dtypes than weights have, the first tensors among them.

    A safetensors file has its widest dtype first, and so these.
    """
    tensors, family = tensors_of(folder), family_in(folder)
    buffers: dict[str, Tensor] = {}
    norm, query = f"{family.attention.stages[0]}.weight", family.attention.projection("q").path
    for name in [name for name in tensors if name.endswith(f".{norm}")]:
        attention = name.removesuffix(norm) + query.rpartition(".")[0]
        if family.positions.rotary:
            buffers[f"{attention}.rotary_emb.inv_freq"] = torch.rand(4, dtype=torch.float64)
        if family.model_type.startswith("gpt"):
            buffers[f"{attention}.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.int64).tril()
            buffers[f"{attention}.masked_bias"] = torch.tensor(-1e9, dtype=torch.float64)
    return store(folder, buffers | tensors)


def with_index(folder: Path, seed: int = 11) -> Path:
    """Put shards of other weights, and their index, beside the one file."""
    generator, shard = torch.Generator().manual_seed(seed), "model-00001-of-00001.safetensors"
    others = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in tensors_of(folder).items()
    }
    save_file(others, folder / shard, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(others, shard)}))
    return folder


def with_generation_config(folder: Path) -> Path:
    """Say how to generate: end tokens of its own, and sampling that penalises repetition."""
    entries = {"eos_token_id": [5, 7], "do_sample": True, "temperature": 0.5, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(entries))
    return folder
