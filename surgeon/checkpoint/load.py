"""`surgeon.load`: a `transformers` model from a folder or a hub name, with its program if it has one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from surgeon.checkpoint.read import Checkpoint, locate
from surgeon.checkpoint.remote_code import FUSED
from surgeon.families import family_of
from surgeon.model import PROGRAM_KEY, edit

WIDTHS_KEY = "per_layer_config"  # in config.json of a checkpoint in the fused form

__all__ = ["PROGRAM_KEY", "WIDTHS_KEY", "compute_dtype", "load"]


def compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to compute in: what is stored, but float32 for 16-bit weights on a CPU.

    Many CPUs compute 16-bit matrix products hundreds of times slower than float32 ones, and numbers should not
    depend on which CPU it was.
    """
    return torch.float32 if device.type == "cpu" and stored in (torch.float16, torch.bfloat16) else stored


def load(path_or_name: str | Path, dtype: torch.dtype | None = None, device_map: Any = None) -> PreTrainedModel:
    """Load a model for surgery, in evaluation mode; no code that lies in the folder is run.

    Args:
        path_or_name: a checkpoint folder (edited by surgeon or not) or a hub name.
        dtype: to compute in; by default that of the weights, but float32 for 16-bit weights on a CPU.
        device_map: as in `transformers`: "auto", a device, or a mapping of modules to devices.

    Raises:
        FileNotFoundError: if there is no such model, or a file of it is missing.
        ValueError: if the architecture is not supported or a file is damaged.
    """
    folder = locate(path_or_name)
    checkpoint = Checkpoint(folder)
    config = AutoConfig.from_pretrained(folder)
    family_of(config)
    program = checkpoint.config.get(PROGRAM_KEY)
    if dtype is None:
        device = torch.device("cuda" if device_map is not None and torch.cuda.is_available() else "cpu")
        stored = checkpoint.dtype(checkpoint.names()[0])
        dtype = compute_dtype(stored, device)
    model_class: Any = AutoModelForCausalLM
    if WIDTHS_KEY in checkpoint.config:
        model_class = _fused_class(folder, config.model_type)
    model, report = model_class.from_pretrained(folder, dtype=dtype, device_map=device_map, output_loading_info=True)
    if report["missing_keys"]:
        # transformers would go on with random numbers in their place.
        raise ValueError(
            f"{folder} lacks {len(report['missing_keys'])} tensors of its model: {_some(report['missing_keys'])}"
        )
    model.eval()
    return edit(model, program) if program else model


def _fused_class(folder: Path, model_type: str) -> type[PreTrainedModel]:
    """The class for a checkpoint whose layers differ in width: this package's own."""
    if model_type not in FUSED.names:
        raise ValueError(
            f"{folder} has layers of different widths ({WIDTHS_KEY}), which surgeon loads for {list(FUSED.names)} only"
        )
    return FUSED.model_class(model_type)


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return first if not others else f"{first}, ..."
