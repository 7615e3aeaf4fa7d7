"""Sizes of memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from surgeon.memory import HUGE_PAGES, KEPT_FREE, parse_size, resident_bytes, show_size, stay_below, use_huge_pages

FAULTS = """
from resource import RUSAGE_SELF, getrusage
{}
pass_ = lambda: [bytearray(b"x") * (16 << 20) for _ in range(3)]
pass_()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(3): pass_()
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""
KEEP = "from surgeon.memory import keep_freed_memory; keep_freed_memory()"


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MB", 512 << 20), ("2GB", 2 << 30), ("1.5g", 3 << 29), ("100", 100), ("8 KiB", 8192), ("1TB", 1 << 40)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "two", "-1GB", "0MB", "2XB", "1,5GB", "GB", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="write e.g. 512MB or 2GB"):
        parse_size(text)


def test_sizes_are_shown() -> None:
    assert [show_size(n) for n in (512 << 20, 3 << 29, 100, 5 << 10)] == ["512MB", "1.5GB", "100B", "5KB"]
    assert 1 << 20 < resident_bytes() < 1 << 40


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives memory back on request")
def test_freed_memory_is_given_back_near_a_limit() -> None:
    pieces = [bytes(60_000) for _ in range(3000)]  # below the size that the C library hands back by itself
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

    def faults(code: str, **given: str) -> int:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | given
        command = [sys.executable, "-c", FAULTS.format(code)]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    brought = faults("")
    assert faults(KEEP) < brought / 4
    assert faults(KEEP, **{KEPT_FREE[0]: str(1 << 20)}) > brought / 2
