"""The server's process: its port, its signals, and its end.

SIGTERM lets running requests finish; SIGINT, a second SIGTERM or a rank that fails end it at once.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from surgeon.server.answers import respond
from surgeon.server.bodies import ApiError, ChatBody, CompletionBody, Json, explain
from surgeon.server.state import (
    MOST_BYTES,
    TOO_LARGE,
    ServerState,
    count_answers,
    guard_app,
    with_browsers,
)
from surgeon.version import __version__
from surgeon.words import plural


def make_app(state: ServerState) -> ASGIApp:
    """The application that answers for a server."""
    app = FastAPI(
        title="surgeon", version=__version__, docs_url=None, redoc_url=None, max_body_size=MOST_BYTES
    )  # the pages of documentation would fetch scripts from elsewhere; /openapi.json is there

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await respond(request, state, body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await respond(request, state, body)

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [state.card()]}

    @app.head("/v1/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        state.check_model(name)
        return state.card()

    @app.head("/health", response_model=None, include_in_schema=False)
    @app.get("/health", response_model=None)
    async def health() -> Response:
        if state.service.failure is not None:
            return JSONResponse({"status": "failed", "reason": str(state.service.failure)}, 503)
        if state.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    @app.head("/metrics", response_model=None, include_in_schema=False)
    @app.get("/metrics", response_model=None)
    def metrics() -> Response:  # in a thread: the ranks may be asked
        return Response(generate_latest(state.meters.registry), media_type=CONTENT_TYPE_LATEST)

    _add_errors(app)
    return count_answers(with_browsers(guard_app(app, state), state.origins), state)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid_body(_: Request, error: RequestValidationError) -> Response:
        return explain(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        """Errors of the framework: unknown paths, wrong methods, bodies that are too large or no text."""
        path = request.url.path
        status = error.status_code
        words = {
            400: "the body is no JSON that can be read: it is no UTF-8, is nested too deeply, or has a number too long",
            404: f"there is no {path} here",
            405: f"{path} does not take {request.method}",
            413: TOO_LARGE,
        }
        refused = ApiError(status, words.get(status, str(error.detail)), headers=error.headers)
        return refused.response()

    @app.exception_handler(Exception)
    async def defect(_: Request, error: Exception) -> Response:
        del error  # uvicorn writes its traceback to standard error, and the client need not know it
        return ApiError(500, "internal error; the server's log has the details").response()


MOST_CONNECTIONS = 1000
MOST_ACCEPTED = 128  # at a time, before any of them can be refused
QUEUE = 1024  # connections that the kernel holds until they are accepted
FEWEST_FILES = 16


def connections_for(files: int) -> tuple[int, int]:
    """Count the connections that are answered, and accepted at a time, so that half of so many files stay unused.

    Args:
        files: that this process may still open.
    """
    if files < FEWEST_FILES:
        raise ValueError(
            f"only {files} more files may be open in this process; raise the limit (ulimit -n)"
        )
    return min(MOST_CONNECTIONS, files // 2), max(1, min(MOST_ACCEPTED, files // 32))


def files_left() -> int:
    """Count the files and connections that this process may still open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:
        return most - len(list(Path("/dev/fd").iterdir()))
    return 1 << 20


class Connection(H11Protocol):
    """One client's connection, with a time limit for requests, which uvicorn has not.

    Attributes:
        head_seconds, body_seconds: that a request's head and body may take to arrive.
    """

    head_seconds = 20.0
    body_seconds = 120.0
    _arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        assert self.limit_concurrency is not None
        # uvicorn answers one less than its limit, and refuses further ones in words: as many as it accepts at a time.
        if len(self.connections) >= self.limit_concurrency + self.config.backlog:
            transport.abort()
            return
        self._expect(self.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect(None)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        before = self.conn.their_state
        if before is h11.IDLE and not self.conn.trailing_data[0]:
            self._expect(self.head_seconds)
        super().data_received(data)
        after = self.conn.their_state
        if after is h11.SEND_BODY and before is not h11.SEND_BODY:
            self._expect(self.body_seconds)
        elif after not in (h11.IDLE, h11.SEND_BODY):
            self._expect(None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A part of the next request.
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._unset_keepalive_if_required()
            self._expect(self.head_seconds)

    def _expect(self, seconds: float | None) -> None:
        """Give up if the client's data has not arrived by then; None if it has."""
        if self._arrival is not None:
            self._arrival.cancel()
        self._arrival = None if seconds is None else self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        if self.transport.is_closing():
            return
        begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        answering = (
            self.conn.their_state is h11.SEND_BODY
            and self.cycle is not None
            and self.cycle.response_started
        )
        if begun and not answering:
            body = json.dumps(
                ApiError(408, "the request did not arrive in time", code="timeout").body()
            ).encode()
            head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
            self.transport.write(f"HTTP/1.1 408 Request Timeout\r\n{head}\r\n\r\n".encode() + body)
        self.transport.close()


KEEP_ALIVE_SECONDS = 30  # that a connection may be idle between requests
WRITE_SECONDS = 10  # for clients to read their answers to the end, once all are computed
FAILED_SECONDS = 3  # the same after a failure; their answers are errors


def bind(host: str, port: int) -> socket.socket:
    """Take a port (0: any) and listen to it; clients that come before `run` are answered when the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(
            f"there is no address {host!r} on this machine ({error}); choose another host"
        ) from error
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
    """Return the API's address for clients."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


class _Server(uvicorn.Server):
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
        """Limit the wait for answers that are being written at the end."""
        self.config.timeout_graceful_shutdown = seconds
        if not seconds:
            # Connections are cut off on purpose here.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)

    async def on_tick(self, counter: int) -> bool:
        if self.state.service.failure is not None:
            self._wait_at_most(FAILED_SECONDS)
            self.should_exit = True
        elif self._drained.is_set():
            self.should_exit = True
        return await super().on_tick(counter)


def run(state: ServerState, bound: socket.socket, started: Callable[[], None]) -> None:
    """Answer requests at a bound port until the process is told to end."""
    connections, accepted = connections_for(files_left())
    config = uvicorn.Config(
        make_app(state),
        http=Connection,
        backlog=accepted,
        limit_concurrency=connections + 1,
        log_level="error",  # clients' mistakes are theirs to know of
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
