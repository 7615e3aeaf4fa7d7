"""Work in threads beside other work: a bounded amount at a time, and none of it left behind when something fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Generic, TypeVar

import torch

from surgeon.progress import Advance

S = TypeVar("S")
T = TypeVar("T")


class Background(Generic[T]):
    """Work in a thread of its own, which does not keep a program from ending."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done: list[T] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._done.append(self._work())
        except Exception as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._error = error

    def wait(self) -> None:
        """Wait for the work's end, whatever comes of it."""
        self._thread.join()

    def result(self) -> T:
        """Wait for the work's end; raises what it raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._done[0]


class Stopped(Exception):
    """Ends work in a thread that is no longer wanted."""


class Beside(Background[T]):
    """Work in a thread that has ended when the block around it is left, however that is left.

    Args:
        work: is given a function to be called between its parts, which raises `Stopped` once nobody wants the rest.
    """

    def __init__(self, work: Callable[[Callable[[], None]], T]) -> None:
        self._unwanted = Event()
        super().__init__(lambda: work(self._go_on))

    def _go_on(self) -> None:
        if self._unwanted.is_set():
            raise Stopped

    def __enter__(self) -> Beside[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._unwanted.set()
        self.wait()


def one_at_a_time(advance: Advance) -> Advance:
    """The same for several threads, of which one at a time is let in."""
    lock = Lock()

    def told(amount: float) -> None:
        with lock:
            advance(amount)

    return told


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """While inside, torch computes with so many threads in this thread, and in those begun meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_order(pool: Executor, work: Callable[[S], T], items: Iterable[S], ahead: int) -> Iterator[T]:
    """Results of some work in the order of what it is done on, of which so many are under way at most."""
    under_way: deque[Future[T]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) >= ahead:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()
