"""Messages between ranks: one-way pipes from rank 0 to the others, or a ring.

A pipe's reader spins for about as long as rank 0 takes between two passes, then sleeps until a message comes. A pipe
costs some microseconds per message (a collective of gloo costs milliseconds), and closes when rank 0 ends.

In a ring each rank sends to the next one, and the last one to the first, by sockets. A link is emulated as in
collectives.py: a message is looked at when it would have arrived.
"""

from __future__ import annotations

import os
import pickle
import select
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from surgeon.runtime.comm.collectives import Line, Link, SystemClock

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


class Receiver:
    """Another rank's end of a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor, writable=False)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            ConnectionError: if rank 0 has ended.
        """
        spins_end = time.monotonic() + SPIN_SECONDS
        while not self._poll.poll(0 if time.monotonic() < spins_end else None):
            os.sched_yield()
        try:
            return pickle.loads(self._connection.recv_bytes())
        except EOFError:
            raise ConnectionError("rank 0 has closed its connection") from None


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
