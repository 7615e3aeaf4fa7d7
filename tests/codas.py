"""Codas for tiny models: the first rack's, made of the layers behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from surgeon.checkpoint.read import Checkpoint


def save_codas(folder: Path, model: Any, cut: int = 2, depth: int = 1, noise: float = 0.0, tied: bool = False) -> None:
    """Write a coda behind layer `cut`: the model's last `depth` layers, its norm and its head.

    With as many layers as lie behind the cut, and no noise, it says what the model says.

    Args:
        noise: that is added to its head, relative to that.
        tied: leave the head out, so that the embedding stands for it.
    """
    layers = int(model.config.num_hidden_layers)
    tensors: dict[str, torch.Tensor] = {}
    state = model.state_dict()
    prefix = next(name.partition("layers.")[0] for name in state if "layers." in name) + "layers."
    for name, tensor in state.items():
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            if int(number) >= layers - depth:
                tensors[f"{prefix}{int(number) - layers + depth}.{rest}"] = tensor.clone()
        elif not any(word in name for word in ("embed_tokens", "embed_in", "embed_positions", "rotary")):
            tensors[name] = tensor.clone()
    head = next(name for name in tensors if name in ("lm_head.weight", "embed_out.weight"))
    tensors[head] += (
        noise * tensors[head].std() * torch.randn(tensors[head].shape, generator=torch.Generator().manual_seed(1))
    )
    if tied:
        del tensors[head]
    write(folder, tensors, model, cut, depth)


def write(folder: Path, tensors: dict[str, torch.Tensor], model: Any, cut: int, depth: int) -> None:
    layers = int(model.config.num_hidden_layers)
    config = model.config.to_dict() | {"num_hidden_layers": depth}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][-depth:]
    each = 1 if config["model_type"] == "gpt_neox" else 2
    program = " ".join(f"[A{i} F{i}]" if each == 1 else f"A{i} F{i}" for i in range(depth))
    (folder / "codas").mkdir()
    save_file(tensors, folder / "codas" / "rack-0.safetensors", metadata={"format": "pt"})
    record = {
        "format": 1,
        "racks": [f"0:{cut}", f"{cut}:{layers}"],
        "nodes": [each * cut, each * layers],
        "depth": depth,
        "program": program,
        "config": config,
        "weights": Checkpoint(folder).model_hash(),
    }
    (folder / "codas" / "codas.json").write_text(json.dumps(record))
