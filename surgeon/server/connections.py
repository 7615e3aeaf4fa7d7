"""What uvicorn lacks against clients that hold connections: requests that never arrive, answers nobody reads, too many.

uvicorn itself closes connections on which nothing comes after an answer, and limits what a head may have. It waits for
ever for a request and for a reader, and its `limit_concurrency` accepts any number of connections and refuses them in
plain text, which clients of the API do not understand.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from surgeon.server.errors import RETRY_SOON, ApiError

LOG_SECONDS = 60.0
MOST_CONNECTIONS = 1000
MOST_ACCEPTED = 128  # at a time, before any of them can be refused
QUEUE = 1024  # connections that the kernel holds until they are accepted
FEWEST_FILES = 16


@dataclass(frozen=True)
class Patience:
    """How long clients may take, in seconds, and how many may be connected.

    Attributes:
        head: for a request's first line and headers, from its first byte or the connection's beginning on.
        body: for its body.
        reading: without reading anything of an answer that waits for them.
        connections: further ones are answered with 503.
        refused: further ones beyond these are not answered at all.
    """

    head: float = 20.0
    body: float = 120.0
    reading: float = 60.0
    connections: int = MOST_CONNECTIONS
    refused: int = MOST_ACCEPTED


def patience_for(files: int) -> Patience:
    """Limits with which connections leave half of the files that this process may still open unused.

    Raises:
        ValueError: if these are too few.
    """
    if files < FEWEST_FILES:
        raise ValueError(f"only {files} more files may be open in this process; raise the limit (ulimit -n)")
    return Patience(connections=min(MOST_CONNECTIONS, files // 2), refused=max(1, min(MOST_ACCEPTED, files // 32)))


def files_left() -> int:
    """How many more files and connections this process may open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:
        return most - len(list(Path("/dev/fd").iterdir()))
    return 1 << 20


class Connection(H11Protocol):
    """One client's connection; `full` answers those that are too many."""

    def __init__(self, *arguments: Any, patience: Patience, full: ASGIApp, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.patience = patience
        self._full = full
        self._arrival: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes of answers, when the client was last looked at
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.patience.connections + self.patience.refused:
            transport.abort()
            return
        if len(self.connections) > self.patience.connections:
            self.app = self._full
        self._expect(self.patience.head)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect(None)
        self._unset_keepalive_if_required()
        self._stop_watching()

    def data_received(self, data: bytes) -> None:
        before = self.conn.their_state
        if before is h11.IDLE and not self.conn.trailing_data[0]:
            self._expect(self.patience.head)
        super().data_received(data)
        after = self.conn.their_state
        if after is h11.SEND_BODY and before is not h11.SEND_BODY:
            self._expect(self.patience.body)
        elif after not in (h11.IDLE, h11.SEND_BODY):
            self._expect(None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:  # a part of the next request
            self._unset_keepalive_if_required()
            self._expect(self.patience.head)
        self._watch_reading()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()  # it has read, and more will be written behind that

    def _expect(self, seconds: float | None) -> None:
        """Give up if what the client is sending has not arrived by then; None if it has."""
        if self._arrival is not None:
            self._arrival.cancel()
        self._arrival = None if seconds is None else self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        if self.transport.is_closing():
            return
        begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        answering = self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_started
        if begun and not answering:
            body = json.dumps(ApiError(408, "the request did not arrive in time", code="timeout").body()).encode()
            head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
            self.transport.write(f"HTTP/1.1 408 Request Timeout\r\n{head}\r\n\r\n".encode() + body)
        self.transport.close()
        self._watch_reading()

    def _watch_reading(self) -> None:
        """Look after the client from now on, until it has read all that there is."""
        if self._reading is None and self.transport.get_write_buffer_size():
            self._unread = self.transport.get_write_buffer_size()
            self._reading = self.loop.call_later(self.patience.reading, self._look_at_reading)

    def _stop_watching(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _look_at_reading(self) -> None:
        self._reading = None
        if self.transport.get_write_buffer_size() >= self._unread:
            self.transport.abort()
        else:
            self._watch_reading()


async def full(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers those beyond the number of connections that there may be."""
    headers = {"Connection": "close"} | RETRY_SOON
    error = ApiError(503, "too many clients are connected; try again later", None, "too_many_connections", headers)
    await error.response()(scope, receive, send)


class Quiet(logging.Filter):
    """Lets each line through once a minute, and says how often it was not; a defect's traceback always."""

    def __init__(self) -> None:
        super().__init__()
        self._since: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write it."""
        line = record.getMessage().partition("\n")[0]
        defect = record.exc_info and not line.startswith("socket.accept()")  # which clients can cause
        if defect or line.startswith("Exception in ASGI"):
            return True
        now = time.monotonic()
        if now - self._since.get(line, -LOG_SECONDS) < LOG_SECONDS:
            self._held[line] = self._held.get(line, 0) + 1
            return False
        self._since[line] = now
        if held := self._held.pop(line, 0):
            line += f" (and {held} times since it was last said)"
        record.msg = line
        record.args = None
        record.exc_info = None
        record.exc_text = None
        return True


def quieten() -> None:
    """Have clients' mistakes, and what many of them cause, said once in a while only."""
    quiet = Quiet()
    for name in ("uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        for old in [each for each in logger.filters if isinstance(each, Quiet)]:
            logger.removeFilter(old)
        logger.addFilter(quiet)
