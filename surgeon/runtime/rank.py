"""What runs in the process of one rank, `python -m surgeon.runtime` (started by `launch.Ranks`, not by hand).

It connects to the other ranks, then runs the functions it is sent, one after the other, until its connection closes.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from surgeon.runtime.channel import Receiver, Sender
from surgeon.runtime.collectives import Alone, Collectives, TorchCollectives, Unconnected
from surgeon.runtime.compress import Compressed, Compression
from surgeon.runtime.link import EmulatedLink, Link
from surgeon.runtime.shared_memory import SharedMemoryCollectives


@dataclass(frozen=True)
class Settings:
    """What a rank is told at its start.

    Attributes:
        collectives: "shm", "gloo" or "nccl" of torch.distributed, or "none".
        memory: for "shm", the file descriptor of the memory they share.
        rendezvous: a file that does not exist yet, where ranks meet.
        threads: how many threads a rank computes with.
        pipes: for rank 0, the descriptors of its pipes to the others; for each other rank, that of its end.
        link: what to emulate between ranks.
        compression: how reductions of the program's steps are sent, if not exactly.
    """

    rank: int
    ranks: int
    device: str
    collectives: str
    memory: int | None
    rendezvous: Path
    threads: int
    pipes: tuple[int, ...]
    link: Link | None = None
    compression: Compression | None = None


@dataclass(frozen=True)
class RankError:
    """What a rank reports when it cannot go on.

    Attributes:
        time: of the machine's monotonic clock, which tells a cause from its consequences on other ranks.
        mendable: whether it was a ValueError, whose message is for users.
        line: the message.
        trace: the traceback.
    """

    time: float
    mendable: bool
    line: str
    trace: str


class Rank:
    """What functions that run on a rank are given.

    Attributes:
        collectives: the connection to all ranks.
        kept: a place for what later functions need again, such as engines.
        sender: on rank 0, what it tells all other ranks.
        receiver: on the other ranks, what they are told.
    """

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self.settings = settings
        self.rank = settings.rank
        self.device = torch.device(settings.device)
        self.kept: dict[str, Any] = {}
        self._connection = connection
        if settings.rank == 0:
            self.sender = Sender(settings.pipes)
        else:
            self.receiver = Receiver(settings.pipes[0])
        torch.set_num_threads(settings.threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.collectives = self._connect()

    def _connect(self) -> Collectives:
        if self.settings.ranks == 1:
            return Alone()
        connected = self._meet()
        if self.settings.link is not None:
            connected = EmulatedLink(connected, self.settings.link)
        if self.settings.compression is not None:
            connected = Compressed(connected, self.settings.compression)
        return connected

    def _meet(self) -> Collectives:
        settings = self.settings
        rank, ranks = settings.rank, settings.ranks
        if settings.collectives == "none":
            return Unconnected(rank, tuple(range(ranks)))
        if settings.collectives == "shm":
            assert settings.memory is not None
            return SharedMemoryCollectives(rank, tuple(range(ranks)), settings.memory, ranks)
        return TorchCollectives.connect(settings.collectives, rank, ranks, settings.rendezvous)

    def notify(self, value: Any) -> None:
        """Send a value to the starting process at once."""
        self._connection.send_bytes(pickle.dumps(("note", value)))

    def inbox(self) -> SimpleQueue[Any]:
        """What the starting process posts from now on; the function that asks for it is the last one of this rank."""
        messages: SimpleQueue[Any] = SimpleQueue()

        def read() -> None:
            with suppress(EOFError):  # the lifeline ends this process then
                while True:
                    messages.put(pickle.loads(self._connection.recv_bytes()))

        threading.Thread(target=read, daemon=True).start()
        return messages


def serve(connection: Connection) -> None:
    """Connect, then answer calls until the other end closes."""
    try:
        rank = Rank(pickle.loads(connection.recv_bytes()), connection)
        connection.send_bytes(pickle.dumps(("result", None)))
        while True:
            function, arguments = pickle.loads(connection.recv_bytes())
            answer(rank, function, arguments, connection)
    except EOFError:
        return
    except Exception as error:  # reported to the starting process, which raises it
        report(error, connection)
        raise


def answer(rank: Rank, function: Callable[..., Any], arguments: tuple[Any, ...], connection: Connection) -> None:
    """Run one function and send back what it returns."""
    result = function(rank, *arguments)
    connection.send_bytes(pickle.dumps(("result", result)))


def report(error: Exception, connection: Connection) -> None:
    """Send an error to the starting process."""
    first_line = (str(error).strip() or "no message").split("\n")[0]
    known = isinstance(error, ValueError | OSError)
    line = first_line if known else f"{type(error).__name__}: {first_line}"
    message = RankError(time.monotonic(), isinstance(error, ValueError), line, traceback.format_exc())
    connection.send_bytes(pickle.dumps(("error", message)))


def end_with(lifeline: Connection, folder: str) -> None:
    """End this process when the starting one has gone, even while it waits for another rank, and leave no files."""

    def watch() -> None:
        wait([lifeline])
        shutil.rmtree(folder, ignore_errors=True)  # the other ranks do the same
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Be a rank; the command line has the descriptors of the connection and the lifeline, and the ranks' folder."""
    commands, lifeline, folder = sys.argv[1:4]
    end_with(Connection(int(lifeline)), folder)
    serve(Connection(int(commands)))
