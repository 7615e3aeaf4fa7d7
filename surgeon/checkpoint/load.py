"""`surgeon.load`: a `transformers` model from a folder or a hub name, with its program if it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from surgeon.checkpoint.read import Checkpoint, locate
from surgeon.families import family_of
from surgeon.model import PROGRAM_KEY, edit

__all__ = ["PROGRAM_KEY", "compute_dtype", "load"]


def compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to compute in: what is stored, but float32 for 16-bit weights on a CPU.

    Many CPUs compute 16-bit matrix products hundreds of times slower than float32 ones, and numbers should not
    depend on which CPU it was.
    """
    return torch.float32 if device.type == "cpu" and stored in (torch.float16, torch.bfloat16) else stored


def load(path_or_name: str | Path, dtype: torch.dtype | None = None, device_map: Any = None) -> PreTrainedModel:
    """Load a model for surgery, in evaluation mode.

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
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device_map)
    model.eval()
    return edit(model, program) if program else model
