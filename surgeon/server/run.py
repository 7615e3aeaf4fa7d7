"""The server's process: its port, its signals, and how it ends.

It goes on until SIGTERM, which lets running requests finish, or until a rank fails, or SIGINT or a second SIGTERM,
which end it at once.
"""

from __future__ import annotations

import errno
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn

from surgeon.server.app import make_app
from surgeon.server.connections import QUEUE, Connection, files_left, full, patience_for, quieten
from surgeon.server.gate import with_browsers
from surgeon.server.state import ServerState
from surgeon.words import plural

KEEP_ALIVE_SECONDS = 30  # that a connection may be idle between requests
WRITE_SECONDS = 10  # for clients to read their answers to the end, once all are computed
FAILED_SECONDS = 3  # the same after a failure; their answers are errors


def bind(host: str, port: int) -> socket.socket:
    """Take a port and listen to it, so that nobody else can have it, however long the model takes to load.

    Clients that come before `run` does are answered by it.

    Args:
        port: 0 takes any that is free.

    Raises:
        ValueError: if the port is taken, or may not be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(f"there is no address {host!r} on this machine ({error}); choose another host") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        # Two sockets can be bound to a port that may be used again after a server's end; only one can listen to it.
        bound.listen()
    except OSError as error:
        bound.close()
        why = f"cannot be taken: {error.strerror}; choose another host or port"
        if error.errno == errno.EADDRINUSE:
            why = "is in use by another program; choose another port (0 takes any)"
        if error.errno == errno.EACCES:
            why = "may not be taken by this user; choose a port above 1023"
        raise ValueError(f"port {port} of {host} {why}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Where clients find the API."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


class _Server(uvicorn.Server):
    """uvicorn's, with surgeon's ways of ending."""

    def __init__(self, config: uvicorn.Config, state: ServerState, started: Callable[[], None]) -> None:
        super().__init__(config)
        self.state = state
        self.announce = started
        self.killed_by: int | None = None
        self._drained = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(QUEUE)  # the configuration's number is also how many are accepted at a time
        self.announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for every SIGTERM and SIGINT."""
        del frame
        if sig == signal.SIGTERM and not self.state.draining:
            self.state.draining = True
            threading.Thread(target=self._drain, daemon=True).start()
            return
        self.killed_by = sig
        self.should_exit = self.force_exit = True
        self._wait_at_most(0)

    def _drain(self) -> None:
        stats = self.state.service.stats()
        open_now = stats.running + stats.waiting
        first = f"; {plural(open_now, 'open request')} first" if open_now else ""
        print(f"ending{first}", file=sys.stderr, flush=True)
        with suppress(ValueError, OSError):  # a failure of the service, which is looked at in any case
            self.state.service.drain()
        self._drained.set()

    def _wait_at_most(self, seconds: int) -> None:
        """When the server shuts down, for answers that are being written."""
        self.config.timeout_graceful_shutdown = seconds
        if not seconds:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)  # what is cut off is meant to be

    async def on_tick(self, counter: int) -> bool:
        if self.state.service.failure is not None:
            self._wait_at_most(FAILED_SECONDS)
            self.should_exit = True
        elif self._drained.is_set():
            self.should_exit = True
        return await super().on_tick(counter)


def run(state: ServerState, bound: socket.socket, started: Callable[[], None]) -> None:
    """Answer requests until the process is told to end.

    Args:
        bound: from `bind`.
        started: called when the first request can be answered.

    Raises:
        ValueError: if this process may open too few files.
        RankFailed: if a rank has failed.
        KeyboardInterrupt: at SIGINT.
        InterruptedError: at a second SIGTERM.
    """
    patience = patience_for(files_left())
    quieten()
    config = uvicorn.Config(
        make_app(state),
        http=partial(Connection, patience=patience, full=with_browsers(full, state.origins)),  # type: ignore[arg-type]
        backlog=patience.refused,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=WRITE_SECONDS,
    )
    server = _Server(config, state, started)
    server.run(sockets=[bound])
    if state.service.failure is not None:
        raise state.service.failure
    if server.killed_by == signal.SIGINT:
        raise KeyboardInterrupt
    if server.killed_by is not None:
        raise InterruptedError("ended by a second SIGTERM; requests that were running are lost")
