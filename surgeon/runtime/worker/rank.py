"""The process of one rank, which `ranks.Ranks` starts (`main`), or torchrun (`be_rank`).

It connects to the other ranks, then runs the functions it is sent, one after the other, until its connection closes.

Messages between ranks go by one-way pipes from rank 0 to the others, or by a ring. A pipe's reader spins for about as
long as rank 0 takes between two passes, then sleeps until a message comes. A pipe costs some microseconds per message
(a collective of gloo costs milliseconds), and closes when rank 0 ends.

In a ring each rank sends to the next one, and the last one to the first, by sockets. A link is emulated as in
collectives.py: a message is looked at when it would have arrived.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import pickle
import select
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import torch
from torch import Tensor

from surgeon.machine import (
    avoid_cudnn_attention,
    gpu_free_bytes,
    keep_freed_memory,
    keep_to_share,
    threads_per_rank,
)
from surgeon.processes.children import when_parent_ends
from surgeon.processes.rendezvous import StoreAddress, end_when_told, find_rank0
from surgeon.processes.torchrun import (
    RankLocation,
    TorchrunEnvironment,
    interface_variables,
    ranks_of_this_machine,
    read_environment,
)
from surgeon.runtime.comm.collectives import (
    Alone,
    Collectives,
    Compressed,
    EmulatedLink,
    Line,
    Link,
    SystemClock,
    TorchCollectives,
    Unconnected,
)
from surgeon.runtime.comm.shared_memory import (
    SharedMemoryCollectives,
    shares_gpus,
    with_symmetric_memory,
)
from surgeon.runtime.comm.wires import WIRES
from surgeon.words import did_you_mean

SPIN_SECONDS = 0.002


class Sender:
    """Rank 0's end of the pipes."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._connections = [Connection(descriptor, readable=False) for descriptor in descriptors]

    def send(self, message: Any) -> None:
        """Send a message to every other rank."""
        if self._connections:
            data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            for connection in self._connections:
                connection.send_bytes(data)


class Ring:
    """One rank's place in a ring.

    Args:
        onward, inward: the connections to the next rank, and to the one before.
        link: that is emulated towards the next rank, if any.
    """

    def __init__(self, onward: Connection, inward: Connection, link: Link | None = None) -> None:
        self._onward = onward
        self._line = None
        if link is not None:
            self._line = Line(link, SystemClock())
        self._arrived: SimpleQueue[bytes | None] = SimpleQueue()
        # Whatever this rank does, the one before gets rid of what it sends: else all could wait for each other.
        threading.Thread(target=self._read, args=(inward,), daemon=True).start()

    def _read(self, inward: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._arrived.put(inward.recv_bytes())
        self._arrived.put(None)

    def send(self, message: Any, stream: Tensor | None = None) -> None:
        """Send a message on, with a stream, (tokens, hidden), if any."""
        kind = None
        numbers = b""
        if stream is not None:
            kind = stream.dtype, stream.shape
            numbers = stream.contiguous().view(torch.uint8).numpy().tobytes()
        due = 0.0
        if self._line is not None:
            due = self._line.send(len(numbers))
        self._onward.send_bytes(
            pickle.dumps((message, due, kind, numbers), protocol=pickle.HIGHEST_PROTOCOL)
        )

    def receive(self) -> tuple[Any, Tensor]:
        """Wait for the next message and the stream that comes with it, which may be of no tokens."""
        arrived = self._arrived.get()
        if arrived is None:
            raise ConnectionError("the rank before this one has closed its connection")
        message, due, kind, numbers = pickle.loads(arrived)
        SystemClock().wait_until(due)
        if not numbers:
            return message, torch.empty(0)
        dtype, shape = kind
        return message, torch.frombuffer(bytearray(numbers), dtype=dtype).view(shape)


@dataclass(frozen=True)
class RankOptions:
    """The number of ranks, their device and their connection; validated when made.

    Attributes:
        ranks: how many.
        device: "cpu", or "cuda" for one GPU per rank; "auto" becomes the one that `choose_device` says.
        collectives: as `choose_collectives` takes it, and then what it has chosen.
        link: emulate one of this delay and bandwidth between the ranks.
        compression: send the reductions of the program's steps by this one of WIRES.

    Raises:
        ValueError: if there is no rank, the collectives do not fit the device, or the link or compression do not fit
            them.
    """

    ranks: int = 1
    device: str = "cpu"
    collectives: str = "auto"
    link: Link | None = None
    compression: str | None = None

    @classmethod
    def of(cls, ranks: int | RankOptions) -> RankOptions:
        """Take options as given; of a number alone, on GPUs where there is one for each."""
        if isinstance(ranks, RankOptions):
            return ranks
        return cls(ranks, "auto")

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, int):
            raise ValueError(f"ranks must be a number, or RankOptions, not {self.ranks!r}")
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {self.ranks}")
        if self.device == "auto":
            object.__setattr__(self, "device", choose_device("auto", self.ranks))
        object.__setattr__(self, "collectives", choose_collectives(self.collectives, self.device))
        check_sending(self.collectives, self.device, self.link, self.compression)
        if self.ranks == 1 and (self.link is not None or self.compression is not None):
            warnings.warn(
                "one rank sends nothing: the link and the compression change nothing", stacklevel=3
            )

    def __str__(self) -> str:
        parts = self.device, self.collectives, self.link, self.compression
        return ", ".join(str(part) for part in parts if part is not None)


def choose_device(wanted: str, ranks: int) -> str:
    """Say "cpu" or "cuda" for "cpu", "cuda" or "auto" (cuda if there is a GPU for every rank of this machine)."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(
            f"there is no device {wanted!r}; {did_you_mean(wanted, ('auto', 'cpu', 'cuda'))}"
        )
    gpus = torch.cuda.device_count()
    ranks = ranks_of_this_machine(ranks)
    enough = gpus >= ranks or sees_its_own_gpu()
    may_share = gpus and (shares_gpus() or os.environ.get(NCCL_SHARES) == "1")
    if wanted == "cuda" and not (enough or may_share):
        raise ValueError(
            f"{ranks} ranks need a GPU each, and there are {gpus}; use the CPU or fewer ranks"
        )
    if wanted == "cuda" or (wanted == "auto" and enough):
        return "cuda"
    return "cpu"


def sees_its_own_gpu() -> bool:
    """Tell whether this is one of several processes that see one GPU each, which to them is number 0.

    Batch systems start them so (`srun --gpus-per-task 1`), and say so by CUDA_VISIBLE_DEVICES.
    """
    alone = torch.cuda.device_count() == 1 and bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return alone and read_environment() is not None


def choose_collectives(wanted: str, device: str) -> str:
    """Choose "shm" (CPU ranks of one machine), "gloo" or "nccl" (GPUs); for "auto" the fastest that fits.

    With "none" ranks do not talk: their results are wrong, and their speed tells the cost of communication. Ranks of
    torchrun's have no memory in common, also where they are on one machine: they inherit nothing from each other.
    """
    fitting: tuple[str, ...] = {"cpu": ("shm", "gloo"), "cuda": ("nccl", "gloo")}[device]
    if read_environment() is not None:
        if wanted == "shm":
            raise ValueError(
                "shm connects only ranks that surgeon starts itself; under torchrun use gloo or auto"
            )
        fitting = tuple(way for way in fitting if way != "shm")
    if wanted == "auto":
        return fitting[0]
    if wanted in (*fitting, "none"):
        return wanted
    choices = ("auto", "shm", "gloo", "nccl", "none")
    if wanted in choices:
        raise ValueError(
            f"{wanted} does not connect ranks on a {device} device; use {' or '.join(fitting)}"
        )
    raise ValueError(f"there are no collectives {wanted!r}; {did_you_mean(wanted, choices)}")


def check_sending(collectives: str, device: str, link: Link | None, compression: str | None) -> None:
    """Refuse an emulated link or a compression that cannot be had."""
    if compression is not None and compression not in WIRES:
        raise ValueError(f"there is no compression {compression!r}; {did_you_mean(compression, WIRES)}")
    if collectives == "none" and (link is not None or compression is not None):
        raise ValueError("collectives none send nothing; give no link and no compression with them")
    if device == "cuda" and link is not None:
        raise ValueError(
            "a link can be emulated between CPU ranks only (GPUs go on while a process waits); use cpu"
        )


NCCL_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
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
        sender: of messages from rank 0 to all others, which `receive` them; ring: of those in a pipeline.
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
            self._channel = Connection(channel[0], writable=False)
            self._poll = select.poll()
            self._poll.register(self._channel, select.POLLIN)
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
            can_record = options.collectives == "nccl" or (self.device.type == "cuda" and shares_gpus())
            if can_record and settings.location.local_ranks == options.ranks:
                with redirect_stderr(io.StringIO()) as said:  # which goes to a file that does not stay
                    connected = with_symmetric_memory(connected, self.device)
                for line in said.getvalue().splitlines():
                    self.notify(line)
        if options.link is not None:
            connected = EmulatedLink(connected, options.link)
        if options.compression is None:
            return connected
        return Compressed(connected, options.compression)

    def receive(self) -> Any:
        """Wait for the next message of rank 0.

        Raises:
            ConnectionError: if that has ended.
        """
        spins_end = time.monotonic() + SPIN_SECONDS
        while not self._poll.poll(0 if time.monotonic() < spins_end else None):
            os.sched_yield()
        try:
            return pickle.loads(self._channel.recv_bytes())
        except EOFError:
            raise ConnectionError("rank 0 has closed its connection") from None

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
    """The device of a rank: on GPUs one of its own, or one that ranks share.

    Over gloo they may, and over NCCL from 2.30 on where NCCL_MULTI_RANK_GPU_ENABLE=1 is in the environment.
    """
    device = settings.options.device
    if device == "cpu":
        return torch.device("cpu")
    number = settings.location.local_rank
    gpus = torch.cuda.device_count()
    may_share = settings.options.collectives == "gloo" or os.environ.get(NCCL_SHARES) == "1"
    if gpus and (may_share or sees_its_own_gpu()):
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
        is_expected = isinstance(error, ValueError | OSError)
        line = first_line
        if not is_expected:
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
    connect = find_rank0(torchrun)
    watcher = end_when_told(connect("lifeline"), torchrun)
    try:
        commands = connect("commands")
        channel = connect("channel")
        serve(commands, [channel.fileno()])
    except Exception:
        watcher.join(END_SECONDS)  # if this is but a consequence, rank 0 knows of what
        raise
    watcher.join()
    raise AssertionError("the watcher ends this process")
