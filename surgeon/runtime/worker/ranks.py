"""Starting ranks or gathering those of torchrun, sending them functions, and ending all of them when one fails.

The process of a rank is one that this process has started, or one that came to it. Both have a connection for commands
and answers, and end when this process does.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from surgeon.machine import threads_per_rank, usable_cores
from surgeon.processes.children import LIKELY_MEMORY, Child
from surgeon.processes.rendezvous import Admitted, Purpose, StoreAddress, rendezvous_at, say_why
from surgeon.processes.torchrun import RankLocation, TorchrunEnvironment, check_ranks, read_environment
from surgeon.runtime.comm.shared_memory import create_memory
from surgeon.runtime.worker.rank import END_SECONDS, RankError, RankOptions, RankSettings

Failure = TypeVar("Failure", bound=Exception)


class RankFailed(ChildProcessError):
    """A rank could not go on; the message names it, and a note has the rank's own traceback or log."""


class RankProcess(ABC):
    """The process of one rank.

    Attributes:
        connection: for commands and answers.
        name, process: in messages.
        lag: seconds by which its machine's monotonic clock lags behind this machine's.
    """

    lag = 0.0

    def __init__(
        self, rank: int, location: RankLocation, pid: int, connection: Connection, host: str = ""
    ) -> None:
        where = ""
        if host:
            where = f" on {host}"
        self.rank = rank
        self.location = location
        self.pid = pid
        self.connection = connection
        self.name = f"rank {rank}{where}"
        self.process = f"process {pid}{where}"

    @abstractmethod
    def explain_end(self) -> RankFailed:
        """The error to raise when it ended without a word."""

    @abstractmethod
    def end(self, reason: str | None) -> None:
        """Make it end at once, for this reason if something has failed; it holds nothing that would be lost."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it has ended, after `end`."""

    def close(self) -> None:
        """Release what this process holds of it, when it has ended."""
        self.connection.close()


class StartedRank(RankProcess):
    """A child process; descriptors are those of its pipes (rank.py) and of the memory that ranks share."""

    def __init__(
        self,
        rank: int,
        location: RankLocation,
        folder: Path,
        channel: Sequence[int],
        memory: int | None = None,
    ) -> None:
        ours, theirs = Pipe()
        with theirs:
            passed = [theirs.fileno(), *channel]
            self._child = Child(
                # -P: not what lies in this folder.
                ["-P", "-m", "surgeon.runtime", str(folder), *map(str, passed)],
                folder / f"rank{rank}",
                threads_per_rank(location.local_ranks),
                [*passed, *([] if memory is None else [memory])],
            )
        super().__init__(rank, location, self._child.pid, ours)

    def explain_end(self) -> RankFailed:
        child = self._child
        try:
            code = child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            message = f"rank {self.rank} ({self.process}) has closed its connection"
        else:
            who = f"rank {self.rank}" + (f" ({self.process})" if code < 0 else "")
            message = f"{who} {child.describe_end()}" + (
                LIKELY_MEMORY if code == -signal.SIGKILL else ""
            )
        return with_note(RankFailed(message), child.read_output())

    def end(self, reason: str | None) -> None:  # noqa: ARG002 - nobody reads what a child process would say
        self._child.kill()

    def wait(self) -> None:
        self._child.wait()


class JoinedRank(RankProcess):
    """A process that torchrun has started, here or on another machine; it writes to a terminal or log of its own."""

    def __init__(self, admitted: Mapping[Purpose, Admitted]) -> None:
        hello, connection, self.lag = admitted["commands"]
        super().__init__(hello.rank, hello.location, hello.pid, connection, hello.host)
        self._lifeline = admitted["lifeline"].connection

    def explain_end(self) -> RankFailed:
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
    """Add a note to an error if there is anything to say."""
    if note.strip():
        error.add_note(note)
    return error


# How long to look for the rank that failed first, when another reports that it lost it.
GRACE_SECONDS = 0.5


class Ranks(AbstractContextManager["Ranks"]):
    """A number of rank processes; a context manager that leaves none behind.

    They are child processes of this one, without port, environment, or file that outlives them. Under torchrun only
    rank 0 is; the others are the processes of torchrun that have joined this one.
    """

    def __init__(self, options: RankOptions, wait: bool = True) -> None:
        """Start them, or wait until they have joined and, unless the first call is to do so, connected."""
        self.options = options
        ranks = options.ranks
        self._ending = threading.Lock()
        self._end_reason: tuple[str | None] | None = None  # None until they are to end
        self._connected = False
        self._folder = tempfile.TemporaryDirectory(prefix="surgeon-ranks-")
        self._processes: list[RankProcess] = []
        torchrun = read_environment()
        memory = None
        if options.collectives == "shm" and ranks > 1:
            memory = create_memory(ranks)
        try:
            rendezvous: Path | StoreAddress
            if torchrun is None:
                rendezvous = self._start(ranks, memory)
            else:
                rendezvous = self._gather(torchrun, ranks)
            for process in self._processes:
                self._send(
                    process, RankSettings(process.rank, process.location, options, rendezvous, memory)
                )
            if wait:
                self._connect()
        except BaseException as error:
            self.close(str(error) or type(error).__name__)
            raise
        finally:
            if memory is not None:
                os.close(memory)

    def _connect(self) -> None:
        if not self._connected:
            # They say how they sum, and why not otherwise.
            self._results(partial(print, file=sys.stderr, flush=True))
            self._connected = True

    def _start(self, ranks: int, memory: int | None) -> Path:
        """Start all ranks as child processes; they meet at a file."""
        folder = Path(self._folder.name)
        pipes = [os.pipe() for _ in range(ranks - 1)]  # from rank 0 to each of the others
        channels = [[writer for _, writer in pipes], *([reader] for reader, _ in pipes)]
        try:
            for rank, channel in enumerate(channels):
                self._processes.append(
                    StartedRank(rank, RankLocation(rank, ranks), folder, channel, memory)
                )
        finally:
            for descriptor in [end for pipe in pipes for end in pipe]:
                os.close(descriptor)
        return folder / "rendezvous"

    def _gather(self, torchrun: TorchrunEnvironment, ranks: int) -> StoreAddress:
        """Wait for the processes of torchrun, and start rank 0; they meet at a store."""
        check_ranks(torchrun, ranks)
        if torchrun.rank:
            raise ValueError(
                f"this process has RANK {torchrun.rank} of torchrun's, and only that with RANK 0 has ranks"
            )
        rendezvous = rendezvous_at(torchrun)
        arrived = rendezvous.accept()
        channel = [admitted["channel"].connection for admitted in arrived]
        joined = [JoinedRank(admitted) for admitted in arrived]
        self._processes += joined
        self._processes.insert(
            0,
            StartedRank(
                0, rendezvous.location, Path(self._folder.name), [one.fileno() for one in channel]
            ),
        )
        for connection in channel:
            connection.close()  # it is rank 0's now
        return rendezvous.store

    @property
    def names(self) -> list[str]:
        """The ranks in messages, with their processes and, where torchrun has started them, their machines."""
        return [f"rank {process.rank} ({process.process})" for process in self._processes]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def call(
        self, function: Callable[..., Any], *arguments: Any, notify: Callable[[Any], None] | None = None
    ) -> list[Any]:
        """Run `function(rank, *arguments)` on every rank at the same time; returns its results by rank.

        Args:
            function: one that can be imported by name; it is given the rank's `Rank` first.
            notify: called with every value that a rank's function sends by `Rank.notify`.
        """
        message = function, arguments
        try:
            self._connect()
            for process in self._processes:
                self._send(process, message)
            return self._results(notify)
        except BaseException as error:
            self.close(str(error) or type(error).__name__)
            raise

    def post(self, rank: int, message: Any) -> None:
        """Send something to a rank that is in a call; it comes to the rank's `inbox`. From one thread at a time."""
        self._processes[rank].connection.send_bytes(pickle.dumps(message))

    def kill(self, reason: str | None = None) -> None:
        """End every rank's process; a call in another thread then fails, and cleans up.

        Ranks on other machines tell the reason there. Only the first counts: later failures are consequences.
        """
        with self._ending:
            self._end_reason = self._end_reason or (reason,)
            for process in self._processes:
                process.end(self._end_reason[0])

    def _send(self, process: RankProcess, message: Any) -> None:
        try:
            process.connection.send_bytes(pickle.dumps(message))
        except OSError:
            raise process.explain_end() from None

    def _results(self, notify: Callable[[Any], None] | None) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self._processes):
            missing = [process for process in self._processes if process.rank not in results]
            for process, kind, value in _messages(missing):
                if kind == "note" and notify is not None:
                    notify(value)
                elif kind == "result":
                    results[process.rank] = value
                elif kind == "error":
                    raise self._explain(process, value)
        return [results[rank] for rank in range(len(self._processes))]

    def _explain(self, process: RankProcess, error: RankError | None) -> Exception:
        """The error to raise, given the first report (None of a rank that is gone): another one may have caused it."""
        if error is None:
            return process.explain_end()
        errors = {process.rank: error}
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and len(errors) < len(self._processes):
            silent = [process for process in self._processes if process.rank not in errors]
            for other, kind, value in _messages(silent, left):
                if kind == "error" and value is None:
                    return other.explain_end()
                if kind == "error":
                    errors[other.rank] = value
        first = min(
            (self._processes[rank] for rank in errors),
            key=lambda other: errors[other.rank].time + other.lag,
        )
        error = errors[first.rank]
        where = ""  # it may be that machine's fault
        if isinstance(first, JoinedRank):
            where = f"{first.name}: "
        if error.mendable:
            return with_note(ValueError(where + error.line), error.trace)
        return with_note(RankFailed(f"{first.name} failed: {error.line}"), error.trace)

    def close(self, reason: str | None = None) -> None:
        """End every rank, as `kill` does, and wait until it has gone."""
        self.kill(reason)
        for process in self._processes:
            process.wait()
            process.close()
        self._folder.cleanup()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(None if error is None else str(error) or type(error).__name__)


@contextmanager
def early_ranks(options: RankOptions) -> Iterator[Ranks | None]:
    """Start ranks while this process finds out what they are to do, or none where that may be in vain.

    They take seconds to start. So many that they have no core each may turn out too many for the model; those of
    torchrun have started anyway.
    """
    if read_environment() is not None or options.ranks > usable_cores():
        yield None
        return
    with Ranks(options, wait=False) as started:
        yield started


def _messages(
    processes: list[RankProcess], seconds: float | None = None
) -> Iterator[tuple[RankProcess, str, Any]]:
    """Wait until processes have sent something, which is given, or are gone (the error None), or the time is over."""
    by_connection: dict[object, RankProcess] = {process.connection: process for process in processes}
    for connection in wait([process.connection for process in processes], seconds):
        process = by_connection[connection]
        message: tuple[str, Any] = ("error", None)
        with suppress(EOFError, OSError):
            message = pickle.loads(process.connection.recv_bytes())
        yield process, *message
