"""Sums of small operands another way than those of large ones, whichever was faster when that was measured.

What travels while something else is computed does so on a stream of high priority beside the one that computes, and is
joined where it is waited for, so that a recording has both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from surgeon.memory import show_size
from surgeon.runtime.comm.collectives import Collectives
from surgeon.runtime.plan.placement import Group


class SmallSum(Protocol):
    """A way of summing small operands in place, on the current stream."""

    name: str

    def fits(self, tensor: Tensor) -> bool:
        """Whether it can sum such tensors."""

    def __call__(self, tensor: Tensor, aside: bool) -> None:
        """Sum one; those on the side stream have room of their own, because two may be summed at a time."""


class Bound(NamedTuple):
    """Operands up to so many bytes go one way."""

    bytes: int
    way: SmallSum


def bounds(ways: Sequence[SmallSum], seconds: Mapping[int, Sequence[float]]) -> tuple[Bound, ...]:
    """Which way is fastest up to how many bytes, from the smallest operand up to where no way is faster than without.

    Args:
        seconds: by bytes of an operand, what each way took and, behind these, what it took without.
    """
    found: list[Bound] = []
    for size, (*own, without) in sorted(seconds.items()):
        best = min(range(len(own)), key=own.__getitem__)
        if own[best] >= without:
            break
        if found and found[-1].way is ways[best]:
            found.pop()
        found.append(Bound(size, ways[best]))
    return tuple(found)


class SideStream:
    """A stream of a GPU that computes beside the current one, before it where both have work."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device, priority=-1)

    def start(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Compute something behind all that the current stream has to do so far; returns what joins it."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        within: AbstractContextManager[None] = self._cuda.stream(self._stream)
        with within:
            compute()
            event = self._stream.record_event()
        return lambda: self._cuda.current_stream(self._device).wait_event(event)


class BySize(Collectives):
    """Other collectives, whose small sums go other ways."""

    def __init__(
        self,
        inner: Collectives,
        chosen: Sequence[Bound],
        side: SideStream,
        connect: Callable[[Collectives], Collectives] = lambda inner: inner,
    ) -> None:
        """Wrap.

        Args:
            connect: makes the same of some of the ranks.
        """
        super().__init__(inner.rank, inner.group)
        self.inner = inner
        self.chosen = tuple(chosen)
        self._side = side
        self._wrapped = connect

    def __str__(self) -> str:
        return ", ".join([*(f"{way.name} up to {show_size(size)}" for size, way in self.chosen), "NCCL above"])

    @property
    def capturable(self) -> bool:
        return self.inner.capturable

    def _connect(self, group: Group) -> Collectives:
        return self._wrapped(self.inner.subgroup(group))

    def _way(self, tensor: Tensor) -> SmallSum | None:
        way = next((way for size, way in self.chosen if tensor.nbytes <= size), None)
        if way is not None and tensor.is_contiguous() and way.fits(tensor):
            return way
        return None

    def _sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        way = self._way(tensor)
        if way is None:
            return self.inner._sum(tensor)
        way(tensor, False)
        return lambda: tensor

    def _all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        way = self._way(tensor)
        if way is None:
            return self.inner._all_reduce(tensor)
        join = self._side.start(lambda: way(tensor, True))

        def wait() -> Tensor:
            join()
            return tensor

        return wait

    def _gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self.inner._gather(tensor)

    def _all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self.inner._all_gather(tensor)
