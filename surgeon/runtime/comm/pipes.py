"""One-way pipes from rank 0 to the other ranks, for what each pass is to compute.

A reader looks for the next message without sleeping for about as long as rank 0 takes between two passes, then sleeps
until one comes, so that ranks with nothing to do use no processor. A pipe costs some microseconds per message (a
collective of gloo costs milliseconds), is the same for ranks on CPUs and GPUs, and closes when rank 0 ends.
"""

from __future__ import annotations

import os
import pickle
import select
import struct
import time
from collections.abc import Sequence
from typing import Any

SPIN_SECONDS = 0.002
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16  # what a pipe holds on Linux


class Sender:
    """Rank 0's end."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = tuple(descriptors)

    def send(self, message: Any) -> None:
        """Send a message to every other rank.

        Raises:
            BrokenPipeError: if one of them has ended.
        """
        if not self._descriptors:
            return
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        data = _LENGTH.pack(len(body)) + body
        for descriptor in self._descriptors:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]


class Receiver:
    """The end of one of the other ranks."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._buffer = bytearray()

    def receive(self) -> Any:
        """The next message.

        Raises:
            ConnectionError: if rank 0 has ended.
        """
        while len(self._buffer) < _LENGTH.size:
            self._read()
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        while len(self._buffer) < end:
            self._read()
        message = pickle.loads(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        return message

    def _read(self) -> None:
        spins_end = time.monotonic() + SPIN_SECONDS
        while not self._poll.poll(0 if time.monotonic() < spins_end else None):
            os.sched_yield()
        data = os.read(self._descriptor, _READ_BYTES)
        if not data:
            raise ConnectionError("rank 0 has closed its connection")
        self._buffer += data
