"""Quantised matrices as modules hold them: codes and scales in memory, numbers for as long as an operation runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from surgeon.models.weights.quantised.matrix import Quantised, Scheme
from surgeon.models.weights.store import Tensors

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default)
_TURNED = (torch.ops.aten.t.default, torch.ops.aten.transpose.int)


class PackedTensor(Tensor):
    """A quantised matrix in the memory of what is stored: any operation on it is one on its numbers, made anew for it.

    Autograd keeps it packed for a backward pass, so that a base that is not trained has no dense copy (QLoRA, Dettmers
    et al. 2023, arXiv 2305.14314, section 3). The numbers are those of `Quantised.whole`, in this tensor's dtype.

    Args:
        parts: the tensors that hold it, by their endings.
        size: the matrix's shape.
        dtype: of its numbers.
        turned: whether this is the matrix transposed.
    """

    parts: Tensors
    scheme: Scheme
    size_stored: tuple[int, ...]
    turned: bool

    @staticmethod
    def __new__(
        cls, parts: Tensors, scheme: Scheme, size: Sequence[int], dtype: torch.dtype, turned: bool = False
    ) -> PackedTensor:
        rows, columns = size
        shape, strides = ((columns, rows), (1, columns)) if turned else ((rows, columns), (columns, 1))
        device = next(iter(parts.values())).device
        made: PackedTensor = Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
        made.parts = parts
        made.scheme = scheme
        made.size_stored = tuple(size)
        made.turned = turned
        return made

    @classmethod
    def of(cls, matrix: Quantised, dtype: torch.dtype = torch.float32) -> PackedTensor:
        """Read the tensors of a stored matrix."""
        parts = {ending: matrix.store.tensor(name) for ending, name in matrix.parts.items()}
        return cls(parts, matrix.scheme, matrix.shape, dtype)

    def numbers(self) -> Tensor:
        """Compute the matrix, in memory of its own."""
        values = self.scheme.values(self.parts, self.size_stored).to(self.dtype).contiguous()
        if self.turned:
            return values.T
        return values

    def _like(self, **changed: Any) -> PackedTensor:
        """Copy the matrix with another `dtype`, `turned`, or other `parts`."""
        kept: dict[str, Any] = {"parts": self.parts, "dtype": self.dtype, "turned": self.turned} | changed
        return PackedTensor(kept["parts"], self.scheme, self.size_stored, kept["dtype"], kept["turned"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedTensor({self.scheme.description}, {tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Have PyTorch move it as one tensor, not as one that wraps others."""
        return [], self

    @staticmethod
    def __tensor_unflatten__(inner: Any, made_of: PackedTensor, *shape: Any) -> PackedTensor:
        return made_of

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation on the numbers; one that hands the matrix on, turns, moves or rounds it leaves it packed."""
        first = args[0]
        kwargs = kwargs or {}
        if isinstance(first, cls):
            if function in _SAME:
                return first._like()
            if function in _TURNED:
                return first._like(turned=not first.turned)
            if function is torch.ops.aten._to_copy.default:
                device = kwargs.get("device") or first.device
                parts = {ending: part.to(device) for ending, part in first.parts.items()}
                return first._like(parts=parts, dtype=kwargs.get("dtype") or first.dtype)
            if function._schema.is_mutable:
                raise TypeError(f"{first} stays as it is stored, and is not changed in place by {function}")
        return function(*_with_numbers(args), **_with_numbers(kwargs))


def _with_numbers(values: Any) -> Any:
    return tree_map_only(PackedTensor, PackedTensor.numbers, values)
