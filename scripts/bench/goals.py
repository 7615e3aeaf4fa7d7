"""Goals of benchmarks, and `surgeon` in a process of its own, which tells how much memory it needed.

A benchmark that has measured everything and missed its goal ends otherwise than one that has failed.
"""

from __future__ import annotations

import subprocess
import sys
import time

MISSED = 3  # as exit status; Python ends with 1 where something fails, argparse with 2
_BEGINNING = "goal missed: "
# The kernel counts for this program itself; /usr/bin/time -v reports the same figure.
SURGEON = """
from surgeon.commands.app import main
code = main()
print("peak", next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
raise SystemExit(code)
"""


def run_surgeon(*arguments: object) -> tuple[float, int]:
    """The seconds of a command, and the most bytes it had resident.

    Raises:
        SystemExit: with what it said, if it failed.
    """
    begun = time.perf_counter()
    command = [sys.executable, "-c", SURGEON, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.perf_counter() - begun, int(done.stdout.split()[-1]) * 1024


def missed(goal: str) -> SystemExit:
    """What ends a benchmark whose figures are all printed, but not as good as they should be.

    The goal is printed below them, on standard output, so that it is kept with them.
    """
    print(f"{_BEGINNING}{goal}", flush=True)
    return SystemExit(MISSED)


def missed_in(page: str) -> str | None:
    """The goal that a page of a benchmark's figures says was missed."""
    found = [line for line in page.splitlines() if line.startswith(_BEGINNING)]
    if found:
        return found[-1].removeprefix(_BEGINNING)
    return None
