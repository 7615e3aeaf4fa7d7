"""Amounts of memory: parsed, measured, shown; and settings of the allocator."""

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
    """Parse a size such as 512MB or 2GB to bytes (1 MB is 1024 KB, as memory is counted).

    Raises:
        ValueError: if it is no size above 0.
    """
    match = _SIZE.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is no amount of memory; write e.g. 512MB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def show_size(size: float) -> str:
    """Write a size: 512MB, 1.5GB."""
    for unit in ("GB", "MB", "KB"):
        factor = _UNITS[unit[0]]
        if size >= factor:
            amount = size / factor
            if amount >= 100:
                return f"{amount:.0f}{unit}"
            return f"{amount:.3g}{unit}"
    return f"{size:.0f}B"


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
