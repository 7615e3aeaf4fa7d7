"""Connections of ranks that work one behind the other: each sends to the next one, and the last one to the first.

A message goes by a socket. A link is emulated as in link.py: a message is looked at when it would have arrived.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from surgeon.processes.sockets import address_of, watch_over
from surgeon.runtime.comm.link import Line, Link, SystemClock

Address = str | tuple[str, int]


class Ring:
    """One rank's place in it.

    Args:
        onward, inward: the connections to the next rank, and to the one before.
        link: that is emulated towards the next rank, if any.
    """

    def __init__(self, onward: Connection, inward: Connection, link: Link | None = None) -> None:
        self._onward = onward
        self._line = None if link is None else Line(link, SystemClock())
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
            kind = str(stream.dtype).removeprefix("torch."), tuple(stream.shape)
            numbers = stream.contiguous().view(torch.uint8).numpy().tobytes()
        due = 0.0 if self._line is None else self._line.send(len(numbers))
        self._onward.send_bytes(pickle.dumps((message, due, kind, numbers), protocol=pickle.HIGHEST_PROTOCOL))

    def receive(self) -> tuple[Any, Tensor | None]:
        """Wait for the next message and the stream that comes with it.

        Raises:
            ConnectionError: if the rank before has ended.
        """
        arrived = self._arrived.get()
        if arrived is None:
            raise ConnectionError("the rank before this one has closed its connection")
        message, due, kind, numbers = pickle.loads(arrived)
        SystemClock().wait_until(due)
        if kind is None:
            return message, None
        dtype, shape = kind
        if not numbers:  # of a pass of which nothing is asked
            return message, torch.empty(shape, dtype=getattr(torch, dtype))
        return message, torch.frombuffer(bytearray(numbers), dtype=getattr(torch, dtype)).view(shape)


def listener(interface: str | None, secret: bytes) -> Listener:
    """Where the rank before connects: a file of this machine, or a port of the network interface.

    Args:
        secret: that whoever connects has to know.
    """
    if interface is None:
        return Listener(family="AF_UNIX", authkey=secret)
    return Listener((address_of(interface), 0), family="AF_INET", authkey=secret)


def joined(rank: int, addresses: list[Address], listening: Listener, secret: bytes, link: Link | None) -> Ring:
    """A rank's place in a ring, when all have one: rank 0 is connected to before it connects, so that all get on."""
    following = addresses[(rank + 1) % len(addresses)]
    if rank == 0:
        inward = listening.accept()
        onward = Client(following, authkey=secret)
    else:
        onward = Client(following, authkey=secret)
        inward = listening.accept()
    listening.close()
    for connection in (onward, inward) if isinstance(following, tuple) else ():
        with socket.socket(fileno=os.dup(connection.fileno())) as connected:
            watch_over(connected)
    return Ring(onward, inward, link)
