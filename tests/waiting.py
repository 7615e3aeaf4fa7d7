"""Waiting in tests for what other threads and processes do, as long as a busy machine takes for it.

What a test calls right must not depend on what else the machine does: how long something takes is only ever too long
where it is so each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds: hangs last longer, and nothing in the tests takes so long even beside much other work.
PATIENCE = 300.0


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until something holds, and fail if it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{seconds:g} seconds were not enough"
        time.sleep(0.005)


def takes_less_than(most: float, seconds_of: Callable[[], float], seconds: float = PATIENCE) -> bool:
    """Whether something takes less than `most` seconds once, where it is tried again and again until it does.

    Args:
        seconds_of: does it, and says how long that took.
        seconds: after which it is not tried again.
    """
    end = time.monotonic() + seconds
    while seconds_of() >= most:
        if time.monotonic() >= end:
            return False
    return True
