"""A rack as one file: all that another process needs to go on with it, and nothing of the other racks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from surgeon.checkpoint.header import read_header
from surgeon.errors import first_line
from surgeon.language.program import Program
from surgeon.processes.files import whole_file
from surgeon.training.racks.model import RackModel
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.stretch import build_stretch

_KEY = "surgeon_rack"  # in the file's metadata


def save_rack(rack: RackModel, path: Path) -> None:
    """Write a rack: its tensors, and as metadata its place among the racks, its configuration and its program.

    The file is there whole or not at all.

    Raises:
        OSError: if the disk is full or cannot be written.
    """
    found, racks = rack.tensors(), rack.racks
    said = {
        "index": rack.index,
        "racks": racks.texts,
        "depth": racks.depth,
        "whole": str(racks.program),
        "program": str(found.program),
        "config": found.config.to_dict(),
    }
    tensors = {name: one.cpu().contiguous() for name, one in found.named().items()}
    if found.config.tie_word_embeddings:
        tensors = {name: one for name, one in tensors.items() if not name.startswith(f"{found.family.head}.")}
    with whole_file(path, durable=True) as beside:
        save_file(tensors, beside, metadata={_KEY: json.dumps(said)})


def open_rack(path: Path) -> RackModel:
    """A rack that was written; only its own tensors come into memory.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, or no rack's.
    """
    read_header(path)
    with safe_open(path, framework="pt") as file:
        said: Any = (file.metadata() or {}).get(_KEY)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    try:
        said = json.loads(said)
        config = CONFIG_MAPPING[said["config"]["model_type"]].from_dict(said["config"])
        racks = Racks.parse(said["racks"], Program.parse(said["whole"]), said["depth"])
        index, program = int(said["index"]), Program.parse(said["program"])
        nodes = len(racks.ranges[index].nodes)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the file of a rack ({first_line(error)}); begin the run again") from error
    return RackModel(racks, index, build_stretch(config, program, tensors, index == 0, nodes))
