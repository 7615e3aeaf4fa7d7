"""What a process that torchrun has started as any rank but 0 does: it joins rank 0, and is its rank until that ends."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NoReturn

from torch.distributed import DistError

from surgeon import __version__
from surgeon.runtime.processes.rank import serve
from surgeon.runtime.processes.rank_process import END_SECONDS
from surgeon.runtime.processes.sockets import (
    KEY,
    LOOK_SECONDS,
    Hello,
    Purpose,
    connect_store,
    interface_of,
    unfound,
    watch_over,
)
from surgeon.runtime.processes.torchrun import Place, Seat


def be_rank(place: Place) -> NoReturn:
    """Join rank 0 and run what it sends, then end this process as rank 0 says: with code 0 if nothing has failed.

    Raises:
        TimeoutError, ConnectionError: if rank 0 is not found in time, or ends before it has started its ranks.
        ValueError: if MASTER_ADDR is no address.
        Exception: what fails in this rank, when rank 0 has been told.
    """
    door = find_rank0(place)
    watcher = end_with(door.connect("lifeline"), place)
    try:
        commands, channel = door.connect("commands"), door.connect("channel")
        serve(commands, [channel.fileno()])
    except Exception:
        watcher.join(END_SECONDS)  # if this is but a consequence, rank 0 knows of what
        raise
    watcher.join()
    raise AssertionError("the watcher ends this process")


def end_with(lifeline: Connection, place: Place) -> threading.Thread:
    """End this process when rank 0 says so or has gone, even while it computes or waits for another rank."""

    def watch() -> None:
        reason = f"rank 0 at {place.address} has gone, and so does rank {place.rank}"
        with suppress(EOFError, OSError):
            reason = lifeline.recv_bytes().decode()
        if reason:
            print(f"error: {reason}", file=sys.stderr, flush=True)
        os._exit(1 if reason else 0)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    return watcher


@dataclass(frozen=True)
class Door:
    """Where another rank finds rank 0, and the secret that lets it in."""

    place: Place
    port: int
    secret: bytes

    def connect(self, purpose: Purpose) -> Connection:
        """One of the connections to rank 0; waits until rank 0 is ready for it.

        Raises:
            ConnectionError: if rank 0 ends, or cannot be reached.
        """
        place = self.place
        try:
            connected = socket.create_connection((place.address, self.port), place.patience)
            connected.settimeout(None)
            watch_over(connected)
            interface = interface_of(connected.getsockname()[0])
            connection = Connection(connected.detach())
            answer_challenge(connection, self.secret)
            deliver_challenge(connection, self.secret)
            seat = Seat(place.local_rank, place.local_ranks, interface)
            host, now = socket.gethostname(), time.monotonic()
            connection.send(Hello(purpose, place.rank, place.ranks, seat, host, os.getpid(), __version__, now))
        except (EOFError, OSError, AuthenticationError) as error:
            reason = str(error) or "it closed the connection"
            raise ConnectionError(f"rank 0 at {place.address}, port {self.port}, has gone: {reason}") from None
        return connection


def find_rank0(place: Place) -> Door:
    """Look where rank 0 listens, as any other rank does.

    Raises:
        TimeoutError: if it does not say so in time.
        ConnectionError: if the store goes meanwhile.
        ValueError: if MASTER_ADDR is no address.
    """
    deadline = time.monotonic() + place.patience
    store = connect_store(place)
    try:
        while not store.check([KEY]):
            if time.monotonic() > deadline:
                raise TimeoutError(unfound(place))
            time.sleep(LOOK_SECONDS)
        port, secret = json.loads(store.get(KEY))
    except DistError:
        raise ConnectionError(f"rank 0 at {place.address}, port {place.port}, has ended; see what it says") from None
    return Door(place, port, bytes.fromhex(secret))
