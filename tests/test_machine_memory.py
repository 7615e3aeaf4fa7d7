"""Sizes of memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from surgeon.machine import (
    ARENAS,
    HUGE_PAGES,
    KEPT_FREE,
    parse_size,
    resident_bytes,
    show_size,
    stay_below,
    use_huge_pages,
)

FAULTS = """
from resource import RUSAGE_SELF, getrusage
{}
pass_ = lambda: [bytearray(b"x") * (16 << 20) for _ in range(3)]
pass_()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(3): pass_()
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""
HEAPS = """
import ctypes, threading
{}
together = threading.Barrier(6)
def take() -> None:
    together.wait()
    held = bytearray(60_000)
    together.wait()
threads = [threading.Thread(target=take) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""
KEEP = "from surgeon.machine import keep_freed_memory; keep_freed_memory()"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512_000_000),
        ("2GB", 2_000_000_000),
        ("1.5g", 1_500_000_000),
        ("100", 100),
        ("8 KiB", 8192),
        ("1TB", 10**12),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "two", "-1GB", "0MB", "2XB", "1,5GB", "GB", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="write e.g. 512MB or 2GB"):
        parse_size(text)


def test_sizes_are_shown() -> None:
    assert [show_size(n) for n in (512e6, 3e9 / 2, 1, 5_120, 999_999, 1e18)] == [
        "512 MB",
        "1.5 GB",
        "1 byte",
        "5.12 KB",
        "1 MB",
        "1,000,000 TB",
    ]
    assert 1 << 20 < resident_bytes() < 1 << 40


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives memory back on request")
def test_freed_memory_is_given_back_near_a_limit() -> None:
    # Below the size that the C library hands back by itself.
    pieces = [bytes(60_000) for _ in range(3000)]
    held = resident_bytes()
    kept = pieces[::50]
    del pieces
    stay_below(held * 2)
    stay_below(None)
    between = resident_bytes()
    stay_below(held)
    assert len(kept) == 60
    assert resident_bytes() < between - (50 << 20) or between < held - (100 << 20)


@pytest.mark.parametrize(("given", "left"), [({}, "1"), ({HUGE_PAGES: "0"}, "0")])
def test_what_the_user_has_set_of_huge_pages_stays(
    given: dict[str, str], left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    use_huge_pages()
    assert os.environ == {HUGE_PAGES: left}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of other C libraries nothing is asked")
def test_what_a_pass_frees_is_there_for_the_next() -> None:
    """Counted by the pages that the system has to bring; what the user has set stays."""
    brought = int(told(FAULTS, ""))
    assert int(told(FAULTS, KEEP)) < brought / 4
    assert int(told(FAULTS, KEEP, **{KEPT_FREE[0]: str(1 << 20)})) > brought / 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of other C libraries nothing is asked")
def test_threads_share_two_heaps() -> None:
    """Six of them; what the user has set stays."""
    share = "from surgeon.machine import share_heaps; share_heaps()"
    found = [told(HEAPS, *how).count("<heap nr=") for how in ([""], [share])]
    assert found[0] > 3
    assert found[1] == 2
    assert told(HEAPS, share, **{ARENAS[0]: "3"}).count("<heap nr=") == 3


def told(code: str, first: str, **given: str) -> str:
    """What a process prints whose allocator nothing has set but this."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")
    } | given
    command = [sys.executable, "-c", code.format(first)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
