"""The process of a rank as the process that commands it sees it: one it has started itself, or one that came to it.

Both have a connection for commands and answers, and a lifeline, on which nothing is sent while they run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from surgeon.processes.rendezvous import RankConnections
from surgeon.processes.sockets import say_why
from surgeon.processes.torchrun import RankLocation
from surgeon.runtime.worker.rank import threads_per_rank

END_SECONDS = 10.0  # how long a rank whose connection is closed may take to end

Failure = TypeVar("Failure", bound=Exception)


class RankFailed(ChildProcessError):
    """A rank could not go on; the message names it, and a note has the rank's own traceback or log."""


class RankProcess(ABC):
    """The process of one rank.

    Attributes:
        connection: for commands, and what it answers.
        lag: seconds by which its machine's monotonic clock lags behind this machine's.
    """

    def __init__(
        self,
        rank: int,
        location: RankLocation,
        pid: int,
        connection: Connection,
        lifeline: Connection,
        lag: float = 0.0,
    ) -> None:
        self.rank = rank
        self.location = location
        self.pid = pid
        self.connection = connection
        self.lag = lag
        self._lifeline = lifeline

    @property
    @abstractmethod
    def name(self) -> str:
        """What messages call it."""

    @property
    @abstractmethod
    def process(self) -> str:
        """How to find it."""

    @abstractmethod
    def gone(self) -> RankFailed:
        """The error to raise when it ended without a word."""

    @abstractmethod
    def end(self, reason: str | None) -> None:
        """Make it end at once; it holds nothing that would be lost.

        Args:
            reason: what has failed, if anything.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait until it has ended, after `end`."""

    def close(self) -> None:
        """Release what this process holds of it, when it has ended."""
        self.connection.close()
        self._lifeline.close()


class StartedRank(RankProcess):
    """A child process. Nothing is sent on its lifeline: that it closes tells the rank that this process has gone."""

    def __init__(
        self, rank: int, location: RankLocation, folder: Path, channel: Sequence[int], memory: int | None = None
    ) -> None:
        """Start it.

        Args:
            folder: of the ranks, where the rank's log will lie.
            channel: descriptors of its ends of what connects rank 0 with the others (pipes.py).
            memory: the descriptor of the memory that ranks share.
        """
        ours, theirs = Pipe()
        lifeline, far_end = Pipe()
        search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        threads = str(threads_per_rank(location.local_ranks))
        own = [theirs.fileno(), far_end.fileno()]
        self._log = folder / f"rank{rank}"
        command = [
            sys.executable,
            "-P",  # not the current folder, in which anything may lie
            "-m",
            "surgeon.runtime",
            str(folder),
            *map(str, [*own, *channel]),
        ]
        with self._log.open("wb") as log, theirs, far_end:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": threads},
                pass_fds=[*own, *channel, *([] if memory is None else [memory])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C at a terminal reaches this process only, which then ends the ranks. With a session of its own
                # each would, on Linux, share its core evenly with others whatever their priorities.
                process_group=0,
            )
        super().__init__(rank, location, self._process.pid, ours, lifeline)

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    @property
    def process(self) -> str:
        return f"process {self.pid}"

    def gone(self) -> RankFailed:
        process, log = self._process, self._log.read_text(errors="replace")
        try:
            code = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return noted(RankFailed(f"rank {self.rank} ({self.process}) has closed its connection"), log)
        if code < 0:
            name = signal.Signals(-code).name
            likely = ", as the system does when memory runs out" if name == "SIGKILL" else ""
            message = f"rank {self.rank} ({self.process}) was ended by {name}{likely}"
        else:
            last_line = log.strip().split("\n")[-1] or "it wrote nothing"
            message = f"rank {self.rank} ended with exit code {code}: {last_line}"
        return noted(RankFailed(message), log)

    def end(self, reason: str | None) -> None:  # noqa: ARG002 - nobody reads what a child process would say
        if self._process.poll() is None:
            self._process.kill()

    def wait(self) -> None:
        self._process.wait()


class JoinedRank(RankProcess):
    """A process that torchrun has started, here or on another machine; it writes to a terminal or log of its own."""

    def __init__(self, connections: RankConnections) -> None:
        hello = connections.hello
        super().__init__(
            hello.rank, hello.location, hello.pid, connections.commands, connections.lifeline, connections.lag
        )
        self._host = hello.host

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self._host}"

    @property
    def process(self) -> str:
        return f"process {self.pid} on {self._host}"

    def gone(self) -> RankFailed:
        why = "it ended, or the connection broke; see what it wrote there"
        return RankFailed(f"rank {self.rank} ({self.process}) has gone: {why}")

    def end(self, reason: str | None) -> None:
        say_why(self._lifeline, reason)  # it heeds the first word

    def wait(self) -> None:
        with suppress(EOFError, OSError):
            while self.connection.poll(END_SECONDS):  # what it has sent before
                self.connection.recv_bytes()


def noted(error: Failure, note: str) -> Failure:
    """The error, with a note if there is anything to say."""
    if note.strip():
        error.add_note(note)
    return error
