"""Locks on files and folders: each goes with the process that holds it, so that one that is killed leaves none behind.

They are flock's (by `filelock`): children that are started anew do not inherit them, and a lock file that stays is
nobody's lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import lock_descriptor

from surgeon.errors import naming

LOOK_SECONDS = 0.002  # between two tries to get a lock that somebody else has


def lock(descriptor: int, wait: bool = False) -> bool:
    """Lock an open file or folder until it is closed.

    Args:
        wait: until nobody else has locked it.

    Returns:
        Whether it is locked now; if not, somebody else has done so.
    """
    return lock_descriptor(descriptor, blocking=wait, poll_interval=LOOK_SECONDS)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until nobody else has locked a file, which is made if it is not there, and lock it while inside."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with naming(path):
            lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)
