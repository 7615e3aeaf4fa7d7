"""One safetensors file that belongs to no index: what lies beside a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from surgeon.checkpoint.header import read_header


class TensorFile:
    """The tensors of a file, read whole or in part when they are asked for (a `Store` of `surgeon.models.weights`).

    Raises:
        ValueError: if the file is damaged.
        OSError: if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = read_header(path)

    @property
    def where(self) -> str:
        """What error messages call it."""
        return str(self.path)

    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        self._require(name)
        return self._held[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""
        self._require(name)
        return self._held[name].dtype

    def tensor(self, name: str) -> Tensor:
        """One whole tensor."""
        self._require(name)
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        """Elements first..end-1 along one dimension (0 or 1) of a tensor; nothing else is read."""
        self._require(name)
        with safe_open(self.path, framework="pt") as file:
            view = file.get_slice(name)
            part: Tensor = view[first:end] if dim == 0 else view[:, first:end]
        return part

    def _require(self, name: str) -> None:
        if name not in self._held:
            raise ValueError(f"{self.path} has no tensor {name!r}, which its architecture asks for")
