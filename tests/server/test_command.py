"""The command's help, and what it says before it needs a model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from surgeon.cli.app import main


def test_help_names_every_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for option in (
        "--tp",
        "--host",
        "--port",
        "--api-key",
        "--served-model-name",
        "--max-batch",
        "--max-waiting",
        "--max-tokens",
        "--blocks",
        "--memory",
        "--program",
        "--device",
        "--collectives",
    ):
        assert option in text
    assert "SURGEON_API_KEY" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["no-such-folder"], "error: there is no model folder no-such-folder"),
        (["demo", "--api-key", " "], "error: the API key is empty"),
        (["demo", "--memory", "much"], "error: 'much' is no amount of memory"),
        (["demo", "--host", "no.such.host.invalid"], "error: there is no address 'no.such.host.invalid'"),
    ],
    ids=str,
)
def test_wrong_options(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 1
    assert capsys.readouterr().err.startswith(line)


def test_a_missing_extra_names_the_command_that_installs_it() -> None:
    script = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from surgeon.cli.app import main; raise SystemExit(main(['serve', 'demo']))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "error: serving needs fastapi, which is not installed; run: pip install 'surgeon[serve]'"
    )
