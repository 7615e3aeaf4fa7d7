"""`surgeon` in a process of its own, which tells how much memory it needed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

# The kernel's own figure for this program, which /usr/bin/time -v reports too.
SURGEON = """
from surgeon.commands.app import main
code = main()
print("peak", next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
raise SystemExit(code)
"""


def start(*arguments: object) -> Any:
    """Begin a command; its output and its errors are text in pipes."""
    command = [sys.executable, "-c", SURGEON, *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes)


def peak_of(process: Any) -> int:
    """Wait for a command to end; the most bytes it had resident.

    Raises:
        SystemExit: with what it said, if it failed.
    """
    out, err = process.communicate()
    if process.returncode:
        raise SystemExit(err)
    return int(out.split()[-1]) * 1024
