"""`surgeon` in a process of its own, which tells how much memory it needed."""

from __future__ import annotations

import subprocess
import sys
import time

# The kernel's own figure for this program, which /usr/bin/time -v reports too.
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
