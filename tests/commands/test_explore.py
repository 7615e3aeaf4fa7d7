"""`surgeon explore` as a user meets it, before anything is measured and after all is."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest

from surgeon.commands.explore import _opened
from tests.commands.conftest import Run


def test_it_is_the_first_command_and_begins_with_a_text(
    surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    _, out, _ = surgeon_says("--help")
    first = out.partition("Commands:")[2].split()[0]
    assert first == "explore"
    code, out, err = surgeon_says(first, tiny_checkpoint, "-o", tmp_path / "out")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: no text was given to explore {tiny_checkpoint} on; give one of the kind")
    assert not (tmp_path / "out").exists()


def test_no_browser_takes_the_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: not shown.append(address))
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    page = tmp_path / "a page.html"
    assert not _opened(page)
    assert shown == []
    monkeypatch.setenv("DISPLAY", ":0")
    assert _opened(page)
    assert shown == [page.as_uri()]
