"""The TCP store through which processes find each other, which torchrun holds, or the process with rank 0."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch does export them

from surgeon.processes.sockets import listen, resolve
from surgeon.processes.torchrun import TorchrunEnvironment

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
        """The store, as one of its clients sees it."""
        return PrefixStore(self.prefix, TCPStore(self.host, self.port, timeout=STORE_TIMEOUT, wait_for_workers=False))


def key_prefix(torchrun: TorchrunEnvironment) -> str:
    """Of what surgeon keeps in the store, where restarted processes must not find what others have left."""
    return f"surgeon/{torchrun.attempt}"


def serve_store(listening: socket.socket, timeout: timedelta = STORE_TIMEOUT) -> TCPStore:
    """A store of this process's, open as long as somebody keeps it.

    Args:
        listening: where; a store by itself would listen on all interfaces.
    """
    host, port = listening.getsockname()[:2]
    descriptor = listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, timeout=timeout)


def open_store(torchrun: TorchrunEnvironment) -> PrefixStore:
    """Open the store in this process, as rank 0 does where torchrun has none.

    Raises:
        ValueError, OSError: as `listen`.
    """
    listen(torchrun).close()  # so that an address that is not this machine's is not taken for a port in use
    listening = listen(torchrun, torchrun.port)
    return PrefixStore(key_prefix(torchrun), serve_store(listening, timedelta(seconds=torchrun.patience)))


def connect_store(torchrun: TorchrunEnvironment) -> PrefixStore:
    """Connect to the store as soon as somebody listens there (torch would write many lines meanwhile).

    Raises:
        ValueError: if MASTER_ADDR is no address.
        TimeoutError: if nobody listens there in time.
        ConnectionError: if it is something else that listens.
    """
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
        raise ConnectionError(f"what listens at {torchrun.address}:{torchrun.port} is no store: {first_line}") from None
    return PrefixStore(key_prefix(torchrun), store)


def unfound(torchrun: TorchrunEnvironment) -> str:
    """What to say when nobody was there in time."""
    return (
        f"rank {torchrun.rank} did not find rank 0 at {torchrun.address}, port {torchrun.port}, within "
        f"{torchrun.patience:g} s; start the same command there with RANK 0 (of torchrun: node rank 0), "
        "or see what it says"
    )
