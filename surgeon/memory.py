"""Sizes of memory: read from the command line, measured, and shown."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # takes seconds, and the command line only wants to read a size
    import torch

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
# How glibc's allocator is set: variables of the environment, parameters of mallopt(3), and values.
KEPT_FREE = ("MALLOC_TRIM_THRESHOLD_", -1, 128 << 20)  # bytes kept at the end of its heap, or nothing
ON_HEAP = ("MALLOC_MMAP_THRESHOLD_", -3, 32 << 20)  # tensors up to so many bytes, the most that it takes
ARENAS = ("MALLOC_ARENA_MAX", -8, 2)  # heaps for all threads
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NEAR = 0.9
FREE_SHARE = 0.8  # of the memory that is left, what surgeon takes at most
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in a size such as 512MB or 2GB (1 MB is 1024 KB, as memory is counted).

    Raises:
        ValueError: if it is no size above 0.
    """
    match = _SIZE.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is no amount of memory; write e.g. 512MB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def show_size(size: float) -> str:
    """A size for people: 512MB, 1.5GB."""
    for unit in ("GB", "MB", "KB"):
        factor = _UNITS[unit[0]]
        if size >= factor:
            amount = size / factor
            if amount >= 100:
                return f"{amount:.0f}{unit}"
            return f"{amount:.3g}{unit}"
    return f"{size:.0f}B"


def use_huge_pages() -> None:
    """Have large tensors lie in huge pages, where the system gives them on request; call it before torch is imported.

    Then few lookups of where pages lie are needed for weights and caches, which are read all the time: seen to be worth
    some hundredths of a pass. Scans, whose tensors come and go, were not faster. What the user has set in the
    environment stays.
    """
    os.environ.setdefault(HUGE_PAGES, "1")


def share_heaps() -> None:
    """Have all threads take their memory from two heaps (glibc; elsewhere nothing changes); call it before they begin.

    Each thread has one of its own else, which keeps what that thread alone needed most: 0.2 GB of the peak of a fused
    export of 8 GB (MALLOC_ARENA_MAX=16 python scripts/bench/export.py --only fused, and without it). What
    the user has set in the environment stays.
    """
    _set_allocator(ARENAS)


def keep_freed_memory() -> None:
    """Have the C library keep some of what one pass frees for the next one (glibc; elsewhere nothing changes).

    What goes back to the system comes again as pages that have to be cleared, and a pass has many large tensors that
    are soon freed: that was seen to take a tenth of a prompt of 512 tokens. What the user has set in the environment
    stays.
    """
    _set_allocator(KEPT_FREE, ON_HEAP)


def resident_bytes() -> int:
    """How much memory this process holds now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def free_bytes() -> int:
    """How much more memory this process may take without a limit of the user's: most of what the machine has left."""
    import psutil

    return int(FREE_SHARE * psutil.virtual_memory().available)


def gpu_free_bytes(number: int) -> int:
    """The same of a GPU's memory; what PyTorch keeps for this process beyond its tensors is free."""
    import torch

    kept = torch.cuda.memory_reserved(number) - torch.cuda.memory_allocated(number)
    return int(FREE_SHARE * (torch.cuda.mem_get_info(number)[0] + kept))


def available_bytes(device: torch.device, limit: int | None = None) -> int:
    """How much more of a device's memory this process may take.

    Args:
        limit: in bytes, of the main memory that this process takes; no more of a GPU's is left by it.
    """
    if device.type == "cuda":
        return gpu_free_bytes(device.index or 0)
    if limit is None:
        return free_bytes()
    return limit - resident_bytes()


def stay_below(limit: int | None) -> None:
    """Near a limit in bytes, give memory that was freed inside this process back to the system (on Linux).

    Between tensors that live on, the C library keeps what it freed: on the demo model, up to 1.5 times what was in use.
    """
    if limit is None or resident_bytes() <= _NEAR * limit:
        return
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., object] | None:
    """One of its functions, where it is the C library (musl has none of those that are asked for)."""
    if sys.platform == "linux":
        return getattr(ctypes.CDLL(None), name, None)
    return None


def _set_allocator(*values: tuple[str, int, int]) -> None:
    """Set parameters of mallopt(3), each but where the user has set its variable."""
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        for variable, parameter, value in values:
            if variable not in os.environ:
                mallopt(parameter, value)
