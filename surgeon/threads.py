"""How threads that compute together wait for each other."""

from __future__ import annotations

import os

SPIN, POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


def wait_asleep() -> None:
    """Have waiting threads of this process, and of those it starts, sleep; to be called before torch is imported.

    By default GNU's OpenMP, which torch computes with, has them look again and again for what they wait for. That wins
    nothing that can be measured where cores are idle, and takes the core that another process needs where they are not:
    decoding is 16 times slower then. What the user has set in the environment stays.
    """
    if SPIN not in os.environ and POLICY not in os.environ:
        os.environ[SPIN] = "0"
