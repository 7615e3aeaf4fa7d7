"""Servers as processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

PROJECT = Path(__file__).resolve().parents[2]
SURGEON = [sys.executable, "-m", "surgeon.commands", "serve"]
READY_SECONDS = 900


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def serving(
    command: Sequence[object], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A server's address, once it answers; it and all that it has started have ended afterwards.

    Args:
        environment: in place of this process's own, in which the same modules are found.

    Raises:
        SystemExit: if it ends before, or takes longer than a quarter of an hour.
    """
    environment = environment or os.environ | {"PYTHONPATH": ":".join(sys.path)}
    with log.open("w") as written:
        process = subprocess.Popen(
            [*map(str, command)],
            env=environment,
            stdout=written,
            stderr=written,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # the session that was started for it
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    begun = time.monotonic()
    while process.poll() is None and time.monotonic() - begun < READY_SECONDS:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(
        f"the server did not begin (exit status {process.poll()}):\n{log.read_text()[-3000:]}"
    )
