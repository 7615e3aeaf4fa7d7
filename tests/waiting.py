"""Waiting in tests for what other threads and processes do, as long as a busy machine takes for it."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait until something holds, and fail if it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{seconds:g} seconds were not enough"
        time.sleep(0.005)
