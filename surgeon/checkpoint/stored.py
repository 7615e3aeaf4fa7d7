"""A model by its files: its configuration and the headers of its weights have been read, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from surgeon.checkpoint.belongings import REPORT_FILE
from surgeon.checkpoint.read import Checkpoint, Wrapped, read_json
from surgeon.checkpoint.training import is_no_source, lacking
from surgeon.errors import shown
from surgeon.gpus import gpu_with_room
from surgeon.language.program import Program
from surgeon.models.families import Family, family_of
from surgeon.models.weights import ModelWeights
from surgeon.words import MOST_LAYERS


@dataclass(frozen=True)
class StoredModel:
    """A model by its configuration and the headers of its weights, as far as forms and loading need it.

    `surgeon.opened.Model` extends it.

    Attributes:
        name: as the user named it: a folder, a hub name, or "demo".
        files: with the headers of its weights; None of a model known by its configuration alone.
        config: as `transformers` reads it.
        own: the program of an edited or native-track checkpoint; None where it runs its layers one after the other.
    """

    name: str
    files: Checkpoint | None
    config: Any
    own: Program | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """Files, with the headers of the weights; ValueError if there is only a configuration."""
        if self.files is None:
            raise ValueError(
                f"{self.name} was opened by its configuration alone, and this needs its files; open it with its weights"
            )
        return self.files

    @property
    def wrapped(self) -> Wrapped | None:
        """The wrapper around it, if it is the text decoder of a larger model."""
        if self.files is None:
            return None
        return self.files.wrapped

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @cached_property
    def family(self) -> Family:
        return family_of(self.config)

    @property
    def num_layers(self) -> int:
        """Number of stored layers."""
        return int(self.config.num_hidden_layers)

    @property
    def program(self) -> Program:
        """The checkpoint's own program, or its layers one after the other."""
        return self.own or Program.dense(self.num_layers, self.family.steps_per_layer)

    @cached_property
    def weights(self) -> ModelWeights:
        """Stored tensors by layer and role, read on demand."""
        return ModelWeights(self.checkpoint, self.family, self.family.head_dim(self.config))

    @cached_property
    def report(self) -> dict[str, Any] | None:
        """surgeon.json, the record of its export; None where it has none."""
        return _read_report(self.folder / REPORT_FILE)

    @property
    def parameters(self) -> int:
        """Number of elements of its tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.checkpoint.tensors.values())

    @property
    def size(self) -> int:
        """Bytes of its tensors in their files."""
        return sum(tensor.num_bytes for tensor in self.checkpoint.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the embedding is stored.

        config.json and other tensors do not count: the stream begins as rows of the embedding, norms are often kept in
        more digits, and buffers may be of any kind.
        """
        name = self.weights.names.of(f"{self.family.embedding}.weight")
        return self.checkpoint.dtype(name)

    def compute_dtype(self, device: torch.device | str) -> torch.dtype:
        """Return the dtype to compute in: the embedding's, but float32 for 16-bit weights on a CPU.

        Many CPUs compute 16-bit matrix products hundreds of times slower than float32 ones, and numbers should not
        depend on the CPU.
        """
        is_slow = torch.device(device).type == "cpu" and self.dtype in (torch.float16, torch.bfloat16)
        if is_slow:
            return torch.float32
        return self.dtype

    def dequantised(self, dtype: str, packed: bool = False) -> str | None:
        """Say in a line that its quantised weights are computed with in a dtype; None without any."""
        if not self.schemes:
            return None
        if packed:
            how = "stay so in memory, and are"
        else:
            how = "are dequantised as they are read, and"
        return f"the weights of {self.name} stored as {', '.join(self.schemes)} {how} computed with in {dtype}"

    @property
    def schemes(self) -> list[str]:
        """Descriptions of how its quantised weights are stored."""
        return list(dict.fromkeys(one.scheme.description for one in self.checkpoint.quantised.values()))

    def bytes_on(self, device: torch.device | str, program: Program | None = None) -> int:
        """Return the memory of a loaded model: its stored weights, and what an edit derives from them."""
        numbers = self.parameters
        runs = program or self.own
        for sublayer in dict.fromkeys(() if runs is None else runs.sublayers()):
            # Its own program's factors and narrow layers are stored.
            changed = program is not None and (sublayer.ranks or sublayer.width is not None)
            if len(sublayer.layers) > 1 or sublayer.piece is not None or changed:
                numbers += sublayer.parameters(self.family.layer_shapes(self.config))
        return numbers * self.compute_dtype(device).itemsize

    def device_map(self, program: Program | None = None) -> Any:
        """Return the GPU with room for all of it, else "auto", as `load` takes it."""
        return gpu_with_room(self.bytes_on("cuda", program)) or "auto"


def _read_report(path: Path) -> dict[str, Any] | None:
    """Read a surgeon.json, checked as far as it is used; None if there is none."""
    if not path.exists():
        return None
    report = read_json(path)
    reason = None
    source, proof, trained, stored = (
        report.get(name) for name in ("source", "proof", "trained", "stored_layers")
    )
    layers = source.get("num_layers") if isinstance(source, dict) else None
    if not (
        isinstance(report.get("program"), str)
        and isinstance(source, dict)
        and (isinstance(source.get("model"), str) or (is_no_source(source) and "trained" in report))
        and type(layers) is int
        and 1 <= layers <= MOST_LAYERS
        and isinstance(source.get("program"), str | None)
    ):
        reason = "it lacks the program or its source"
    elif isinstance(proof, dict) and not (
        all(isinstance(proof.get(name), int | float) for name in ("exact", "written"))
        and type(proof.get("tokens")) is int
        and isinstance(proof.get("dtype"), str)
    ):
        reason = f"its proof is {shown(proof, 200)}; export again"
    elif trained is not None and (not isinstance(trained, dict) or lacking(trained) is not None):
        reason = f"it has trained: {shown(trained, 200)}"
    elif stored is not None and not (
        isinstance(stored, list)
        and all(isinstance(one, list) for one in stored)
        and all(type(layer) is int and 0 <= layer < layers for one in stored for layer in one)
    ):
        reason = f"it has stored_layers: {shown(stored, 200)}"
    if reason is not None:
        raise ValueError(f"{path} is not what surgeon export writes: {reason}")
    return report
