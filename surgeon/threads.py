"""How many cores there are, and how threads that compute together wait for each other."""

from __future__ import annotations

import os

SPIN, POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
LOOKS = "100000"  # before a thread sleeps: some tenths of a millisecond


def wait_asleep() -> None:
    """Have waiting threads of this process, and of those it starts, sleep soon; to be called before torch is imported.

    By default GNU's OpenMP, which torch computes with, has them look again and again for what they wait for, which
    takes the core that another process needs: decoding beside one was seen to be 16 times slower. Threads that sleep at
    once are slow to wake, on an idle machine too. A scan of the demo model on two cores took 20 s with endless looking,
    27 s with none and 18 s with this much; beside two busy processes 41 s with none and 37 s with this much. What the
    user has set in the environment stays.
    """
    if SPIN not in os.environ and POLICY not in os.environ:
        os.environ[SPIN] = LOOKS


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
