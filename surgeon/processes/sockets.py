"""What ranks on several machines connect with: a TCP store, and connections of which both ends prove who they are."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch does export them

from surgeon.processes.torchrun import RankLocation, TorchrunEnvironment

Purpose = Literal["lifeline", "commands", "channel"]
PURPOSES: tuple[Purpose, ...] = ("lifeline", "commands", "channel")  # in the order in which they are made

STORE_TIMEOUT = timedelta(minutes=10)  # for a key that another rank writes
KEY = "rank0"  # where the store has rank 0's port and the secret
LOOK_SECONDS = 0.1  # between two looks into the store
PROOF_SECONDS = 10  # that somebody who connects has to prove to know the secret

# A machine that vanishes (no power, no network) sends nothing: its connections are given up after these seconds.
IDLE_SECONDS, PROBE_SECONDS, PROBES = 2, 1, 4
_SILENCE_MILLISECONDS = (IDLE_SECONDS + PROBE_SECONDS * PROBES) * 1000


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself on each of its connections.

    Attributes:
        ranks: how many it believes there are.
        clock: its machine's monotonic clock, as it sends this.
    """

    purpose: Purpose
    rank: int
    ranks: int
    location: RankLocation
    host: str
    pid: int
    version: str
    clock: float


class StoreAddress(NamedTuple):
    """A TCP store that is open already, on this machine or another.

    Attributes:
        prefix: of the keys that belong to these ranks.
    """

    host: str
    port: int
    prefix: str

    def connect(self) -> PrefixStore:
        """The store, as one of its clients sees it."""
        return PrefixStore(self.prefix, TCPStore(self.host, self.port, timeout=STORE_TIMEOUT, wait_for_workers=False))


def say_why(lifeline: Connection, reason: str | None) -> None:
    """Tell a rank to end, with the reason if something has failed."""
    with suppress(OSError):
        lifeline.send_bytes((reason or "").encode())


def interface_of(address: str) -> str | None:
    """The network interface that has an address, such as eth0; None if none has."""
    import psutil

    wanted = ipaddress.ip_address(address.partition("%")[0])
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                found = ipaddress.ip_address(each.address.partition("%")[0])
                if found == wanted or (found.is_loopback and wanted.is_loopback):
                    return name
    return None


def key_prefix(torchrun: TorchrunEnvironment) -> str:
    """Of what surgeon keeps in the store, where restarted processes must not find what others have left."""
    return f"surgeon/{torchrun.attempt}"


def resolve(torchrun: TorchrunEnvironment) -> tuple[socket.AddressFamily, str]:
    """What MASTER_ADDR stands for on this machine.

    Raises:
        ValueError: if that is nothing.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(torchrun.address, None, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"MASTER_ADDR {torchrun.address!r} cannot be found from here: {error.strerror}") from None
    return family, str(address[0])


def listen(torchrun: TorchrunEnvironment, port: int = 0) -> socket.socket:
    """Listen on the interface that MASTER_ADDR names, and on no other.

    Args:
        port: 0 for any that is free.

    Raises:
        ValueError: if the address is not this machine's.
        OSError: if the port is taken.
    """
    family, address = resolve(torchrun)
    try:
        return socket.create_server((address, port), family=family, backlog=len(PURPOSES) * torchrun.ranks)
    except OSError as error:
        if port:
            raise OSError(f"rank 0 cannot listen at {address}, MASTER_PORT {port}: {error.strerror}") from None
        raise ValueError(
            f"MASTER_ADDR {torchrun.address!r} ({address}) is no address of {socket.gethostname()}, where rank 0 runs: "
            f"{error.strerror}"
        ) from None


def open_store(torchrun: TorchrunEnvironment) -> PrefixStore:
    """Open the store in this process, as rank 0 does where torchrun has none.

    Raises:
        ValueError, OSError: as `listen`.
    """
    listen(torchrun).close()  # so that an address that is not this machine's is not taken for a port in use
    descriptor = listen(torchrun, torchrun.port).detach()
    store = TCPStore(
        torchrun.address,
        torchrun.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=descriptor,
        timeout=_limit(torchrun),
    )
    return PrefixStore(key_prefix(torchrun), store)


def connect_store(torchrun: TorchrunEnvironment) -> PrefixStore:
    """Connect to the store as soon as somebody listens there (torch would write many lines meanwhile).

    Raises:
        ValueError: if MASTER_ADDR is no address.
        TimeoutError: if nobody listens there in time.
        ConnectionError: if it is something else that listens.
    """
    resolve(torchrun)
    deadline = time.monotonic() + torchrun.patience
    while not _answers(torchrun, deadline):
        if time.monotonic() > deadline:
            raise TimeoutError(unfound(torchrun))
        time.sleep(LOOK_SECONDS)
    try:
        store = TCPStore(torchrun.address, torchrun.port, wait_for_workers=False, timeout=_limit(torchrun))
    except DistError as error:
        first_line = str(error).partition("\n")[0]
        raise ConnectionError(f"what listens at {torchrun.address}:{torchrun.port} is no store: {first_line}") from None
    return PrefixStore(key_prefix(torchrun), store)


def _answers(torchrun: TorchrunEnvironment, deadline: float) -> bool:
    with suppress(OSError):
        socket.create_connection((torchrun.address, torchrun.port), max(0.1, deadline - time.monotonic())).close()
        return True
    return False


def _limit(torchrun: TorchrunEnvironment) -> timedelta:
    return timedelta(seconds=torchrun.patience)


def unfound(torchrun: TorchrunEnvironment) -> str:
    """What to say when nobody was there in time."""
    return (
        f"rank {torchrun.rank} did not find rank 0 at {torchrun.address}, port {torchrun.port}, within "
        f"{torchrun.patience:g} s; start the same command there with RANK 0 (--node-rank 0), or see what it says"
    )


def watch_over(connected: socket.socket) -> None:
    """Send small messages at once, and notice within seconds when the other machine has vanished."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {
        "TCP_KEEPIDLE": IDLE_SECONDS,
        "TCP_KEEPINTVL": PROBE_SECONDS,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": _SILENCE_MILLISECONDS,
    }.items():
        if hasattr(socket, name):  # not on every system
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextmanager
def limited(connection: Connection) -> Iterator[None]:
    """Give up reading when nothing comes for a while."""

    def limit(seconds: int) -> None:
        view = socket.socket(fileno=os.dup(connection.fileno()))
        with view:
            view.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))

    limit(PROOF_SECONDS)
    yield
    limit(0)
