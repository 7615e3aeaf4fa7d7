"""Connections of ranks that work one behind the other: each sends to the next one, and the last one to the first.

A message goes by a socket and is read without waiting for anybody else. A link is emulated as in link.py: a message is
looked at when it would have arrived.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgeon.processes.sockets import address_of, watch_over
from surgeon.runtime.comm.link import Line, Link, SystemClock

Address = str | tuple[str, int]


class Arrived(NamedTuple):
    """A message that a rank has been sent.

    Attributes:
        due: when it has arrived, by the machine's clock.
        stream: (tokens, hidden), if there is one with it.
    """

    message: Any
    due: float
    stream: Tensor | None


class Ring:
    """One rank's place in it.

    Attributes:
        line: the emulated link to the next rank, if any.
        sent: bytes so far.
    """

    def __init__(self, onward: Connection, inward: Connection) -> None:
        self.line: Line | None = None
        self.sent = 0
        self._onward, self._inward = onward, inward
        self._held: Arrived | None = None

    def emulate(self, link: Link | None) -> None:
        """Have what is sent from now on go through a link."""
        self.line = None if link is None else Line(link, SystemClock())

    def send(self, message: Any, stream: Tensor | None = None) -> None:
        """Send a message on, with a stream, (tokens, hidden), if any; waits while too much is on its way."""
        numbers = None if stream is None else stream.contiguous().view(torch.uint8).numpy().tobytes()
        size = 0 if numbers is None else len(numbers)
        due = 0.0 if self.line is None else self.line.send(size)
        kind = None if stream is None else (str(stream.dtype).removeprefix("torch."), stream.shape[1])
        self.sent += size
        self._onward.send_bytes(pickle.dumps((message, due, kind, numbers), protocol=pickle.HIGHEST_PROTOCOL))

    def receive(self, wait: bool = True) -> Arrived | None:
        """The next message that has arrived; None if there is none and it is not to be waited for.

        Raises:
            ConnectionError: if the rank before has ended.
        """
        if self._held is None:
            try:
                if not wait and not self._inward.poll():
                    return None
                message, due, kind, numbers = pickle.loads(self._inward.recv_bytes())
            except EOFError:
                raise ConnectionError("the rank before this one has closed its connection") from None
            stream = None
            if kind is not None:
                dtype, width = kind
                stream = torch.frombuffer(bytearray(numbers), dtype=getattr(torch, dtype)).view(-1, width)
            self._held = Arrived(message, due, stream)
        if not wait and self._held.due > time.perf_counter():
            return None
        SystemClock().wait_until(self._held.due)
        arrived, self._held = self._held, None
        return arrived


def listener(interface: str | None, secret: bytes) -> Listener:
    """Where the rank before connects: a file of this machine, or a port of the network interface.

    Args:
        secret: that whoever connects has to know.
    """
    if interface is None:
        return Listener(family="AF_UNIX", authkey=secret)
    return Listener((address_of(interface), 0), family="AF_INET", authkey=secret)


def joined(rank: int, addresses: list[Address], listening: Listener, secret: bytes) -> Ring:
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
    return Ring(onward, inward)
