"""Codas beside a checkpoint: what lets every rack of a model predict by itself (see `surgeon.training.racks`).

The checkpoint itself is the whole program, an ordinary checkpoint that everything loads; in its folder lies

    codas/codas.json             which racks, of which weights, and what a coda is
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
from surgeon.checkpoint.read import Checkpoint, read_json
from surgeon.checkpoint.tensor_file import read_header
from surgeon.errors import first_line, shown
from surgeon.language.program import Program
from surgeon.processes.files import sync_tree, write_json
from surgeon.processes.folders import publish, scratch

INDEX = "codas.json"
FORMAT = 1
_KINDS = {"racks": str, "nodes": int}  # of the items of lists


@dataclass(frozen=True)
class Coda:
    """What makes a prediction of the stream in the middle of a model.

    Attributes:
        config: of a stock model with the coda's layers.
        program: over these layers; empty where it has none, and is a norm and a head.
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
        depth: how many layers of the unedited model a coda is made like.
        config, program: as `Coda` has them.
    """

    folder: Path
    racks: tuple[str, ...]
    nodes: tuple[int, ...]
    depth: int
    config: Any
    program: Program

    def __len__(self) -> int:
        return len(self.racks) - 1

    def coda(self, rack: int, dtype: torch.dtype | None = None) -> Coda:
        """The coda of a rack but the last.

        Args:
            dtype: to compute in; by default the stored one.

        Raises:
            FileNotFoundError, ValueError: if its file is missing or damaged.
        """
        path = _file(self.folder, rack)
        read_header(path)
        tensors = load_file(path)
        return Coda(self.config, self.program, {name: one.to(dtype or one.dtype) for name, one in tensors.items()})


def write_codas(
    folder: Path,
    racks: Sequence[str],
    nodes: Sequence[int],
    depth: int,
    codas: Sequence[Coda],
    dtype: torch.dtype | None = None,
) -> None:
    """Write codas into the folder of a checkpoint, whose weights they are of; they are there whole or not at all.

    Args:
        racks, nodes, depth: as `StoredCodas` has them.
        codas: one for each rack but the last, all alike.
        dtype: of the written tensors; by default each keeps its own.

    Raises:
        FileNotFoundError, ValueError: if there is no checkpoint, or it is damaged.
        OSError: if the disk is full or cannot be written.
    """
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
    """The codas beside a checkpoint; None if there are none.

    Args:
        check_weights: read the checkpoint's weights, to be sure that they are those that the codas were made with.

    Raises:
        FileNotFoundError: if a coda is missing.
        ValueError: if they are damaged, or of other weights.
    """
    path = folder / CODAS / INDEX
    if not path.is_file():
        return None
    index = read_json(path)
    if index.get("format") != FORMAT:
        raise ValueError(f"{path} has the format {shown(index.get('format'))}, and {FORMAT} is known here")
    kinds = {"racks": list, "nodes": list, "depth": int, "weights": str, "program": str, "config": dict}
    wrong = [name for name, kind in kinds.items() if type(index.get(name)) is not kind]
    lists = (name for name, kind in _KINDS.items() if name not in wrong)
    wrong += [name for name in lists if any(type(one) is not _KINDS[name] for one in index[name])]
    if not wrong and (not 2 <= len(index["racks"]) == len(index["nodes"]) or index["nodes"] != sorted(index["nodes"])):
        wrong = ["nodes"]
    if wrong:
        raise ValueError(f"{path} is damaged: it has {wrong[0]}: {shown(index.get(wrong[0]))}; train the codas again")
    if check_weights and index["weights"] != Checkpoint(folder).model_hash():
        raise ValueError(
            f"the codas in {path.parent} are of other weights than those in {folder}; remove the folder, or train them "
            "again"
        )
    try:
        config = CONFIG_MAPPING[index["config"].get("model_type")].from_dict(index["config"])
        program = Program.parse(index["program"])
    except Exception as error:  # whatever it trips over is a fault of the file
        raise ValueError(f"{path} describes no coda ({first_line(error)}); train the codas again") from error
    for rack in range(len(index["racks"]) - 1):
        if not _file(folder, rack).is_file():
            raise FileNotFoundError(f"{_file(folder, rack)} is missing: {INDEX} names that rack")
    return StoredCodas(folder, tuple(index["racks"]), tuple(index["nodes"]), index["depth"], config, program)


def _file(folder: Path, rack: int) -> Path:
    return folder / CODAS / f"rack-{rack}.safetensors"
