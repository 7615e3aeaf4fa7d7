"""This machine: its cores and threads, its memory, its GPUs.

Settings of the environment are made before torch is imported. Work in threads is bounded, and failures leave none.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Generic, TypeVar

from surgeon.progress import Advance
from surgeon.words import plural

# It takes seconds, and the command line only wants to set the environment, or to read a size.
if TYPE_CHECKING:
    import torch

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
        self._done: Future[T] = Future()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._done.set_result(self._work())
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result, who would wait for ever
            self._done.set_exception(error)

    def result(self) -> T:
        """Wait for the work's result; raises its error."""
        return self._done.result()


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
        self._thread.join()


def one_at_a_time(advance: Advance) -> Advance:
    """Let several threads advance, one at a time."""
    lock = Lock()

    def tell(amount: float) -> None:
        with lock:
            advance(amount)

    return tell


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


HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
# How glibc's allocator is set: variables of the environment, parameters of mallopt(3), and values.
KEPT_FREE = ("MALLOC_TRIM_THRESHOLD_", -1, 128 << 20)  # bytes kept at the end of its heap, or nothing
ON_HEAP = ("MALLOC_MMAP_THRESHOLD_", -3, 32 << 20)  # tensors up to so many bytes, the most that it takes
ARENAS = ("MALLOC_ARENA_MAX", -8, 2)  # heaps for all threads
_UNITS = ("", "K", "M", "G", "T")
_NEAR = 0.9
FREE_SHARE = 0.8  # of the memory that is left, what surgeon takes at most
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a size such as 512MB or 2GB to bytes: 1 MB is 10^6 of them, 1 MiB 2^20.

    Raises:
        ValueError: if it is no size above 0.
    """
    match = _SIZE.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is no amount of memory; write e.g. 512MB or 2GB")
    step = 1024 if match[3] else 1000
    return int(float(match[1]) * step ** _UNITS.index(match[2].upper()))


def show_size(size: float) -> str:
    """Write a size of three digits: 6.3 MB, 512 MB, 1.25 GB."""
    rounded = float(f"{size:.3g}")
    if rounded < 1000:
        return plural(round(size), "byte")
    power = min(len(_UNITS) - 1, int(math.log10(rounded)) // 3)
    return f"{rounded / 1000**power:,.12g} {_UNITS[power]}B"


def use_huge_pages() -> None:
    """Put large tensors in huge pages, where the system gives them on request; call before importing torch.

    Fewer page lookups saved some hundredths of a pass; scans, whose tensors come and go, were not faster. Settings in
    the user's environment stay.
    """
    os.environ.setdefault(HUGE_PAGES, "1")


def share_heaps() -> None:
    """Serve all threads' memory from two heaps (glibc; elsewhere nothing changes); call before they begin.

    Else each thread's own keeps its peak: 0.2 GB of the peak of a fused export of 8 GB
    (MALLOC_ARENA_MAX=16 python scripts/bench/export.py --only fused). Settings in the user's environment stay.
    """
    _set_allocator(ARENAS)


def keep_freed_memory() -> None:
    """Keep some of the memory that one pass frees for the next one (glibc; elsewhere nothing changes).

    Memory returned to the system comes back as pages to be cleared, which took a tenth of a prompt of 512 tokens.
    Settings in the user's environment stay.
    """
    _set_allocator(KEPT_FREE, ON_HEAP)


def resident_bytes() -> int:
    """Return the memory that this process holds now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def free_bytes() -> int:
    """Return the memory that this process may still take without a user's limit: most of the machine's free."""
    import psutil

    return int(FREE_SHARE * psutil.virtual_memory().available)


def gpu_free_bytes(number: int) -> int:
    """Return the same of a GPU; PyTorch's reserve beyond tensors counts as free."""
    import torch

    kept = torch.cuda.memory_reserved(number) - torch.cuda.memory_allocated(number)
    return int(FREE_SHARE * (torch.cuda.mem_get_info(number)[0] + kept))


def available_bytes(device: torch.device, limit: int | None = None) -> int:
    """Return the memory of a device that this process may still take."""
    if device.type == "cuda":
        return gpu_free_bytes(device.index or 0)
    if limit is None:
        return free_bytes()
    return limit - resident_bytes()


def stay_below(limit: int | None) -> None:
    """Near a limit in bytes, return memory freed inside this process to the system (on Linux).

    Between tensors that live on, the C library keeps freed memory: on the demo model, up to 1.5 times that in use.
    """
    if limit is None or resident_bytes() <= _NEAR * limit:
        return
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., object] | None:
    """Return a function of glibc, where it is the C library (musl has none of those used here)."""
    if sys.platform == "linux":
        return getattr(ctypes.CDLL(None), name, None)
    return None


def _set_allocator(*values: tuple[str, int, int]) -> None:
    """Set parameters of mallopt(3), unless the user has set their variables."""
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        for variable, parameter, value in values:
            if variable not in os.environ:
                mallopt(parameter, value)


# PyTorch's own word for it: 1 puts cuDNN behind its other kernels.
CUDNN_LAST = "TORCH_CUDNN_SDPA_DEPRIORITIZED"


def avoid_cudnn_attention() -> None:
    """Compute attention without cuDNN, PyTorch's first choice on new GPUs, here and in child processes.

    On a B200 it gave wrong tokens with fewer than 8 KV heads (pytorch#193893), on an H100 NaN gradients behind a mask
    (pytorch#196678), and it builds a plan for every new shape, such as each length of a prompt. This sets the
    environment and, once torch is imported, its own switch; TORCH_CUDNN_SDPA_DEPRIORITIZED=0 in the user's environment
    leaves both.
    """
    os.environ.setdefault(CUDNN_LAST, "1")
    if "torch" in sys.modules and os.environ[CUDNN_LAST] != "0":
        sys.modules["torch"].backends.cuda.enable_cudnn_sdp(False)


def gpu_with_room(size: int) -> torch.device | None:
    """Return the first GPU with room for so many bytes of what surgeon takes of its free memory; None without."""
    import torch

    # Asking opens a context on a GPU, which takes memory there: no more of them are asked than need be.
    numbers = range(torch.cuda.device_count())
    return next(
        (torch.device("cuda", number) for number in numbers if size <= gpu_free_bytes(number)), None
    )


def gpus_in_turn(index: int, each: int = 1) -> dict[str, str]:
    """Return the environment of a child process that is to see GPUs of its own; empty with fewer than two GPUs.

    Args:
        index: of the child among its like.
        each: GPUs of a child; at most as many as there are.
    """
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(given) == count:
        names = given
    else:
        names = list(map(str, range(count)))
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(
            names[number % count] for number in range(index * each, (index + 1) * each)
        )
    }


def describe_gpu(device: torch.device) -> str:
    """Describe a GPU and those beside it: "cuda:0 (NVIDIA H100), one of 4 GPUs"."""
    import torch

    count = torch.cuda.device_count()
    if count > 1:
        beside = f", one of {count} GPUs"
    else:
        beside = ""
    return f"{device} ({torch.cuda.get_device_name(device)}){beside}"


def cache_folder(what: str) -> Path:
    """Return the folder for files that can be made again on this machine; FileNotFoundError without a home."""
    kept = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(kept) if kept else Path.home() / ".cache") / "surgeon" / what
    except RuntimeError as error:  # a user id without a name, as containers have them
        raise FileNotFoundError(
            f"there is no home to keep {what} in; name a folder in HOME or XDG_CACHE_HOME"
        ) from error
