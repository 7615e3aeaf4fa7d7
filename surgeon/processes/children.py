"""Processes that end with the one that started them, however that ends: by an error, by Ctrl-C, or killed.

A child's standard input is a pipe on which nothing is ever sent: that it closes tells the child that its parent has
gone (`when_parent_ends`). The children of `multiprocessing` have such a pipe, too.

A `Watchdog` notices stuck ranks: stopped from outside, or waiting for ever, which no closed connection tells
of. Every rank sends a pulse now and then, from a thread of its own: it lives, and so far it has come. While there is
work and none of them gets on, time runs; after long the ranks are given up. Long prompts, idle ranks, and time
in which this process was stopped itself do not count.
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
from dataclasses import dataclass
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

    def read_output(self) -> str:
        # The log's folder may have been removed by now.
        with suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")
        return ""

    def describe_end(self) -> str:
        """Tell how it has ended, as a message says it behind its name."""
        code = self.process.returncode  # None until somebody has waited for its end, or looked
        assert code is not None
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        last = (self.read_output().strip().splitlines() or ["it wrote nothing"])[-1].strip()
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


PATIENCE_SECONDS = 60.0
PULSES = 12  # within the time after which ranks are given up
MISSED = 3  # a rank of which so many pulses are missing does not answer


@dataclass(frozen=True)
class Pulse:
    """A rank's sign of life.

    Attributes:
        passes: forward passes it has computed; of the one being computed, the share of its steps.
    """

    rank: int
    passes: float


class Watchdog:
    """The state of ranks by their pulses; `check` is to be called every `interval` seconds."""

    def __init__(self, names: Sequence[str], patience: float = PATIENCE_SECONDS) -> None:
        self.interval = patience / PULSES
        self._names = tuple(names)
        self._patience = patience
        self._passes = [0.0] * len(names)
        self._unheard = [0.0] * len(names)  # seconds
        self._stuck = 0.0  # seconds

    def hear(self, pulse: Pulse) -> None:
        if pulse.passes != self._passes[pulse.rank]:
            self._stuck = 0.0
        self._passes[pulse.rank] = pulse.passes
        self._unheard[pulse.rank] = 0.0

    def check(self, seconds: float, busy: bool) -> str | None:
        """Let seconds pass, in which ranks were busy or not; returns why they are to be given up, if they are."""
        seconds = min(seconds, 2 * self.interval)  # what is more, this process was not there to see
        self._unheard = [each + seconds for each in self._unheard]
        self._stuck = self._stuck + seconds if busy else 0.0
        if self._stuck > self._patience:
            time = f"for {self._patience:g} seconds"
            silent = [
                rank for rank, seconds in enumerate(self._unheard) if seconds > MISSED * self.interval
            ]
            if silent:
                return f"{self._list(silent)} not answered {time}: stopped, or cut off"
            last = [rank for rank, passes in enumerate(self._passes) if passes == min(self._passes)]
            if len(last) < len(self._names):
                return f"{self._list(last)} been at the same step {time}, and the others wait for it"
            return f"no rank has come any further {time}"
        return None

    def _list(self, ranks: Sequence[int]) -> str:
        return (
            f"{' and '.join(self._names[rank] for rank in ranks)} {'has' if len(ranks) == 1 else 'have'}"
        )
