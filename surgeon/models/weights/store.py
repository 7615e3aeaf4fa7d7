"""Homes of a model's tensors, modules in memory among them; a checkpoint's folder (`Checkpoint`) is another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]


class Store(Protocol):
    """Tensors by the names they are stored under."""

    where: str  # what error messages call it

    def names(self) -> Iterable[str]:
        """All of them."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it where that takes time."""
        return tuple(self.tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, likewise."""
        return self.tensor(name).dtype

    def tensor(self, name: str) -> Tensor:
        """One whole tensor."""

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        """Elements first..end-1 along one dimension of a tensor."""
        return self.tensor(name).narrow(dim, first, end - first)


def dense(tensor: Any) -> Tensor:
    """Return a tensor whose numbers are in memory, also of a `PackedTensor`."""
    found: Tensor = tensor
    if hasattr(tensor, "numbers"):
        found = tensor.numbers()
    return found


class NamedTensors(Store):
    """Tensors that are given, by their names."""

    where = "the state dict"

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise ValueError(f"the state dict has no {name!r}, which its architecture asks for")
        return self.tensors[name]


class ModuleStore(Store):
    """The parameters of a module in memory, or wherever `accelerate` has put them.

    Args:
        prefix: of all names, before the module's own.
    """

    where = "the model"

    def __init__(self, module: nn.Module, prefix: str = "") -> None:
        self.module = module
        self.prefix = prefix

    def names(self) -> Iterable[str]:
        return [
            f"{self.prefix}{name}" for name, _ in self.module.named_parameters(remove_duplicate=False)
        ]

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._of(name).dtype

    def tensor(self, name: str) -> Tensor:
        """Return a parameter's values, without a copy where they are in memory; fetched where they are offloaded."""
        from accelerate.utils import align_module_device

        parameter = self._of(name)
        owner = self._owner(name)
        if owner is None or not hasattr(owner, "_hf_hook"):
            return dense(parameter.detach())
        with align_module_device(owner):
            fetched: Tensor = getattr(owner, name.rpartition(".")[2]).detach().clone()
        return fetched

    def _of(self, name: str) -> Tensor:
        parameter = self._find(name)
        if parameter is None:
            raise ValueError(
                f"the model has no parameter {name!r}, which its architecture asks for; if it has adapters, merge "
                "adapters into the model first"
            )
        return parameter

    def _find(self, name: str) -> Tensor | None:
        """Find a parameter, or a buffer that is stored as one is."""
        owner = self._owner(name)
        last = name.rpartition(".")[2]
        if owner is None:
            return None
        stored = last not in owner._non_persistent_buffers_set
        return owner._parameters.get(last, owner._buffers.get(last) if stored else None)

    def _owner(self, name: str) -> nn.Module | None:
        """Find the module that has a parameter of its own, anew each time: parameters can be replaced."""
        if not name.startswith(self.prefix):
            return None
        owner: nn.Module | None = self.module
        for step in name.removeprefix(self.prefix).split(".")[:-1]:
            if owner is None:
                owner = None
            else:
                owner = owner._modules.get(step)
        return owner
