"""Starting ranks or gathering those of torchrun, sending them functions, and ending all of them when one fails."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

import torch

from surgeon.errors import did_you_mean
from surgeon.processes.rendezvous import rendezvous_at
from surgeon.processes.store import StoreAddress
from surgeon.processes.torchrun import (
    RankLocation,
    TorchrunEnvironment,
    check_ranks,
    ranks_of_this_machine,
    read_environment,
)
from surgeon.runtime.comm.link import Link
from surgeon.runtime.comm.quantised import Compression
from surgeon.runtime.comm.shared_memory import create_memory
from surgeon.runtime.worker.rank import RankError, RankSettings
from surgeon.runtime.worker.rank_process import JoinedRank, RankFailed, RankProcess, StartedRank, noted
from surgeon.threads import usable_cores

__all__ = ["RankFailed", "RankOptions", "Ranks", "check_sending", "choose_collectives", "choose_device", "early_ranks"]

GRACE_SECONDS = 0.5  # how long to look for the rank that failed first, when another reports that it lost it


@dataclass(frozen=True)
class RankOptions:
    """How many ranks there are, on what, and how they are connected; checked as it is made.

    Attributes:
        ranks: how many.
        device: "cpu", or "cuda" for one GPU per rank; "auto" becomes the one that `choose_device` says.
        collectives: as `choose_collectives` takes it, and then what it has chosen.
        link: emulate one of this delay and bandwidth between the ranks.
        compression: send the reductions of the program's steps as integers of this many bits.

    Raises:
        ValueError: if the collectives do not fit the device, or the link or compression do not fit them.
    """

    ranks: int = 1
    device: str = "cpu"
    collectives: str = "auto"
    link: Link | None = None
    compression: Compression | None = None

    def __post_init__(self) -> None:
        if self.device == "auto":
            object.__setattr__(self, "device", choose_device("auto", self.ranks))
        object.__setattr__(self, "collectives", choose_collectives(self.collectives, self.device))
        check_sending(self.collectives, self.device, self.link, self.compression)
        if self.ranks == 1 and (self.link is not None or self.compression is not None):
            warnings.warn("one rank sends nothing: the link and the compression change nothing", stacklevel=3)

    def __str__(self) -> str:
        parts = self.device, self.collectives, self.link, self.compression
        return ", ".join(str(part) for part in parts if part is not None)


class Ranks:
    """A number of rank processes; a context manager that leaves none behind.

    They are child processes of this one, and need nothing but each other: no port, no environment, no file that
    outlives them. Under torchrun only rank 0 is; the others are the processes of torchrun that have joined this one.
    """

    def __init__(self, options: RankOptions, wait: bool = True) -> None:
        """Start them, or wait until they have joined.

        Args:
            wait: until they have connected; if not, the first call does, and raises `RankFailed` if one cannot.

        Raises:
            ValueError: if torchrun has started another number of processes, or this is not the one with rank 0.
            TimeoutError: if some of torchrun's processes do not join.
            RankFailed: if a rank cannot start.
        """
        ranks, self.collectives = options.ranks, options.collectives
        self._ending = threading.Lock()
        self._end_reason: tuple[str | None] | None = None  # None until they are to end
        self._connected = False
        self._folder = tempfile.TemporaryDirectory(prefix="surgeon-ranks-")
        self._processes: list[RankProcess] = []
        torchrun = read_environment()
        memory = create_memory(ranks) if self.collectives == "shm" and ranks > 1 else None
        try:
            rendezvous = self._start(ranks, memory) if torchrun is None else self._gather(torchrun, ranks)
            for process in self._processes:
                settings = RankSettings(
                    rank=process.rank,
                    ranks=ranks,
                    location=process.location,
                    device=options.device,
                    collectives=self.collectives,
                    rendezvous=rendezvous,
                    memory=memory,
                    link=options.link,
                    compression=options.compression,
                )
                self._send(process, settings)
            if wait:
                self._connect()
        except BaseException as error:
            self._close_after(error)
            raise
        finally:
            if memory is not None:
                os.close(memory)

    def _connect(self) -> None:
        """Wait until all have connected to each other, once."""
        if not self._connected:
            self._results(None)
            self._connected = True

    def _start(self, ranks: int, memory: int | None) -> Path:
        """Start all ranks as child processes; they meet at a file."""
        folder = Path(self._folder.name)
        pipes = [os.pipe() for _ in range(ranks - 1)]  # from rank 0 to each of the others
        channels = [[writer for _, writer in pipes], *([reader] for reader, _ in pipes)]
        try:
            for rank, channel in enumerate(channels):
                self._processes.append(StartedRank(rank, RankLocation(rank, ranks), folder, channel, memory))
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
        channel = [connections.channel.fileno() for connections in arrived]
        joined = [JoinedRank(connections) for connections in arrived]
        self._processes += joined
        self._processes.insert(0, StartedRank(0, rendezvous.location, Path(self._folder.name), channel))
        for connections in arrived:
            connections.channel.close()  # it is rank 0's now
        return rendezvous.store

    @property
    def names(self) -> list[str]:
        """What messages call the ranks, with their processes and, where torchrun has started them, their machines."""
        return [f"rank {process.rank} ({process.process})" for process in self._processes]

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
            self._connect()
            for process in self._processes:
                self._send(process, message)
            return self._results(notify)
        except BaseException as error:
            self._close_after(error)
            raise

    def post(self, rank: int, message: Any) -> None:
        """Send something to a rank that is in a call; it comes to the rank's `inbox`. From one thread at a time.

        Raises:
            OSError: if the rank is gone; the call says why.
        """
        self._processes[rank].connection.send_bytes(pickle.dumps(message))

    def kill(self, reason: str | None = None) -> None:
        """End every rank's process; a call in another thread then fails, and cleans up.

        Args:
            reason: what has failed, if anything; ranks on other machines say it there. Only the first counts: what
                fails from then on, in whatever thread, fails because the ranks end.
        """
        with self._ending:
            self._end_reason = self._end_reason or (reason,)
            for process in self._processes:
                process.end(self._end_reason[0])

    def _send(self, process: RankProcess, message: Any) -> None:
        try:
            process.connection.send_bytes(pickle.dumps(message))
        except OSError:
            raise process.gone() from None

    def _results(self, notify: Callable[[Any], None] | None) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self._processes):
            for process in _ready([process for process in self._processes if process.rank not in results], None):
                kind, value = _receive(process)
                if kind == "note" and notify is not None:
                    notify(value)
                elif kind == "result":
                    results[process.rank] = value
                elif kind == "error":
                    raise self._explain(process, value)
        return [results[rank] for rank in range(len(self._processes))]

    def _explain(self, process: RankProcess, error: RankError | None) -> Exception:
        """The error to raise, given the first one noticed: another rank may have failed before and caused it.

        Args:
            error: what the rank reported; None if it is gone.
        """
        if error is None:
            return process.gone()
        errors = {process.rank: error}
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and len(errors) < len(self._processes):
            for other in _ready([process for process in self._processes if process.rank not in errors], left):
                kind, value = _receive(other)
                if kind == "error" and value is None:
                    return other.gone()
                if kind == "error":
                    errors[other.rank] = value
        first = min((self._processes[rank] for rank in errors), key=lambda other: errors[other.rank].time + other.lag)
        error = errors[first.rank]
        where = f"{first.name}: " if isinstance(first, JoinedRank) else ""  # it may be that machine's fault
        failure = ValueError(where + error.line) if error.mendable else RankFailed(f"{first.name} failed: {error.line}")
        return noted(failure, error.trace)

    def _close_after(self, error: BaseException) -> None:
        self.close(str(error) or type(error).__name__)

    def close(self, reason: str | None = None) -> None:
        """End every rank, as `kill` does, and wait until it has gone."""
        self.kill(reason)
        for process in self._processes:
            process.wait()
            process.close()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_after(error)


@contextmanager
def early_ranks(options: RankOptions) -> Iterator[Ranks | None]:
    """Ranks that start while this process finds out what they are to do, or None where that may be in vain.

    They take seconds to start. So many that they have no core each may turn out too many for the model; those of
    torchrun have started anyway.
    """
    if read_environment() is not None or options.ranks > usable_cores():
        yield None
        return
    with Ranks(options, wait=False) as started:
        yield started


def choose_device(wanted: str, ranks: int) -> str:
    """Say "cpu" or "cuda" for "cpu", "cuda" or "auto" (cuda if there is a GPU for every rank of this machine).

    Raises:
        ValueError: if it is none of these, or there are too few GPUs for "cuda".
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"there is no device {wanted!r}; {did_you_mean(wanted, ('auto', 'cpu', 'cuda'))}")
    gpus, ranks = torch.cuda.device_count(), ranks_of_this_machine(ranks)
    if wanted == "cuda" and gpus < ranks:
        raise ValueError(f"{ranks} ranks need a GPU each, and there are {gpus}; use --device cpu or fewer ranks")
    return "cuda" if wanted == "cuda" or (wanted == "auto" and gpus >= ranks) else "cpu"


def choose_collectives(wanted: str, device: str) -> str:
    """How ranks talk: "shm" (CPU ranks of one machine), "gloo", "nccl" (GPUs); for "auto" the fastest that fits.

    With "none" they do not: what they compute is wrong, and its speed tells what communication costs. Ranks of
    torchrun's have no memory in common, also where they are on one machine: they inherit nothing from each other.

    Raises:
        ValueError: if there is no such way, or it does not fit the device or torchrun.
    """
    fitting: tuple[str, ...] = {"cpu": ("shm", "gloo"), "cuda": ("nccl", "gloo")}[device]
    if read_environment() is not None:
        if wanted == "shm":
            raise ValueError("shm connects only ranks that surgeon starts itself; under torchrun use gloo or auto")
        fitting = tuple(way for way in fitting if way != "shm")
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


def _ready(processes: list[RankProcess], timeout: float | None) -> list[RankProcess]:
    """Those that have sent something or are gone; waits until there is one, or the seconds are over."""
    by_connection: dict[object, RankProcess] = {process.connection: process for process in processes}
    return [by_connection[connection] for connection in wait([process.connection for process in processes], timeout)]


def _receive(process: RankProcess) -> tuple[str, Any]:
    try:
        kind, value = pickle.loads(process.connection.recv_bytes())
        return kind, value
    except (EOFError, OSError):
        return "error", None
