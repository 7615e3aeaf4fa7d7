"""scripts/load/server.py: a server finds the modules that the script has found."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from scripts.load.server import free_port, serving

CARRIED = """
import http.server, sys
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def test_a_server_finds_what_lies_elsewhere_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As packages do that are carried to a machine and named in PYTHONPATH."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "carried.py").write_text(CARRIED)
    (tmp_path / "health").write_text("well")
    monkeypatch.syspath_prepend(modules)
    monkeypatch.chdir(tmp_path)
    port = free_port()
    command = [sys.executable, "-c", "import carried", port]
    with serving(command, port, tmp_path / "log") as url, urlopen(f"{url}/health") as answer:
        assert answer.read() == b"well"
