"""Fixtures that run commands as a user does, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from surgeon.commands.app import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def surgeon_says(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line; returns exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([*map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def on_tiny_text(surgeon_says: Run, tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> Run:
    """Runs a command that measures, on a tiny model and text unless others are given, into a folder of the test's."""

    def run(
        command: str, *arguments: object, folder: str = "out", model: object = None, data: object = None
    ) -> tuple[int, str, str]:
        what = (model or tiny_checkpoint, "--data", data or tiny_text, "-o", tmp_path / folder)
        return surgeon_says(command, *what, *arguments)

    return run
