"""The meeting of ranks on several machines: a TCP store at MASTER_ADDR:MASTER_PORT, then connections.

Rank 0 listens at a port of its own, on the interface that MASTER_ADDR names and no other, and writes that port and a
random secret into the store. Every other rank connects three times: a lifeline, on which nothing comes until it is to
end; commands and answers; and rank 0's messages between passes (runtime/worker/rank.py).

Whoever can send a pickle over these connections can run anything. So nothing is read from one until both ends have
proved to know the secret (HMAC of a random challenge, as `multiprocessing` does it). The secret is as safe as the
store: whoever reaches MASTER_PORT can read it, and nothing is encrypted. Like torchrun and torch.distributed, this is
for a network whose machines trust each other.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch does export them

from surgeon.processes.torchrun import (
    PROOF_SECONDS,
    RankLocation,
    TorchrunEnvironment,
    interface_of,
    limit_silence,
    listen,
    prove,
    resolve,
)
from surgeon.version import __version__

STORE_TIMEOUT = timedelta(minutes=10)  # for a key that another rank writes
LOOK_SECONDS = 0.1  # between two looks whether the store is there, or a key in it


class StoreAddress(NamedTuple):
    """A TCP store that is open already, on this machine or another.

    Attributes:
        prefix: of the keys that belong to these ranks.
    """

    host: str
    port: int
    prefix: str

    def connect(self) -> PrefixStore:
        """Connect to the store as a client."""
        return PrefixStore(
            self.prefix, TCPStore(self.host, self.port, timeout=STORE_TIMEOUT, wait_for_workers=False)
        )


def key_prefix(torchrun: TorchrunEnvironment) -> str:
    """The prefix of surgeon's keys in the store, another one for restarted processes."""
    return f"surgeon/{torchrun.attempt}"


def serve_store(listening: socket.socket, timeout: timedelta = STORE_TIMEOUT) -> TCPStore:
    """Open a store at a socket (a store by itself would listen on all interfaces), as long as somebody keeps it."""
    host, port = listening.getsockname()[:2]
    descriptor = listening.detach()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, timeout=timeout
    )


def connect_store(torchrun: TorchrunEnvironment) -> PrefixStore:
    """Connect to the store as soon as somebody listens there (torch would write many lines meanwhile)."""
    resolve(torchrun)
    deadline = time.monotonic() + torchrun.patience
    while True:
        left = deadline - time.monotonic()
        with suppress(OSError):
            socket.create_connection((torchrun.address, torchrun.port), max(0.1, left)).close()
            break
        if left < 0:
            raise TimeoutError(unfound(torchrun))
        time.sleep(LOOK_SECONDS)
    timeout = timedelta(seconds=torchrun.patience)
    try:
        store = TCPStore(torchrun.address, torchrun.port, wait_for_workers=False, timeout=timeout)
    except DistError as error:
        first_line = str(error).partition("\n")[0]
        raise ConnectionError(
            f"what listens at {torchrun.address}:{torchrun.port} is no store: {first_line}"
        ) from None
    return PrefixStore(key_prefix(torchrun), store)


def unfound(torchrun: TorchrunEnvironment) -> str:
    """The message when nobody was there in time."""
    return (
        f"rank {torchrun.rank} did not find rank 0 at {torchrun.address}, port {torchrun.port}, within "
        f"{torchrun.patience:g} s; start the same command there with RANK 0 (of torchrun: node rank 0), "
        "or see what it says"
    )


Purpose = Literal["lifeline", "commands", "channel"]
# Connections in the order in which they are made.
PURPOSES: tuple[Purpose, ...] = ("lifeline", "commands", "channel")
KEY = "rank0"  # where the store has rank 0's port and the secret


@dataclass(frozen=True)
class Hello:
    """A rank's introduction on each of its connections: who it is, and its machine's monotonic clock."""

    purpose: Purpose
    rank: int
    ranks: int
    location: RankLocation
    host: str
    pid: int
    version: str
    clock: float


class Admitted(NamedTuple):
    """One connection that a rank has made to rank 0, and how far its machine's clock lags behind this one's."""

    hello: Hello
    connection: Connection
    lag: float

    def turn_away(self, reason: str) -> None:
        """Close the connection; a rank watches its lifeline while it makes the others."""
        if self.hello.purpose == "lifeline":
            say_why(self.connection, reason)
        self.connection.close()


class Rendezvous:
    """Rank 0's side. There is one per process: `rendezvous_at`."""

    def __init__(self, torchrun: TorchrunEnvironment) -> None:
        """Open the store, unless it is torchrun's, and tell the others where to connect to."""
        self.torchrun = torchrun
        self.store = StoreAddress(torchrun.address, torchrun.port, key_prefix(torchrun))
        if torchrun.hosted:
            self._store = connect_store(torchrun)
        else:
            # Listening first tells an address of another machine from a port in use.
            listen(torchrun).close()
            listening = listen(torchrun, torchrun.port)
            own = serve_store(listening, timedelta(seconds=torchrun.patience))
            self._store = PrefixStore(key_prefix(torchrun), own)
        self._listener = listen(torchrun)
        self._secret = secrets.token_bytes(32)
        address, port = self._listener.getsockname()[:2]
        self.location = RankLocation(torchrun.local_rank, torchrun.local_ranks, interface_of(address))
        self._store.set(KEY, json.dumps([port, self._secret.hex()]))

    def accept(self) -> list[dict[Purpose, Admitted]]:
        """Wait for the other ranks; they can come once."""
        if self._listener.fileno() < 0:
            raise ValueError(
                "the ranks that torchrun has started have served and ended; start new ones with torchrun"
            )
        missing = {(rank, purpose) for rank in range(1, self.torchrun.ranks) for purpose in PURPOSES}
        found: dict[tuple[int, Purpose], Admitted] = {}
        deadline = time.monotonic() + self.torchrun.patience
        try:
            with self._listener:
                while missing:
                    try:
                        self._listener.settimeout(max(0.001, deadline - time.monotonic()))
                        connected, _ = self._listener.accept()
                    except TimeoutError:
                        names = ", ".join(map(str, sorted({rank for rank, _ in missing})))
                        where = self._listener.getsockname()[0]
                        raise TimeoutError(
                            f"rank{'s' * (', ' in names)} {names} of {self.torchrun.ranks} did not join rank 0 at "
                            f"{where} within {self.torchrun.patience:g} s; see what they say, and whether they reach "
                            "that address"
                        ) from None
                    if (entrant := self._admit(connected)) is None:
                        continue
                    place = entrant.hello.rank, entrant.hello.purpose
                    before = found.setdefault(place, entrant)
                    if reason := self._contradiction(entrant.hello, before.hello):
                        entrant.turn_away(reason)
                        raise ValueError(reason)
                    missing.discard(place)
        except BaseException as error:
            for entrant in found.values():
                entrant.turn_away(str(error) or type(error).__name__)
            raise
        return [{way: found[rank, way] for way in PURPOSES} for rank in range(1, self.torchrun.ranks)]

    def _admit(self, connected: socket.socket) -> Admitted | None:
        """Admit who connected; None if they do not know the secret."""
        connection: Connection | None = None
        try:
            prove(connected, self._secret, first=True)
            limit_silence(connected, PROOF_SECONDS)
            connection = Connection(os.dup(connected.fileno()))
            hello = connection.recv()
            limit_silence(connected, 0)
        except (EOFError, OSError):
            if connection is not None:
                connection.close()
            return None
        finally:
            connected.close()
        assert isinstance(hello, Hello)
        return Admitted(hello, connection, time.monotonic() - hello.clock)

    def _contradiction(self, hello: Hello, before: Hello) -> str | None:
        who = f"rank {hello.rank} on {hello.host}"
        if hello.ranks != self.torchrun.ranks:
            return (
                f"{who} has WORLD_SIZE {hello.ranks}, and rank 0 {self.torchrun.ranks}; "
                "start all with the same numbers"
            )
        if (hello.host, hello.pid) != (before.host, before.pid) or hello.rank == 0:
            if hello.rank:
                other = f"process {before.pid} on {before.host}"
            else:
                other = "rank 0 itself"
            return f"RANK {hello.rank} is taken twice: by process {hello.pid} on {hello.host} and by {other}"
        if hello.version != __version__:
            return f"{who} runs surgeon {hello.version}, and rank 0 {__version__}; install the same"
        return None


@cache
def rendezvous_at(torchrun: TorchrunEnvironment) -> Rendezvous:
    """The rendezvous of this process, which must have rank 0; opened the first time that somebody asks."""
    return Rendezvous(torchrun)


def say_why(lifeline: Connection, reason: str | None) -> None:
    """Tell a rank to end, with the reason if something has failed."""
    with suppress(OSError):
        lifeline.send_bytes((reason or "").encode())


def end_when_told(lifeline: Connection, torchrun: TorchrunEnvironment) -> threading.Thread:
    """End this process, in the thread that is returned, when rank 0 says so or has gone, even while it computes."""

    def watch() -> None:
        reason = f"rank 0 at {torchrun.address} has gone, and so does rank {torchrun.rank}"
        with suppress(EOFError, OSError):
            reason = lifeline.recv_bytes().decode()
        if reason:
            print(f"error: {reason}", file=sys.stderr, flush=True)
        os._exit(1 if reason else 0)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    return watcher


def connect_rank0(
    torchrun: TorchrunEnvironment, port: int, secret: bytes, purpose: Purpose
) -> Connection:
    """Make one of the connections to rank 0; waits until rank 0 is ready for it.

    Args:
        port: of rank 0's own.
        secret: that lets another rank in.
    """
    try:
        connected = socket.create_connection((torchrun.address, port), torchrun.patience)
        interface = interface_of(connected.getsockname()[0])
        # It listens from its beginning, and answers once it has planned.
        prove(connected, secret, first=False, seconds=torchrun.patience)
        connection = Connection(connected.detach())
        location = RankLocation(torchrun.local_rank, torchrun.local_ranks, interface)
        host = socket.gethostname()
        now = time.monotonic()
        connection.send(
            Hello(purpose, torchrun.rank, torchrun.ranks, location, host, os.getpid(), __version__, now)
        )
    except BlockingIOError:
        raise TimeoutError(
            f"rank 0 at {torchrun.address}, port {port}, did not answer rank {torchrun.rank} within "
            f"{torchrun.patience:g} s; see what it says"
        ) from None
    except (EOFError, OSError) as error:
        reason = str(error) or "it closed the connection"
        raise ConnectionError(f"rank 0 at {torchrun.address}, port {port}, has gone: {reason}") from None
    return connection


def find_rank0(torchrun: TorchrunEnvironment) -> Callable[[Purpose], Connection]:
    """Find rank 0, as any other rank; returns what makes each of the connections to it (`connect_rank0`)."""
    deadline = time.monotonic() + torchrun.patience
    store = connect_store(torchrun)
    try:
        while not store.check([KEY]):
            if time.monotonic() > deadline:
                raise TimeoutError(unfound(torchrun))
            time.sleep(LOOK_SECONDS)
        port, secret = json.loads(store.get(KEY))
    except DistError:
        raise ConnectionError(
            f"rank 0 at {torchrun.address}, port {torchrun.port}, has ended; see what it says"
        ) from None
    return partial(connect_rank0, torchrun, port, bytes.fromhex(secret))
