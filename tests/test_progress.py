"""Progress where there is no terminal."""

from __future__ import annotations

import io
import sys
import time

import pytest

from surgeon import progress as progress_module
from surgeon.progress import TimeOver, progress, require_time, time_limit


def test_plain_lines_with_an_estimate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 12.0, 30.0, 90.0])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(clock))
    with progress("scan", 100, "sublayers", done=40) as advance:
        advance(1)  # after a second: too early for a line
        advance(11)
        advance(18)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "scan:  52% of 100 sublayers, 0:48 left",
        "scan:  70% of 100 sublayers, 0:30 left",
        "scan: done, 1:30",
    ]


def test_never_more_than_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 20.0, 21.0])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(clock))
    with progress("scan", 10, "sublayers", done=5) as advance:
        advance(7)
    assert capsys.readouterr().err.splitlines()[0] == "scan: 100% of 10 sublayers, 0:00 left"


def test_a_failure_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), progress("scan", 1, "sublayers"):
        raise KeyboardInterrupt
    assert "done" not in capsys.readouterr().err


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("scan", 10, "sublayers", done=5) as advance:
        advance(5)
    assert "100%" in terminal.getvalue()
    assert "left:" in terminal.getvalue()


def test_a_time_limit_ends_work_at_its_first_step_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[int] = []

    def work() -> None:
        with time_limit(60), time_limit(0.05), progress("scan", 100, "sublayers") as advance:
            for step in range(100):
                steps.append(step)
                time.sleep(0.02)
                advance(1)

    with pytest.raises(TimeOver):
        work()
    assert 1 <= len(steps) < 20
    require_time()  # the limit holds no longer
    with time_limit(60), progress("scan", 1, "sublayers") as advance:
        advance(1)
    assert "scan: done" in capsys.readouterr().err
