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
from surgeon.processes.sockets import (
    KEY,
    LOOK_SECONDS,
    Hello,
    Purpose,
    connect_store,
    interface_of,
    unfound,
    watch_over,
)
from surgeon.processes.torchrun import RankLocation, TorchrunEnvironment
from surgeon.runtime.worker.rank import serve
from surgeon.runtime.worker.rank_process import END_SECONDS


def be_rank(torchrun: TorchrunEnvironment) -> NoReturn:
    """Join rank 0 and run what it sends, then end this process as rank 0 says: with code 0 if nothing has failed.

    Raises:
        TimeoutError, ConnectionError: if rank 0 is not found in time, or ends before it has started its ranks.
        ValueError: if MASTER_ADDR is no address.
        Exception: what fails in this rank, when rank 0 has been told.
    """
    rank0 = find_rank0(torchrun)
    watcher = end_with(rank0.connect("lifeline"), torchrun)
    try:
        commands, channel = rank0.connect("commands"), rank0.connect("channel")
        serve(commands, [channel.fileno()])
    except Exception:
        watcher.join(END_SECONDS)  # if this is but a consequence, rank 0 knows of what
        raise
    watcher.join()
    raise AssertionError("the watcher ends this process")


def end_with(lifeline: Connection, torchrun: TorchrunEnvironment) -> threading.Thread:
    """End this process when rank 0 says so or has gone, even while it computes or waits for another rank."""

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


@dataclass(frozen=True)
class Rank0Address:
    """Where another rank finds rank 0, and the secret that lets it in."""

    torchrun: TorchrunEnvironment
    port: int
    secret: bytes

    def connect(self, purpose: Purpose) -> Connection:
        """One of the connections to rank 0; waits until rank 0 is ready for it.

        Raises:
            ConnectionError: if rank 0 ends, or cannot be reached.
        """
        torchrun = self.torchrun
        try:
            connected = socket.create_connection((torchrun.address, self.port), torchrun.patience)
            connected.settimeout(None)
            watch_over(connected)
            interface = interface_of(connected.getsockname()[0])
            connection = Connection(connected.detach())
            answer_challenge(connection, self.secret)
            deliver_challenge(connection, self.secret)
            location = RankLocation(torchrun.local_rank, torchrun.local_ranks, interface)
            host, now = socket.gethostname(), time.monotonic()
            connection.send(
                Hello(purpose, torchrun.rank, torchrun.ranks, location, host, os.getpid(), __version__, now)
            )
        except (EOFError, OSError, AuthenticationError) as error:
            reason = str(error) or "it closed the connection"
            raise ConnectionError(f"rank 0 at {torchrun.address}, port {self.port}, has gone: {reason}") from None
        return connection


def find_rank0(torchrun: TorchrunEnvironment) -> Rank0Address:
    """Look where rank 0 listens, as any other rank does.

    Raises:
        TimeoutError: if it does not say so in time.
        ConnectionError: if the store goes meanwhile.
        ValueError: if MASTER_ADDR is no address.
    """
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
    return Rank0Address(torchrun, port, bytes.fromhex(secret))
