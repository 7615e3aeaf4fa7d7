"""Which process holds a trial, and whether it is still there."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

SAME_START = 2.0  # seconds that two readings of a process' start may be apart


@dataclass(frozen=True)
class Holder:
    """A process.

    Attributes:
        machine: its name.
        world: what its number means something in: one run of the machine's kernel, and one container on it.
        started: seconds since 1970; another process may get the same number later.
    """

    machine: str
    world: str
    pid: int
    started: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine}"

    @property
    def is_seen(self) -> bool:
        """Whether it can be known from here if it has ended."""
        return self.world == _world()

    def is_gone(self) -> bool:
        """Whether it is known to have ended: of a process elsewhere that cannot be known from here."""
        if not self.is_seen:
            return False
        try:
            process = psutil.Process(self.pid)
            other = abs(process.create_time() - self.started) > SAME_START
            return other or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


def this_process() -> Holder:
    """The process that asks."""
    return Holder(platform.node(), _world(), os.getpid(), psutil.Process().create_time())


@cache
def _world() -> str:
    if sys.platform == "linux":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return f"{platform.node()} {psutil.boot_time():.0f}"
