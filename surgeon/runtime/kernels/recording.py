"""Records what the kernels are called with in one forward pass, so that all of it can be done again by a single call.

A pass is computed as it always is, by the same executor and the same layers. Meanwhile every call of a kernel is noted,
and every one of PyTorch's operations is looked at: what only makes a view of something costs nothing and need not be
done again, new tensors are given memory of the recording's, sums are computed by a kernel. With anything else in it a
pass is computed to its end, and there is no recording. What is done again reads and writes the same addresses: who
wants other numbers computed writes them there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from surgeon.runtime.kernels.functions import Kernels
from surgeon.runtime.kernels.library import RECORDABLE, Call, noting

Replay = Callable[[], None]
LEAST = 64  # numbers of a buffer
aten = torch.ops.aten


class Arena:
    """Memory for what recorded passes compute: the same for all of them, as each is done with before another starts."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def empty(self, shape: Sequence[int]) -> Tensor:
        """Room for float32 numbers of this shape, free again when nobody has the tensor or a view of it."""
        count = math.prod(shape)
        buffer = next((one for one in self._buffers if one.numel() >= count and _users(one) == 0), None)
        if buffer is None:  # of a power of two, so that all sizes of passes together need twice what the largest needs
            buffer = torch.empty(max(LEAST, 1 << (count - 1).bit_length()))
            self._buffers = sorted([*self._buffers, buffer], key=Tensor.numel)
        return buffer[:count].view(shape)

    @staticmethod
    def borrowed(tensor: Tensor) -> Tensor:
        """The same numbers, which do not keep others from being given their memory; as long as the arena lives."""
        numbers = (c_float * tensor.numel()).from_address(tensor.data_ptr())
        return torch.frombuffer(numbers, dtype=torch.float32).view(tensor.shape)


def _users(buffer: Tensor) -> int:
    """How many tensors there are that lie in a buffer, besides itself."""
    storage = buffer.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 2  # type: ignore[attr-defined]


class Recording(TorchDispatchMode):
    """What this thread computes while it is entered, in inference mode, on tensors of float32 on the CPU.

    Attributes:
        problem: what cannot be recorded and has been computed, if anything.
    """

    def __init__(self, kernels: Kernels, arena: Arena) -> None:
        super().__init__()
        self.problem: str | None = None
        self._kernels = kernels
        self._arena = arena
        self._calls: list[Call] = []
        self._kept: list[Tensor] = []

    @contextmanager
    def during(self) -> Iterator[None]:
        """Record what is computed inside."""
        with noting(self), self:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside of that, what is computed here is not recorded."""
        with noting(None), _disable_current_modes():
            yield

    def note(self, name: str, *arguments: Any) -> None:
        """Take in a call of a kernel, whether it is made now or not."""
        if name in RECORDABLE:
            self._calls.append((name, arguments))
        else:
            self.problem = name

    def empty(self, shape: Sequence[int]) -> Tensor:
        """A new tensor, whose memory is kept for it as long as anybody has it."""
        return self._arena.empty(shape)

    def finished(self) -> Replay | None:
        """What does all of it again; None if something in it could not be recorded."""
        if self.problem is not None:
            return None
        library, table = self._kernels.library, self._kernels.library.table(self._calls)
        kept = (table, *self._kept)

        def replay() -> None:
            library.call("replay", kept[0].data_ptr(), len(kept[0]))

        return replay

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        asked = any(kwargs.values())  # for a dtype or a device; new tensors are told not to be pinned
        if func is aten.new_empty.default and not asked:
            return self.empty(args[1])
        if func is aten.empty_like.default and not asked:
            return self.empty(args[0].shape)
        if func is aten.add.Tensor and not kwargs and _can_be_added(*args):
            total = self.empty(args[0].shape)
            self._kernels.add(*args, total)
            return total
        made = func(*args, **kwargs)
        if func is aten.zeros_like.default:  # nothing writes to it
            self._kept.append(made)
        else:
            self.problem = str(func)
        return made


def _can_be_added(x: object, y: object) -> bool:
    """Whether the kernel can."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape):
        return False
    return x.dtype == y.dtype == torch.float32 and x.is_contiguous() and y.is_contiguous()
