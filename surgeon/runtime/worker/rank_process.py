"""The process of a rank as the process that commands it sees it: one it has started itself, or one that came to it.

Both have a connection for commands and answers, and end when this process does.
"""

from __future__ import annotations

import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from surgeon.processes.children import LIKELY_MEMORY, Child
from surgeon.processes.rendezvous import RankConnections, say_why
from surgeon.processes.torchrun import RankLocation
from surgeon.runtime.worker.rank import END_SECONDS
from surgeon.threads import threads_per_rank

Failure = TypeVar("Failure", bound=Exception)


class RankFailed(ChildProcessError):
    """A rank could not go on; the message names it, and a note has the rank's own traceback or log."""


class RankProcess(ABC):
    """The process of one rank.

    Attributes:
        connection: for commands, and what it answers.
        name: what messages call it.
        process: how to find it.
        lag: seconds by which its machine's monotonic clock lags behind this machine's.
    """

    lag = 0.0

    def __init__(self, rank: int, location: RankLocation, pid: int, connection: Connection, host: str = "") -> None:
        where = f" on {host}" if host else ""
        self.rank = rank
        self.location = location
        self.pid = pid
        self.connection = connection
        self.name = f"rank {rank}{where}"
        self.process = f"process {pid}{where}"

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


class StartedRank(RankProcess):
    """A child process."""

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
        with theirs:
            passed = [theirs.fileno(), *channel]
            self._child = Child(
                ["-P", "-m", "surgeon.runtime", str(folder), *map(str, passed)],  # -P: not what lies in this folder
                folder / f"rank{rank}",
                threads_per_rank(location.local_ranks),
                [*passed, *([] if memory is None else [memory])],
            )
        super().__init__(rank, location, self._child.pid, ours)

    def gone(self) -> RankFailed:
        child = self._child
        try:
            code = child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            message = f"rank {self.rank} ({self.process}) has closed its connection"
        else:
            who = f"rank {self.rank}" + (f" ({self.process})" if code < 0 else "")
            message = f"{who} {child.ending()}" + (LIKELY_MEMORY if code == -signal.SIGKILL else "")
        return with_note(RankFailed(message), child.said())

    def end(self, reason: str | None) -> None:  # noqa: ARG002 - nobody reads what a child process would say
        self._child.kill()

    def wait(self) -> None:
        self._child.wait()


class JoinedRank(RankProcess):
    """A process that torchrun has started, here or on another machine; it writes to a terminal or log of its own."""

    def __init__(self, connections: RankConnections) -> None:
        hello = connections.hello
        super().__init__(hello.rank, hello.location, hello.pid, connections.commands, hello.host)
        self.lag = connections.lag
        self._lifeline = connections.lifeline

    def gone(self) -> RankFailed:
        who = f"rank {self.rank} ({self.process})"
        return RankFailed(f"{who} has gone: it ended, or the connection broke; see what it wrote there")

    def end(self, reason: str | None) -> None:
        say_why(self._lifeline, reason)  # it heeds the first word

    def wait(self) -> None:
        with suppress(EOFError, OSError):
            while self.connection.poll(END_SECONDS):  # what it has sent before
                self.connection.recv_bytes()

    def close(self) -> None:
        super().close()
        self._lifeline.close()


def with_note(error: Failure, note: str) -> Failure:
    """The error, with a note if there is anything to say."""
    if note.strip():
        error.add_note(note)
    return error
