"""Processes that end with the one that started them, however that ends: by an error, by Ctrl-C, or killed.

A child's standard input is a pipe on which nothing is ever sent: that it closes tells the child that its parent has
gone (`when_parent_ends`). The children of `multiprocessing` have such a pipe, too.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# Explains a SIGKILL that nobody is known to have sent.
LIKELY_MEMORY = ", as the system does when memory runs out"


class Child:
    """A Python process that this one has started, and what it writes.

    Ctrl-C at a terminal does not reach it: this process ends it as it thinks right. It stays in the session, though;
    with one of its own it would, on Linux, share its core evenly with others whatever their priorities.

    Attributes:
        log: gets what it writes.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        threads: int,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            command: of the interpreter, as in ["-m", "surgeon.commands"]; it finds the same modules as this process.
            log: gets what it writes, behind what is there.
            threads: it computes with.
            descriptors: that it has in common with this process.
            environment: in place of this process's.
        """
        search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        given = os.environ if environment is None else environment
        self.log = log
        with log.open("ab") as file:
            self._begin = file.tell()
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env={**given, "PYTHONPATH": search_path, "OMP_NUM_THREADS": str(threads)},
                pass_fds=descriptors,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                process_group=0,
            )
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None until somebody has waited for its end, or looked."""
        return self.process.returncode

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None as long as it runs."""
        return self.process.poll()

    def wait(self, seconds: float | None = None) -> int:
        """Wait for its end."""
        code = self.process.wait(seconds)
        assert self.process.stdin is not None
        self.process.stdin.close()
        return code

    def interrupt(self) -> None:
        """Send Ctrl-C; nothing if it has ended."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it at once; nothing if it has ended."""
        self.process.kill()

    def said(self) -> str:
        # The log's folder may have been removed by now.
        with suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")
        return ""

    def ending(self) -> str:
        """Tell how it has ended, as a message says it behind its name."""
        code = self.returncode
        assert code is not None
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        last = (self.said().strip().splitlines() or ["it wrote nothing"])[-1].strip()
        return f"ended with exit code {code}: {last}"


def when_parent_ends(act: Callable[[], object]) -> threading.Thread:
    """Do something, in the thread that is returned, as soon as the process that has started this one is gone.

    This process's standard input is empty from now on.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        lifeline = parent.sentinel
    else:
        lifeline = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def watch() -> None:
        with suppress(OSError):
            os.read(lifeline, 1)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread
