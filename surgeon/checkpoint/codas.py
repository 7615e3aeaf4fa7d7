"""Codas beside a checkpoint, by which every rack of a model predicts by itself (see `surgeon.training.racks`).

The checkpoint itself is an ordinary one of the whole program; in its folder lies

    codas/codas.json             racks, the hash of the weights, a coda's configuration and program
    codas/rack-0.safetensors     the coda of rack 0: its layers, final norm and head, named as in a model of these alone

with one file for every rack but the last, whose coda is the end of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from surgeon.checkpoint.belongings import CODAS
from surgeon.checkpoint.stored import Checkpoint
from surgeon.checkpoint.tensor_file import read_header, read_json
from surgeon.language.program import Program
from surgeon.processes.files import publish, scratch, sync_tree, write_json
from surgeon.words import first_line, show_value

INDEX = "codas.json"
FORMAT = 1
_KINDS = {"racks": str, "nodes": int}  # of the items of lists


@dataclass(frozen=True)
class Coda:
    """A model's end that predicts from the stream in its middle.

    Attributes:
        config: of a stock model with the coda's layers.
        program: over these layers; empty where it is a norm and a head alone.
        tensors: by their names in such a model: of its layers, its final norm and its head.
    """

    config: Any
    program: Program
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class StoredCodas:
    """The codas of a checkpoint, not read yet.

    Attributes:
        folder: of the checkpoint.
        racks: ranges of the unedited model's layers, in order, as in "0:8".
        nodes: after how many nodes of the checkpoint's program each rack ends; where pairs are stored as one layer, a
            node is such a layer's attention or feed-forward.
        depth: layers of the unedited model that a coda is made like.
        config, program: as `Coda` has them.
    """

    folder: Path
    racks: tuple[str, ...]
    nodes: tuple[int, ...]
    depth: int
    config: Any
    program: Program

    def coda(self, rack: int, dtype: torch.dtype | None = None) -> Coda:
        """Read the coda of a rack but the last."""
        path = _file(self.folder, rack)
        read_header(path)
        tensors = load_file(path)
        return Coda(
            self.config,
            self.program,
            {name: one.to(dtype or one.dtype) for name, one in tensors.items()},
        )


def write_codas(
    folder: Path,
    racks: Sequence[str],
    nodes: Sequence[int],
    depth: int,
    codas: Sequence[Coda],
    dtype: torch.dtype | None = None,
) -> None:
    """Write codas into the folder of the checkpoint that they belong to, whole or not at all."""
    assert len(codas) == len(racks) - 1 == len(nodes) - 1
    weights = Checkpoint(folder).model_hash()
    target = folder / CODAS
    with scratch(target) as beside:
        for rack, coda in enumerate(codas):
            stored = {name: one.detach().cpu().contiguous() for name, one in coda.tensors.items()}
            if dtype is not None:
                stored = {name: one.to(dtype) for name, one in stored.items()}
            save_file(stored, beside / f"rack-{rack}.safetensors", metadata={"format": "pt"})
        index: dict[str, Any] = {"format": FORMAT, "racks": [*racks], "nodes": [*nodes], "depth": depth}
        index |= {"weights": weights, "program": str(codas[0].program) if codas else ""}
        write_json(beside / INDEX, index | {"config": codas[0].config.to_dict() if codas else {}})
        sync_tree(beside)
        publish(beside, target)


def read_codas(folder: Path, check_weights: bool = True) -> StoredCodas | None:
    """Open the codas beside a checkpoint; None if there are none.

    Args:
        check_weights: compare the hash of the checkpoint's weights, which are read for it.
    """
    path = folder / CODAS / INDEX
    if not path.is_file():
        return None
    index = read_json(path)
    if index.get("format") != FORMAT:
        raise ValueError(
            f"{path} has the format {show_value(index.get('format'))}, and {FORMAT} is known here"
        )
    kinds = {"racks": list, "nodes": list, "depth": int, "weights": str, "program": str, "config": dict}
    wrong = [name for name, kind in kinds.items() if type(index.get(name)) is not kind]
    lists = (name for name, kind in _KINDS.items() if name not in wrong)
    wrong += [name for name in lists if any(type(one) is not _KINDS[name] for one in index[name])]
    if not wrong and (
        not 2 <= len(index["racks"]) == len(index["nodes"]) or index["nodes"] != sorted(index["nodes"])
    ):
        wrong = ["nodes"]
    if wrong:
        raise ValueError(
            f"{path} is damaged: it has {wrong[0]}: {show_value(index.get(wrong[0]))}; train the codas again"
        )
    if check_weights and index["weights"] != Checkpoint(folder).model_hash():
        raise ValueError(
            f"the codas in {path.parent} are of other weights than those in {folder}; remove the folder, or train them "
            "again"
        )
    try:
        config = CONFIG_MAPPING[index["config"].get("model_type")].from_dict(index["config"])
        program = Program.parse(index["program"])
    except Exception as error:  # whatever it trips over is a fault of the file
        raise ValueError(
            f"{path} describes no coda ({first_line(error)}); train the codas again"
        ) from error
    for rack in range(len(index["racks"]) - 1):
        if not _file(folder, rack).is_file():
            raise FileNotFoundError(f"{_file(folder, rack)} is missing: {INDEX} names that rack")
    return StoredCodas(
        folder, tuple(index["racks"]), tuple(index["nodes"]), index["depth"], config, program
    )


def _file(folder: Path, rack: int) -> Path:
    return folder / CODAS / f"rack-{rack}.safetensors"
