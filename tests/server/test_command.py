"""The command's help, and what it says before it needs a model."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from surgeon.commands.app import main
from surgeon.server.run import bind
from tests.server.servers import Server
from tests.waiting import PATIENCE, wait_until


def test_help_names_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for option in (
        "--tp",
        "--host",
        "--port",
        "--api-key",
        "--cors-origin",
        "--served-model-name",
        "--max-batch",
        "--max-waiting",
        "--max-tokens",
        "--blocks",
        "--memory",
        "--program",
        "--device",
        "--collectives",
        "--link-delay",
        "--link-bandwidth",
        "--compress",
    ):
        assert option in text
    assert "SURGEON_API_KEY" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["no-such-folder"], "error: there is no model folder no-such-folder"),
        (["demo", "--api-key", " "], "error: the API key is empty"),
        (
            ["demo", "--cors-origin", "localhost:3000"],
            "error: 'localhost:3000' is no origin of web pages",
        ),
        (["demo", "--memory", "much"], "error: 'much' is no amount of memory"),
        (["demo", "--link-delay", "1"], "error: '1' is no delay"),
        (["demo", "--link-bandwidth", "much"], "error: 'much' is no amount of memory"),
        (
            ["demo", "--host", "no.such.host.invalid"],
            "error: there is no address 'no.such.host.invalid'",
        ),
    ],
    ids=str,
)
def test_wrong_options(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 1
    assert capsys.readouterr().err.startswith(line)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a server says that cannot begin; it is one line, and nothing was loaded for it."""
    capsys.readouterr()  # what making the model has written
    assert main(["serve", *arguments]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0].removeprefix("error: ")


def test_a_taken_port(chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refusal(capsys, str(chat_model), "--port", port)
    assert (
        line
        == f"port {port} of 127.0.0.1 is in use by another program; choose another port (0 takes any)"
    )


def test_a_port_is_taken_before_anybody_answers() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 is in use by another program"):
            bind("127.0.0.1", port)
        socket.create_connection(("127.0.0.1", port)).close()
    bind("127.0.0.1", port).close()


def test_of_two_servers_that_start_at_once_one_gives_way(chat_model: Path) -> None:
    """And a client that comes before the model is there waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    both = [Server(str(chat_model), "--port", str(port)) for _ in range(2)]
    try:
        with connect_when_possible(port) as early:
            early.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert early.recv(15) == b"HTTP/1.1 200 OK"
        wait_until(lambda: any(server.process.poll() is not None for server in both))
        loser, winner = sorted(both, key=lambda server: server.process.poll() is None)
        assert loser.wait_until_ended() == 1
        message = (
            f"port {port} of 127.0.0.1 is in use by another program; choose another port (0 takes any)"
        )
        assert loser.lines == [f"error: {message}"]
        assert winner.process.poll() is None
    finally:
        for server in both:
            server.close()


def connect_when_possible(port: int) -> socket.socket:
    connections: list[socket.socket] = []

    def connects() -> bool:
        with suppress(ConnectionRefusedError):
            connections.append(socket.create_connection(("127.0.0.1", port), PATIENCE))
        return bool(connections)

    wait_until(connects)
    return connections[0]


def test_a_link_and_compression(chat_model: Path) -> None:
    from tests.server.servers import serving

    options = ["--link-delay", "10ms", "--link-bandwidth", "1GB", "--compress", "int8"]
    with serving(str(chat_model), "--tp", "2", *options) as server:
        began = time.monotonic()
        answer = server.post(
            "/v1/completions", prompt="The quick", max_tokens=5, temperature=0, ignore_eos=True
        )
        # Five passes of eight steps, the embedding and the head.
        assert time.monotonic() - began > 5 * 10 * 0.010
        assert answer.json()["usage"]["completion_tokens"] == 5


def test_what_ranks_cannot_run(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised = Path(shutil.copytree(chat_model, tmp_path / "quantised"))
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq"}})
    )
    assert "has bits None, and it has to be a whole number" in refusal(
        capsys, str(quantised), "--port", "0"
    )
    assert refusal(capsys, str(chat_model), "--port", "0", "--tp", "100").startswith(
        "100 ranks cannot share this model"
    )
    assert "200 KB" in refusal(capsys, str(chat_model), "--port", "0", "--memory", "200KB")
    assert "collectives none" in refusal(capsys, str(chat_model), "--port", "0", "--collectives", "none")
    assert "no compression 'int7'" in refusal(
        capsys, str(chat_model), "--port", "0", "--tp", "2", "--compress", "int7"
    )
    line = refusal(capsys, str(chat_model), "--port", "0", "--program", "A0 F0 A9")
    assert "A9" in line or "layer 9" in line


def test_a_missing_extra_names_the_command_that_installs_it() -> None:
    script = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from surgeon.commands.app import main; raise SystemExit(main(['serve', 'demo']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "error: serving needs fastapi, which is not installed; run: pip install 'surgeon[serve]'"
    )
