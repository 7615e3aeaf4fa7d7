"""`surgeon serve` as a process of its own, for run.py."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

COMMAND = [
    sys.executable,
    "-c",
    "from surgeon.commands.app import main; raise SystemExit(main())",
    "serve",
]
COMPLETIONS = "/v1/completions"
LONGEST_SECONDS = 300


class Server:
    """`surgeon serve` as a process; `lines` is what it has written."""

    def __init__(self, options: argparse.Namespace, *more: str) -> None:
        command = [*COMMAND, options.model, "--tp", str(options.tp), "--port", "0", *more]
        if options.program:
            command += ["--program", options.program]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url = ""
        ready = threading.Event()
        threading.Thread(target=self._read, args=(ready,), daemon=True).start()
        if not ready.wait(LONGEST_SECONDS) or not self.url:
            self.process.kill()
            raise SystemExit("the server did not begin:\n" + "\n".join(self.lines))

    def _read(self, ready: threading.Event) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := re.match(r"serving .* at (http://.*)/v1", line):
                self.url = found[1]
                ready.set()
        ready.set()

    def metrics(self) -> dict[str, float]:
        text = httpx2.get(f"{self.url}/metrics", timeout=60).text
        pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}


@contextmanager
def serving(options: argparse.Namespace, *more: str) -> Iterator[Server]:
    server = Server(options, *more)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
