"""Starting ranks as processes, sending them functions to run, and ending all of them when one fails."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, get_args

import torch

from surgeon.errors import did_you_mean
from surgeon.runtime.compress import Compression
from surgeon.runtime.link import Link
from surgeon.runtime.rank import RankError, Settings
from surgeon.runtime.shared_memory import create_memory

GRACE_SECONDS = 0.5  # how long to look for the rank that failed first, when another reports that it lost it

END_SECONDS = 10.0  # how long a rank whose connection is closed may take to end

Failure = TypeVar("Failure", bound=Exception)


class RankFailed(ChildProcessError):
    """A rank could not go on; the message names it, and a note has the rank's own traceback or log."""


class Ranks:
    """A number of rank processes; a context manager that leaves none behind.

    They need nothing but each other: no port, no environment, no file that outlives them.
    """

    def __init__(
        self,
        ranks: int,
        device: str = "cpu",
        collectives: str = "auto",
        link: Link | None = None,
        compression: Compression | None = None,
    ) -> None:
        """Start them.

        Args:
            ranks: how many.
            device: "cpu", or "cuda" for one GPU per rank.
            collectives: as `choose_collectives` takes it.
            link: emulate one of this delay and bandwidth between the ranks.
            compression: send the reductions of the program's steps as integers of this many bits.

        Raises:
            ValueError: if the collectives do not fit the device, or the link or compression do not fit them.
            RankFailed: if a rank cannot start.
        """
        self.collectives = choose_collectives(collectives, device)
        check_sending(self.collectives, device, link, compression)
        memory = create_memory(ranks) if self.collectives == "shm" and ranks > 1 else None
        self._folder = tempfile.TemporaryDirectory(prefix="surgeon-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._lifelines: list[Connection] = []
        pipes = [os.pipe() for _ in range(ranks - 1)]  # from rank 0 to each of the others
        ends = [tuple(writer for _, writer in pipes), *((reader,) for reader, _ in pipes)]
        try:
            for rank in range(ranks):
                self._start(rank, ranks, ends[rank] if memory is None else (memory, *ends[rank]))
            for rank, connection in enumerate(self._connections):
                settings = Settings(
                    rank=rank,
                    ranks=ranks,
                    device=device if device == "cpu" else f"{device}:{rank}",
                    collectives=self.collectives,
                    memory=memory,
                    rendezvous=Path(self._folder.name) / "rendezvous",
                    threads=threads_per_rank(ranks),
                    pipes=ends[rank],
                    link=link,
                    compression=compression,
                )
                self._send(rank, connection, settings)
            self._results(None)
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in [end for pipe in pipes for end in pipe] + ([] if memory is None else [memory]):
                os.close(descriptor)

    def _start(self, rank: int, ranks: int, shared: Sequence[int]) -> None:
        ours, theirs = Pipe()
        # Nothing is sent through this one: that it closes tells a rank that this process has gone.
        lifeline, far_end = Pipe()
        threads = str(threads_per_rank(ranks))
        search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        descriptors = [theirs.fileno(), far_end.fileno(), *shared]
        environment = os.environ | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": threads}
        command = [
            sys.executable,
            "-P",  # not the current folder, in which anything may lie
            "-m",
            "surgeon.runtime",
            str(theirs.fileno()),
            str(far_end.fileno()),
            self._folder.name,
        ]
        with (Path(self._folder.name) / f"rank{rank}").open("wb") as log, theirs, far_end:
            process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C at a terminal reaches this process only, which then ends the ranks
            )
        self._processes.append(process)
        self._connections.append(ours)
        self._lifelines.append(lifeline)

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid for process in self._processes]

    def call(
        self, function: Callable[..., Any], *arguments: Any, notify: Callable[[Any], None] | None = None
    ) -> list[Any]:
        """Run `function(rank, *arguments)` on every rank at the same time.

        Args:
            function: one that can be imported by name; it is given the rank's `Rank` first.
            notify: called with every value that a rank's function sends by `Rank.notify`.

        Returns:
            What it returned, by rank.

        Raises:
            ValueError: if it raised that on a rank.
            RankFailed: if it raised anything else, or a rank's process ended. No rank is left running then.
        """
        message = function, arguments
        try:
            for rank, connection in enumerate(self._connections):
                self._send(rank, connection, message)
            return self._results(notify)
        except BaseException:
            self.close()
            raise

    def post(self, rank: int, message: Any) -> None:
        """Send something to a rank that is in a call; it comes to the rank's `inbox`. From one thread at a time.

        Raises:
            OSError: if the rank is gone; the call says why.
        """
        self._connections[rank].send_bytes(pickle.dumps(message))

    def kill(self) -> None:
        """End every rank's process; a call in another thread then fails, and cleans up."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()  # they hold nothing that would be lost

    def _send(self, rank: int, connection: Connection, message: Any) -> None:
        try:
            connection.send_bytes(pickle.dumps(message))
        except BrokenPipeError:
            raise self._failure(rank, None) from None

    def _results(self, notify: Callable[[Any], None] | None) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self._connections):
            waiting = [connection for rank, connection in enumerate(self._connections) if rank not in results]
            for connection in wait(waiting):
                assert isinstance(connection, Connection)
                rank = self._connections.index(connection)
                kind, value = self._receive(connection)
                if kind == "note" and notify is not None:
                    notify(value)
                elif kind == "result":
                    results[rank] = value
                elif kind == "error":
                    raise self._failure(rank, value)
        return [results[rank] for rank in range(len(self._connections))]

    def _receive(self, connection: Connection) -> tuple[str, Any]:
        try:
            kind, value = pickle.loads(connection.recv_bytes())
            return kind, value
        except (EOFError, ConnectionError):
            return "error", None

    def _failure(self, rank: int, error: RankError | None) -> Exception:
        """The error to raise, given the first one noticed: another rank may have failed before and caused it.

        Args:
            error: what the rank reported; None if it is gone.
        """
        if error is None:
            return self._gone(rank)
        errors = {rank: error}
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and len(errors) < len(self._connections):
            others = [connection for number, connection in enumerate(self._connections) if number not in errors]
            for connection in wait(others, left):
                assert isinstance(connection, Connection)
                number = self._connections.index(connection)
                kind, value = self._receive(connection)
                if kind == "error" and value is None:
                    return self._gone(number)
                if kind == "error":
                    errors[number] = value
        rank, first = min(errors.items(), key=lambda item: item[1].time)
        failure = ValueError(first.line) if first.mendable else RankFailed(f"rank {rank} failed: {first.line}")
        return _noted(failure, first.trace)

    def _gone(self, rank: int) -> RankFailed:
        """The error for a rank that ended without a word."""
        process, log = self._processes[rank], self._log(rank)
        try:
            code = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return _noted(RankFailed(f"rank {rank} (process {process.pid}) has closed its connection"), log)
        if code < 0:
            name = signal.Signals(-code).name
            likely = ", as the system does when memory runs out" if name == "SIGKILL" else ""
            message = f"rank {rank} (process {process.pid}) was ended by {name}{likely}"
        else:
            last_line = log.strip().split("\n")[-1] or "it wrote nothing"
            message = f"rank {rank} ended with exit code {code}: {last_line}"
        return _noted(RankFailed(message), log)

    def _log(self, rank: int) -> str:
        return (Path(self._folder.name) / f"rank{rank}").read_text(errors="replace")

    def close(self) -> None:
        """End every rank and wait until it has gone."""
        self.kill()
        for process in self._processes:
            process.wait()
        for connection in (*self._connections, *self._lifelines):
            connection.close()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def choose_device(wanted: str, ranks: int) -> str:
    """Say "cpu" or "cuda" for "cpu", "cuda" or "auto" (cuda if there is a GPU for every rank).

    Raises:
        ValueError: if it is none of these, or there are too few GPUs for "cuda".
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"there is no device {wanted!r}; {did_you_mean(wanted, ('auto', 'cpu', 'cuda'))}")
    gpus = torch.cuda.device_count()
    if wanted == "cuda" and gpus < ranks:
        raise ValueError(f"{ranks} ranks need a GPU each, and there are {gpus}; use --device cpu or fewer ranks")
    return "cuda" if wanted == "cuda" or (wanted == "auto" and gpus >= ranks) else "cpu"


def choose_collectives(wanted: str, device: str) -> str:
    """How ranks talk: "shm" (CPU ranks of one machine), "gloo", "nccl" (GPUs); for "auto" the fastest that fits.

    With "none" they do not: what they compute is wrong, and its speed tells what communication costs.

    Raises:
        ValueError: if there is no such way, or it does not fit the device.
    """
    fitting = {"cpu": ("shm", "gloo"), "cuda": ("nccl", "gloo")}[device]
    if wanted == "auto":
        return fitting[0]
    if wanted in (*fitting, "none"):
        return wanted
    known = ("auto", "shm", "gloo", "nccl", "none")
    if wanted in known:
        raise ValueError(f"{wanted} does not connect ranks on a {device} device; use {' or '.join(fitting)}")
    raise ValueError(f"there are no collectives {wanted!r}; {did_you_mean(wanted, known)}")


def check_sending(collectives: str, device: str, link: Link | None, compression: str | None) -> None:
    """Refuse an emulated link or a compression that cannot be had.

    Raises:
        ValueError: if there is no such compression, nothing is sent, or a GPU's transfers would have to wait.
    """
    known = get_args(Compression)
    if compression is not None and compression not in known:
        raise ValueError(f"there is no compression {compression!r}; {did_you_mean(compression, known)}")
    if collectives == "none" and (link is not None or compression is not None):
        raise ValueError("collectives none send nothing; give no link and no compression with them")
    if device == "cuda" and link is not None:
        raise ValueError("a link can be emulated between CPU ranks only (GPUs go on while a process waits); use cpu")


def threads_per_rank(ranks: int) -> int:
    """The cores this process may use, divided among the ranks; no more than OMP_NUM_THREADS if that is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores // ranks, int(wanted) if wanted.isdecimal() else cores))


def _noted(error: Failure, note: str) -> Failure:
    if note.strip():
        error.add_note(note)
    return error
