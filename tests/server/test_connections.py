"""Clients that hold connections: requests that never arrive, answers nobody reads, and too many of them."""

from __future__ import annotations

import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import uvicorn

from surgeon.server.browsers import with_browsers
from surgeon.server.connections import Connection, Patience, Quiet, files_left, full, patience_for
from tests.server.servers import Server
from tests.waiting import wait_until

SHORT = Patience(head=0.3, body=0.6, reading=0.3, connections=4, refused=3)
GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\n"
LARGE = 64 << 20


class App:
    """Answers with the request's body, or with far more than fits into the buffers on the way."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            body, more = b"", True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body, more = body + message["body"], message["more_body"]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(64 if scope["path"] == "/large" else 0):
                await send({"type": "http.response.body", "body": bytes(LARGE // 64), "more_body": True})
            await send({"type": "http.response.body", "body": body})
        finally:
            self.ended.set()


@contextmanager
def running(app: App, patience: Patience, refusing: Any = full) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        config = uvicorn.Config(
            app,
            http=partial(Connection, patience=patience, full=refusing),  # type: ignore[arg-type]
            lifespan="off",
            log_config=None,
            timeout_keep_alive=1,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield bound.getsockname()
        finally:
            server.should_exit = True
            thread.join(10)


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def address(app: App) -> Iterator[tuple[str, int]]:
    with running(app, SHORT) as found:
        yield found


def answer(connection: socket.socket) -> tuple[bytes, float]:
    """All that comes until the server closes the connection, and when it does."""
    began, found = time.monotonic(), b""
    connection.settimeout(5)
    while part := connection.recv(1 << 16):
        found += part
    return found, time.monotonic() - began


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", b""),
        (GET[:-2], b"HTTP/1.1 408 "),
        (POST + b"abc", b"HTTP/1.1 408 "),
        (GET, b"HTTP/1.1 200 "),
        (GET + GET[:9], b"HTTP/1.1 200 "),
    ],
    ids=["nothing", "half a head", "half a body", "idle after", "half a second one"],
)
def test_what_does_not_arrive_is_not_waited_for(sent: bytes, expected: bytes, address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        found, seconds = answer(connection)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)
    assert 0.2 < seconds < 3
    assert (b"did not arrive in time" in found) == (b"408" in found)


def test_trickling_does_not_help_and_slow_bodies_have_their_own_time(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.settimeout(0.04)
        found = b""
        for byte in GET:
            connection.sendall(bytes([byte]))
            with suppress(TimeoutError):
                found = connection.recv(99)
            if found:
                break
    assert found.startswith(b"HTTP/1.1 408 ")
    with socket.create_connection(address) as connection:
        connection.sendall(POST)
        time.sleep(0.45)
        connection.sendall(b"hello")
        connection.settimeout(5)
        assert connection.recv(9999).startswith(b"HTTP/1.1 200 ")


def test_who_does_not_read_is_cut_off(app: App, address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: here\r\n\r\n")
        assert not app.ended.wait(0.2)
        assert app.ended.wait(3)


def test_who_reads_slowly_is_not(app: App) -> None:
    with running(app, replace(SHORT, reading=1.0)) as address, socket.create_connection(address) as connection:
        connection.settimeout(5)
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        read, last = 0, time.monotonic()
        while part := connection.recv(1 << 22):
            read += len(part)
            if time.monotonic() - last < 2.5:  # longer than it may take without reading
                time.sleep(0.05)
    assert read > LARGE


def test_too_many_are_told_and_far_too_many_are_not(app: App) -> None:
    patient = replace(SHORT, head=60.0)  # so that none of them is closed for anything else
    with running(app, patient) as address, ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(address)) for _ in range(4)]
        time.sleep(0.05)
        with socket.create_connection(address) as further:
            further.sendall(GET)
            found, _ = answer(further)
        assert found.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_connections" in found
        more = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        time.sleep(0.05)
        with socket.create_connection(address) as one_more:
            one_more.settimeout(5)
            with suppress(ConnectionResetError):
                assert one_more.recv(9) == b""
        for one in (*held, *more):
            one.close()
        wait_until(lambda: is_served(address))


def test_a_web_page_may_read_that_there_are_too_many(app: App) -> None:
    page = "http://localhost:3000"
    patient = replace(SHORT, head=60.0)
    with running(app, patient, with_browsers(full, (page,))) as address, ExitStack() as stack:
        for _ in range(SHORT.connections):
            stack.enter_context(socket.create_connection(address))
        time.sleep(0.05)
        told = httpx2.get(f"http://{address[0]}:{address[1]}/", headers={"Origin": page})
    assert (told.status_code, told.headers["access-control-allow-origin"]) == (503, page)


def is_served(address: tuple[str, int]) -> bool:
    """Whether a further client gets an answer of the application's."""
    with suppress(ConnectionResetError), socket.create_connection(address) as connection:
        connection.settimeout(5)
        connection.sendall(GET)
        return connection.recv(99).startswith(b"HTTP/1.1 200 ")
    return False


def test_a_flood_leaves_the_server_whole(chat_model: Path) -> None:
    """It may open 128 files; its log stays short, and once the flood is over it answers."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
    try:
        server = Server(str(chat_model), "--port", "0", cold=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
    try:
        server.wait_until_serving()
        host, _, port = server.url.removeprefix("http://").partition(":")
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            time.sleep(0.3)
            assert psutil.Process(server.process.pid).num_fds() < 110
        assert httpx2.get(f"{server.url}/health", timeout=10).status_code == 200
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200
        assert len(server.lines) == 2  # where it serves, and how many texts fit
    finally:
        server.close()


def test_limits_leave_files_over() -> None:
    for files in (16, 100, 1000, 1 << 20):
        found = patience_for(files)
        assert found.connections + 8 * found.refused <= files
    with pytest.raises(ValueError, match=r"only 9 more files .* \(ulimit -n\)"):
        patience_for(9)
    assert 0 < files_left() < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_line_is_said_once_and_defects_always(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    quiet, said = Quiet(), []
    lines = ["Invalid request"] * 50 + ["Exception in ASGI application\n"] * 2
    for second, line in enumerate([*lines, "Invalid request"]):
        now[0] += second == 52 and 61
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, line, None, None)
        if quiet.filter(record):
            said.append(record.getMessage().strip())
    assert said == [
        "Invalid request",
        *["Exception in ASGI application"] * 2,
        "Invalid request (and 49 times since it was last said)",
    ]
