"""Sizes of memory."""

from __future__ import annotations

import os
import sys

import pytest

from surgeon.memory import HUGE_PAGES, parse_size, resident_bytes, show_size, stay_below, use_huge_pages


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
