"""Recordings of the kernels' calls in one forward pass, so that all of it can be done again by a single call.

A pass is computed as always. Meanwhile every call of a kernel is noted, and every one of PyTorch's operations is looked
at: views need not be made again, new tensors are given memory of the recording's, sums, multiples and copies are
computed by kernels. With anything else in it there is no recording. A replay reads and writes the same addresses.

GPUs record CUDA graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_float
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from surgeon.runtime.kernels.functions import NOTES, RECORDABLE, Call, Kernels, note_calls

Replay = Callable[[bool], list[float]]
LEAST = 64  # numbers of a buffer
aten = torch.ops.aten


class Arena:
    """Memory for what recorded passes compute: the same for all of them, as each is done with before another starts."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def empty(self, shape: Sequence[int]) -> Tensor:
        """Room for float32 numbers of this shape, free again when nobody has the tensor or a view of it."""
        count = math.prod(shape)
        buffer = next((one for one in self._buffers if one.numel() >= count and _users(one) == 0), None)
        # Sizes are powers of two, so that all sizes of passes together need twice the memory of the largest.
        if buffer is None:
            buffer = torch.empty(max(LEAST, 1 << (count - 1).bit_length()))
            self._buffers = sorted([*self._buffers, buffer], key=Tensor.numel)
        return buffer[:count].view(shape)

    @staticmethod
    def borrow(tensor: Tensor) -> Tensor:
        """View the numbers without keeping others from being given their memory; as long as the arena lives."""
        if not tensor.numel():  # as a rank's logits where there are fewer tokens than ranks
            return tensor.new_empty(tensor.shape)
        numbers = (c_float * tensor.numel()).from_address(tensor.data_ptr())
        return torch.frombuffer(numbers, dtype=torch.float32).view(tensor.shape)


def _users(buffer: Tensor) -> int:
    """Count the tensors that lie in a buffer, besides itself."""
    storage = buffer.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 2


class Span(NamedTuple):
    """Calls whose time somebody wants to know, and what they are for."""

    what: Any
    first: int
    end: int


class Recording(TorchDispatchMode):
    """A recording of this thread's work while it is entered, in inference mode, on tensors of float32 on the CPU.

    Attributes:
        problem: an operation that cannot be recorded and has been computed, if any.
        spans: of calls, as `mark_calls` has noted them.
        checks: of what has been sent, behind each replay.
    """

    def __init__(self, kernels: Kernels, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problem: str | None = None
        self._kernels = kernels
        self._arena = arena
        self.calls: list[Call] = []
        self.spans: list[Span] = []
        self.checks = set[Callable[[], None]]()
        self._kept: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and to say so PyTorch imports a compiler for half a second.
        return False

    @contextmanager
    def during(self) -> Iterator[None]:
        with note_calls(self), self:
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing inside."""
        with note_calls(None), _disable_current_modes():
            yield

    def note(self, name: str, *arguments: Any) -> None:
        """Take in a call of a kernel, whether it is made now or not."""
        if name in RECORDABLE:
            self.calls.append((name, arguments))
        else:
            self.fail(name)

    def fail(self, problem: str) -> None:
        """Note that something has been computed that cannot be recorded; the first one is remembered."""
        self.problem = self.problem or problem

    def empty(self, shape: Sequence[int]) -> Tensor:
        """Make a tensor, whose memory is kept for it as long as anybody has it."""
        with self.pause():
            return self._arena.empty(shape)

    def finish(self) -> Replay | None:
        """Give the replay; None if something could not be recorded.

        Asked to, it says when the first call began and when each ended, in seconds of the monotonic clock.
        """
        if self.problem is not None:
            return None
        kernels = self._kernels
        checks = self.checks
        table = kernels.table(self.calls)
        memory = self._arena, *self._kept

        def replay(timed: bool) -> list[float]:
            assert memory  # the table has addresses in it
            times = None
            if timed:
                times = torch.empty(len(table) + 1, dtype=torch.int64)
            kernels.call("replay", table, len(table), times)
            for check in checks:
                check()
            if times is None:
                return []
            return (times.double() / 1e9).tolist()

        return replay

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # PyTorch says that this is a view, which it is only where nothing need be copied.
        if func is aten.contiguous.default and not kwargs and _of_rows(args[0]):
            return self._side_by_side([args[0]])
        if func.is_view:
            made = func(*args, **kwargs)
            if not _views(made, args[0]):  # of some functions only some results are
                self.fail(str(func))
            return made
        if func in (aten.new_empty.default, aten.empty_like.default) and _of_numbers(args[0], kwargs):
            return self.empty(args[1] if func is aten.new_empty.default else args[0].shape)
        if func is aten.add.Tensor and not kwargs and _alike(*args):
            total = self.empty(args[0].shape)
            self._kernels.call("add", *args, total.numel(), total)
            return total
        if (
            func in (aten.mul.Tensor, aten.mul_.Tensor)
            and isinstance(args[1], float)
            and _alike(args[0], args[0])
        ):
            if func is aten.mul_.Tensor:
                multiple = args[0]
            else:
                multiple = self.empty(args[0].shape)
            self._kernels.call("scale", *args, multiple.numel(), multiple)
            return multiple
        if (
            func is aten.cat.default
            and not kwargs
            and args[1:] in ((1,), (-1,))
            and all(map(_of_rows, args[0]))
        ):
            return self._side_by_side(args[0])
        made = func(*args, **kwargs)
        if func in (aten.zeros_like.default, aten.new_zeros.default):  # nothing writes to them
            self._kept.append(made)
        else:
            self.fail(str(func))
        return made

    def _side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        """Join parts, (T, width) each, to (T, all widths)."""
        made = self.empty((len(parts[0]), sum(part.shape[1] for part in parts)))
        columns = made.split([part.shape[1] for part in parts], 1)
        for part, column in zip(parts, columns, strict=True):
            rows, width = part.shape
            self._kernels.call("copy_rows", part, rows, part.stride(0), width, column, column.stride(0))
        return made


@contextmanager
def mark_calls(what: Any) -> Iterator[None]:
    """Note which calls are made inside, where they are being recorded."""
    recording = NOTES.get()
    if not isinstance(recording, Recording):
        yield
        return
    first = len(recording.calls)
    yield
    recording.spans.append(Span(what, first, len(recording.calls)))


def _views(made: Any, tensor: Tensor) -> bool:
    parts = made
    if isinstance(made, Tensor):
        parts = [made]
    return all(
        part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts
    )


def _of_numbers(like: Tensor, asked: Mapping[str, Any]) -> bool:
    others = (value for name, value in asked.items() if name != "dtype")
    return (asked.get("dtype") or like.dtype) == torch.float32 and not any(others)


def _of_rows(x: Tensor) -> bool:
    """Tell whether kernels take it: (T, any) of float32, rows side by side."""
    return x.dim() == 2 and x.dtype == torch.float32 and (x.stride(1) == 1 or x.shape[1] == 1)


def _alike(x: object, y: object) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape):
        return False
    return x.dtype == y.dtype == torch.float32 and x.is_contiguous() and y.is_contiguous()


# Before a recording, in which libraries choose kernels and allocate what a recording may not.
WARM_UPS = 2

T = TypeVar("T")


GraphRecorder = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Takes what computes something and may be called several times; gives what computes it again."""


class CudaRecorder:
    """Records CUDA graphs, which share their memory: each is done with before another one starts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One for all graphs: libraries keep memory for each stream that they have computed on.
        self._aside = torch.cuda.Stream(device)
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()

    def __call__(self, compute: Callable[[], T]) -> Callable[[], T]:
        """Record a function's launches; it is called a few times before, which must do no harm."""
        current = torch.cuda.current_stream(self._device)
        aside = self._aside
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                compute()
        current.wait_stream(aside)
        if not self._graphs:  # PyTorch refuses a pool all of whose graphs have gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's watchdog among them, may ask for events meanwhile.
        with torch.cuda.graph(graph, self._pool, aside, capture_error_mode="thread_local"):
            outputs = compute()
        self._graphs.add(graph)

        def replay() -> T:
            graph.replay()
            return outputs

        return replay
