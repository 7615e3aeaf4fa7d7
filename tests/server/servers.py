"""Servers as users start them: a process of their own, on a free port."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests import warm
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [
    sys.executable,
    "-c",
    "from surgeon.commands.app import main; raise SystemExit(main())",
    "serve",
]


class Server:
    """`surgeon serve` as a process; a cold one begins as a user's does (tests/warm.py).

    Attributes:
        url: where it answers, once it does.
        lines: what it has written to standard error.
    """

    def __init__(self, *arguments: str, key: str | None = None, cold: bool = False) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("SURGEON_API_KEY", None)
        if key is not None:
            environment["SURGEON_API_KEY"] = key
        start = subprocess.Popen if cold else warm.Popen
        self.process = start(
            [*COMMAND, *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            self._lines.put(line)
        self._lines.put(None)

    def wait_until_serving(self) -> Server:
        """Raises AssertionError with what it wrote if it ends first."""
        while not self.url:
            line = self._lines.get(timeout=PATIENCE)
            assert line is not None, "\n".join(self.lines)
            if line.startswith("serving "):
                self.url = line.split()[3].removesuffix("/v1")
        return self

    def wait_until_ended(self) -> int:
        """The exit code."""
        code = self.process.wait(PATIENCE)
        while self._lines.get(timeout=PATIENCE) is not None:
            pass
        return code

    def ranks(self) -> list[psutil.Process]:
        """The processes of its ranks, by rank."""
        return warm.ranks_of(self.process.pid)

    def send(self, sig: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(sig)

    def close(self) -> None:
        """End it, however it is."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send a request."""
        return httpx2.request(method, f"{self.url}{path}", timeout=PATIENCE, **options)

    def post(self, path: str, **fields: Any) -> httpx2.Response:
        """Send a request with a JSON body."""
        return self.ask("POST", path, json=fields)

    def open_request(self, path: str, fields: dict[str, Any]) -> socket.socket:
        """Send a request and leave the answer to come; closing the connection is going away."""
        body = json.dumps(fields).encode()
        host, _, port = self.url.removeprefix("http://").partition(":")
        connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        return connection

    def metrics(self) -> dict[str, float]:
        """What /metrics shows, by name and labels."""
        text = self.ask("GET", "/metrics").text
        pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def wait_for(self, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """The first metrics of which something is true."""
        end = time.monotonic() + PATIENCE
        while not condition(found := self.metrics()):
            assert time.monotonic() < end, found
            time.sleep(0.02)
        return found


@contextmanager
def serving(*arguments: str, key: str | None = None, cold: bool = False) -> Iterator[Server]:
    """A server that answers; killed at the end if it still runs."""
    server = Server(*arguments, "--port", "0", key=key, cold=cold)
    try:
        yield server.wait_until_serving()
    finally:
        server.close()
