"""How many cores there are, who uses which, and how threads that compute together wait for each other."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

SPIN = "GOMP_SPINCOUNT"
POLICY = "OMP_WAIT_POLICY"
TOPOLOGY = Path("/sys/devices/system/cpu")
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
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """The cores this process may use, divided among so many processes of this machine; at most OMP_NUM_THREADS."""
    cores = usable_cores()
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores // ranks, int(wanted) if wanted.isdecimal() else cores))


def keep_to_share(number: int, count: int) -> None:
    """Let this thread, and those that it starts from now on, use their own part of the cores only.

    Of processes that wait for each other two come to lie on one core where a third one is busy, and stay there: what
    wakes another is near it. With cores of their own they lose to a process of lower priority what that is due, which
    is next to nothing (scripts/bench/engines.py --neighbour). Where there are fewer cores than processes, and on
    systems that know no such thing, nothing happens.

    Args:
        number: of this process among `count`, from 0.
        count: how many processes have the cores of this one together.
    """
    if not hasattr(os, "sched_setaffinity") or usable_cores() < count:
        return
    cores = sorted(os.sched_getaffinity(0), key=_whereabouts)
    with suppress(OSError):  # where that is forbidden, things are as they were
        os.sched_setaffinity(0, cores[len(cores) * number // count : len(cores) * (number + 1) // count])


def _whereabouts(core: int) -> tuple[int, int, int]:
    """Of a core as the system counts them: its processor and the physical core in it, which two may share."""
    found = []
    for name in ("physical_package_id", "core_id"):
        try:
            found.append(int((TOPOLOGY / f"cpu{core}" / "topology" / name).read_text()))
        except (OSError, ValueError):
            found.append(0)
    return found[0], found[1], core
