"""Cores and threads: their number, their owners, waiting, and bounded work in threads that failures leave none of."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Generic, TypeVar

from surgeon.progress import Advance

SPIN = "GOMP_SPINCOUNT"
POLICY = "OMP_WAIT_POLICY"
TOPOLOGY = Path("/sys/devices/system/cpu")
LOOKS = "100000"  # before a thread sleeps: some tenths of a millisecond


def wait_asleep() -> None:
    """Have waiting threads of this process and its children sleep soon; call it before torch is imported.

    GNU's OpenMP, which torch computes with, spins by default and takes the core of another process: decoding beside one
    was 16 times slower. A scan of the demo model on two cores took 20 s with endless spinning, 27 s with none and 18 s
    with this much; beside two busy processes 41 s with none and 37 s with this much. Settings in the user's environment
    stay.
    """
    if SPIN not in os.environ and POLICY not in os.environ:
        os.environ[SPIN] = LOOKS


def usable_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Divide this process's cores among so many processes; at most OMP_NUM_THREADS."""
    cores = usable_cores()
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores // ranks, int(wanted) if wanted.isdecimal() else cores))


def keep_to_share(number: int, count: int) -> None:
    """Pin this thread, and those that it starts, to their own part of the cores.

    Else two of several processes that wait for each other come to lie on one core where a third one is busy, and stay
    there. Pinned they lose next to nothing to a process of lower priority (scripts/bench/engines.py --neighbour).
    Nothing happens where there are fewer cores than processes, or no affinity.

    Args:
        number: of this process among `count`, from 0.
        count: processes that share this one's cores.
    """
    if not hasattr(os, "sched_setaffinity") or usable_cores() < count:
        return
    cores = sorted(os.sched_getaffinity(0), key=_whereabouts)
    with suppress(OSError):  # where that is forbidden, things are as they were
        os.sched_setaffinity(0, cores[len(cores) * number // count : len(cores) * (number + 1) // count])


def _whereabouts(core: int) -> tuple[int, int, int]:
    """Return a core's processor and physical core, which two may share."""
    found = []
    for name in ("physical_package_id", "core_id"):
        try:
            found.append(int((TOPOLOGY / f"cpu{core}" / "topology" / name).read_text()))
        except (OSError, ValueError):
            found.append(0)
    return found[0], found[1], core


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
        """Wait for the work's end."""
        self._thread.join()

    def result(self) -> T:
        """Wait for the work's result; raises its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._done[0]


class Stopped(Exception):
    """Ends work in a thread that is no longer wanted."""


class Beside(Background[T]):
    """Work in a thread that has ended when the block around it is left.

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
    """Let several threads advance, one at a time."""
    lock = Lock()

    def told(amount: float) -> None:
        with lock:
            advance(amount)

    return told


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Compute with so many threads in this thread, and in those begun meanwhile."""
    import torch  # what only sets the environment does without

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_order(pool: Executor, work: Callable[[S], T], items: Iterable[S], ahead: int) -> Iterator[T]:
    """Yield results of some work in the order of its items, of which so many are under way at most."""
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
