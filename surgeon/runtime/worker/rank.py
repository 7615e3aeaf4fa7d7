"""The process of one rank, which `ranks.Ranks` starts (`main`), or torchrun (`be_rank`).

It connects to the other ranks, then runs the functions it is sent, one after the other, until its connection closes.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import torch

from surgeon.machine import (
    avoid_cudnn_attention,
    gpu_free_bytes,
    keep_freed_memory,
    keep_to_share,
    threads_per_rank,
)
from surgeon.processes.children import when_parent_ends
from surgeon.processes.rendezvous import StoreAddress, end_when_told, find_rank0
from surgeon.processes.sockets import interface_variables
from surgeon.processes.torchrun import RankLocation, TorchrunEnvironment
from surgeon.runtime.comm.collectives import (
    Alone,
    Collectives,
    Compressed,
    TorchCollectives,
    Unconnected,
)
from surgeon.runtime.comm.link import EmulatedLink
from surgeon.runtime.comm.pipes import Receiver, Ring, Sender
from surgeon.runtime.comm.shared_memory import SharedMemoryCollectives
from surgeon.runtime.comm.symmetric_memory import with_symmetric_memory
from surgeon.runtime.worker.options import RankOptions, sees_its_own_gpu

END_SECONDS = 10.0  # how long a rank whose connection is closed may take to end
_SENDING = threading.Lock()  # a long message is sent in parts


@dataclass(frozen=True)
class RankSettings:
    """A rank's settings.

    Attributes:
        rendezvous: on one machine a file that does not exist yet, else a store.
        memory: for collectives "shm", the file descriptor of the memory they share.
    """

    rank: int
    location: RankLocation
    options: RankOptions
    rendezvous: Path | StoreAddress
    memory: int | None = None


@dataclass(frozen=True)
class RankError:
    """A rank's report that it cannot go on; its monotonic clock tells a cause from its consequences on other ranks.

    Attributes:
        mendable: whether it was a ValueError, whose message is for users.
    """

    time: float
    mendable: bool
    line: str
    trace: str


class Rank:
    """A rank, as functions that run on it are given it.

    Attributes:
        collectives: the connection to all ranks.
        engines: by name, for later functions.
        sender, receiver: of messages from rank 0 to all others; ring: of those in a pipeline (worker/pipeline.py).
    """

    ring: Ring | None = None

    def __init__(self, settings: RankSettings, connection: Connection, channel: Sequence[int]) -> None:
        """Connect to the other ranks.

        Args:
            connection: to the starting process.
            channel: the descriptors of rank 0's ends towards the others, or of this rank's one end.
        """
        self.settings = settings
        self.rank = settings.rank
        self.device = rank_device(settings)
        self.engines: dict[str, Any] = {}
        self._connection = connection
        if settings.rank == 0:
            self.sender = Sender(channel)
        else:
            self.receiver = Receiver(channel[0])
        torch.set_num_threads(threads_per_rank(settings.location.local_ranks))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            avoid_cudnn_attention()  # torchrun may have started this process, with any environment
        self.collectives = self._connect()
        if self.device.type == "cpu":
            keep_to_share(settings.location.local_rank, settings.location.local_ranks)

    def _connect(self) -> Collectives:
        settings = self.settings
        options = self.settings.options
        everybody = tuple(range(options.ranks))
        if options.ranks == 1:
            return Alone()
        connected: Collectives
        if options.collectives == "none":
            connected = Unconnected(self.rank, everybody)
        elif options.collectives == "shm":
            assert settings.memory is not None
            connected = SharedMemoryCollectives(self.rank, everybody, settings.memory, options.ranks)
        else:
            # Gloo would take that which the machine's name stands for.
            if settings.location.interface is not None:
                for name, value in interface_variables(settings.location.interface).items():
                    os.environ.setdefault(name, value)
            ways = options.collectives, self.rank, options.ranks, settings.rendezvous
            connected = TorchCollectives.connect(*ways, device=self.device)
            if options.collectives == "nccl" and settings.location.local_ranks == options.ranks:
                connected = with_symmetric_memory(connected, self.device)
        if options.link is not None:
            connected = EmulatedLink(connected, options.link)
        if options.compression is None:
            return connected
        return Compressed(connected, options.compression)

    def notify(self, value: Any) -> None:
        """Send a value to the starting process at once; from any thread."""
        _send(self._connection, "note", value)

    def inbox(self) -> SimpleQueue[Any]:
        """Messages of the starting process from now on; the function that asks for it is the last one of this rank."""
        messages: SimpleQueue[Any] = SimpleQueue()

        def read() -> None:
            with suppress(EOFError):  # the lifeline ends this process then
                while True:
                    messages.put(pickle.loads(self._connection.recv_bytes()))

        threading.Thread(target=read, daemon=True).start()
        return messages


def rank_device(settings: RankSettings) -> torch.device:
    """The device of a rank: on GPUs one of its own, or over gloo, which does not mind, one that ranks share."""
    device = settings.options.device
    if device == "cpu":
        return torch.device("cpu")
    number = settings.location.local_rank
    gpus = torch.cuda.device_count()
    # NCCL would refuse to share one.
    if gpus and (settings.options.collectives == "gloo" or sees_its_own_gpu()):
        number %= gpus
    if number >= gpus:
        raise ValueError(
            f"there is no GPU {number} for rank {settings.rank}, only {gpus} on its machine"
        )
    return torch.device(device, number)


def gpu_room(rank: Rank) -> int:
    """On a rank on a GPU: how many bytes it may take there, where others share the GPU its part of them."""
    if sees_its_own_gpu():
        sharing = 1
    else:
        sharing = -(-rank.settings.location.local_ranks // torch.cuda.device_count())
    return gpu_free_bytes(rank.device.index) // sharing


def serve(connection: Connection, channel: Sequence[int]) -> None:
    """Connect to the other ranks (`channel` as `Rank` takes it), then answer calls until the other end closes."""
    keep_freed_memory()
    # What is kept from the collector (`worker.keep`) is let go at the end, or Triton says that it leaks.
    atexit.register(gc.unfreeze)
    try:
        rank = Rank(pickle.loads(connection.recv_bytes()), connection, channel)
        _send(connection, "result", None)
        while True:
            function, arguments = pickle.loads(connection.recv_bytes())
            _send(connection, "result", function(rank, *arguments))
    except EOFError:
        return
    except Exception as error:  # the starting process raises it
        first_line = (str(error).strip() or "no message").split("\n")[0]
        known = isinstance(error, ValueError | OSError)
        line = first_line
        if not known:
            line = f"{type(error).__name__}: {first_line}"
        message = RankError(
            time.monotonic(), isinstance(error, ValueError), line, traceback.format_exc()
        )
        with suppress(OSError):  # when the starting process has gone, too, nobody asks
            _send(connection, "error", message)
        raise


def _send(connection: Connection, kind: str, value: Any) -> None:
    message = pickle.dumps((kind, value))
    with _SENDING:
        connection.send_bytes(message)


def main() -> None:
    """Be a rank; the command line has the ranks' folder, then descriptors: of commands, and of the channel."""
    folder, commands, *channel = sys.argv[1:]

    def end() -> None:
        shutil.rmtree(folder, ignore_errors=True)  # the other ranks do the same
        os._exit(1)

    watcher = when_parent_ends(end)  # even while this process waits for another rank
    serve(Connection(int(commands)), [int(descriptor) for descriptor in channel])
    watcher.join()  # no more commands: the starting process has gone, and files are being removed


def be_rank(torchrun: TorchrunEnvironment) -> NoReturn:
    """Join rank 0 and run what it sends, then end this process as rank 0 says: with code 0 if nothing has failed."""
    rank0 = find_rank0(torchrun)
    watcher = end_when_told(rank0.connect("lifeline"), torchrun)
    try:
        commands = rank0.connect("commands")
        channel = rank0.connect("channel")
        serve(commands, [channel.fileno()])
    except Exception:
        watcher.join(END_SECONDS)  # if this is but a consequence, rank 0 knows of what
        raise
    watcher.join()
    raise AssertionError("the watcher ends this process")
