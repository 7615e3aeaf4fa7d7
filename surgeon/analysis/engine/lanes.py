"""The windows of a pass shared out to threads, each of which computes on one core.

Threads that work on one product wait for each other after every one of them, thousands of times a second, and where
the machine has something else to do they mostly wait. Threads with windows of their own meet at the end of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from surgeon.beside import Beside, torch_threads
from surgeon.language.program import Program

T = TypeVar("T")
GoOn = Callable[[], None]

# Products of fewer tokens are slower for each of them.
LEAST_TOKENS = 256


def lanes_for(device: torch.device, window: int, windows: int) -> int:
    """Into how many parts to share out windows of so many tokens: one for each thread that torch has, if they suffice.

    On anything but a CPU it is one.
    """
    if device.type != "cpu":
        return 1
    return max(1, min(torch.get_num_threads(), windows, window * windows // LEAST_TOKENS))


def parts_of(windows: range, count: int) -> list[range]:
    """Windows one after the other in about equal parts."""
    bounds = [windows.start + len(windows) * part // count for part in range(count + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def side_by_side(lanes: Sequence[Callable[[GoOn], Iterator[tuple[Program, T]]]]) -> Iterator[tuple[Program, list[T]]]:
    """What several lanes find of each program, in their order, as soon as all of them have it.

    Every lane runs in a thread of its own, where torch has one thread; a single one runs in this thread, as it is.

    Args:
        lanes: each finds something of the same programs. It is given a function to be called between its parts, which
            ends it where the rest is no longer wanted.

    Raises:
        whatever a lane does; the others end then.
    """
    if len(lanes) == 1:
        yield from ((program, [found]) for program, found in lanes[0](lambda: None))
        return
    found: dict[Program, dict[int, T]] = {}
    news: SimpleQueue[Any] = SimpleQueue()  # what a lane has found of a program; at its end, its number

    def work(number: int, go_on: GoOn) -> None:
        try:
            for program, value in lanes[number](go_on):
                news.put((number, program, value))
        finally:
            news.put(number)

    with torch_threads(1), ExitStack() as running:
        works = [running.enter_context(Beside(partial(work, number))) for number in range(len(lanes))]
        left = len(works)
        while left:
            new = news.get()
            if isinstance(new, int):
                left -= 1
                works[new].result()
                continue
            number, program, value = new
            parts = found.setdefault(program, {})
            parts[number] = value
            if len(parts) == len(lanes):
                yield program, [parts[number] for number in range(len(lanes))]
                del found[program]
