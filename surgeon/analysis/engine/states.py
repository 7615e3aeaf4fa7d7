"""Where the states of a plan are held between tasks: in memory, and on disk what does not fit there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgeon.analysis.engine.sharing import SharedPlan, reads
from surgeon.language.execute import State
from surgeon.memory import show_size
from surgeon.models.weights import Tensors

Register = State | Tensor  # a state, or a running sum of what branches add
PREFIX = ".states-"


class States:
    """The registers of a plan while it runs.

    Beyond the limit, the states that are needed last go to files in a folder of their own, and come back when they are
    read. The folder is removed at the end.

    Args:
        plan: says when each register is needed last.
        limit: bytes that may be held in memory; None for no limit.
        folder: where to make a folder for the rest; the system's own for temporary files if None.

    Raises:
        OSError: when the disk is full.
    """

    def __init__(self, plan: SharedPlan, limit: int | None = None, folder: Path | None = None) -> None:
        self.limit = limit
        self.folder = None if limit is None else Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
        self.last_use = {register: turn for turn, task in enumerate(plan.tasks) for register in reads(task)}
        self.in_memory: dict[int, Tensors] = {}
        self.on_disk: dict[int, torch.device] = {}
        self.bytes = 0  # of what is in memory

    def __enter__(self) -> States:
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, register: int) -> Register:
        tensors = self.in_memory.get(register)
        if tensors is None:
            tensors = load_file(self._file(register), device=str(self.on_disk[register]))
        if "sum" in tensors:
            return tensors["sum"]
        pending = tensors.get("pending")
        return State(tensors["stream"], None if pending is None else lambda: pending, tensors.get("added"))

    def __setitem__(self, register: int, value: Register) -> None:
        self.in_memory[register] = _as_tensors(value)
        self.bytes += _size(self.in_memory[register])
        while self.limit is not None and self.bytes > self.limit and self.in_memory:
            self._store(max(self.in_memory, key=lambda one: self.last_use.get(one, -1)))

    def __delitem__(self, register: int) -> None:
        if register in self.in_memory:
            self.bytes -= _size(self.in_memory.pop(register))
        else:
            del self.on_disk[register]
            self._file(register).unlink()

    def _store(self, register: int) -> None:
        tensors = self.in_memory.pop(register)
        size = _size(tensors)
        self.bytes -= size
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self._file(register))
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"no room for {show_size(size)} of hidden states in {self._file(register).parent} ({error}); free some "
                "space, raise memory, or measure fewer tokens"
            ) from error
        self.on_disk[register] = next(iter(tensors.values())).device

    def _file(self, register: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{register}.safetensors"


def register_bytes(value: Register) -> int:
    """How much memory a state, or a running sum, takes."""
    return _size(_as_tensors(value))


def _as_tensors(value: Register) -> Tensors:
    if isinstance(value, Tensor):
        return {"sum": value}
    pending = None if value.pending is None else value.pending()
    parts = {"stream": value.stream, "pending": pending, "added": value.added}
    return {name: tensor for name, tensor in parts.items() if tensor is not None}


def _size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
