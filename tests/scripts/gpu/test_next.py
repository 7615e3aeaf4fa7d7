"""scripts/gpu/next: which rows run, and run again, with a Python made of shell that notes what it is asked for."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.waiting import PATIENCE, wait_until

NEXT = Path(__file__).resolve().parents[3] / "scripts" / "gpu" / "next"
STAND_IN = """#!/bin/sh
case "$*" in
    *print\\(*) echo A0 F0; exit ;;
    "$FAILS"*) echo "$SAYS"; $LEAVES; exit $STATUS ;;
esac
"""
ROWS = "check large overlap calibrate predict bench papers-lp papers-ladder papers-deinfer papers-pt explore drafts"
ROWS += " load-float32 load-256 load-64 load-16 load-1 heal deepspeed liger random quantised compare"
ROWS += " calibrate-2 bench-2 scan-1 scan-2 heal-2 papers-racks"


def started(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    usual = {"MODEL": "demo", "FAILS": "nothing", "SAYS": "", "LEAVES": ":", "STATUS": "0"}
    return subprocess.Popen(
        ["env", "--default-signal=INT", str(NEXT), "--small", "-o", str(folder / "out"), *arguments],
        env=os.environ | usual | {"PYTHON": str(stand_in)} | environment,
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def begun(folder: Path, *arguments: str, **environment: str) -> list[str]:
    """The rows that a call begins."""
    process = started(folder, *arguments, **environment)
    lines = process.communicate(timeout=PATIENCE)[0].splitlines()
    assert process.returncode == 0
    return [line.split()[1].rstrip(":") for line in lines if line.startswith("== ")]


def processes_of(script: subprocess.Popen[str]) -> list[int]:
    """Those that a script's rows have started, and that are there."""
    mark = f"SURGEON_GPU_ROW={script.pid}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def test_rows_run_once_and_named_ones_again(tmp_path: Path) -> None:
    assert begun(tmp_path) == ROWS.split()
    assert {path.stem for path in (tmp_path / "out").glob("*.ended")} == {*ROWS.split()}
    assert begun(tmp_path) == []
    assert begun(tmp_path, "bench", "heal") == ["bench", "heal"]


def test_what_ends_wrong_has_ended(tmp_path: Path) -> None:
    assert begun(tmp_path, FAILS="-m surgeon.commands bench", STATUS="3") == ROWS.split()
    assert (tmp_path / "out" / "bench.ended").read_text() == "3\n"
    assert (tmp_path / "out" / "predict.ended").read_text() == "0\n"


def test_a_row_that_is_cut_runs_again(tmp_path: Path) -> None:
    """As `timeout` cuts it, and where it says so itself."""
    begun(tmp_path, FAILS="-m surgeon.commands predict", STATUS="124")
    assert begun(tmp_path, FAILS="-m surgeon.commands predict") == ["predict"]
    begun(
        tmp_path,
        "compare",
        FAILS="scripts/real/compare.py",
        SAYS="the time is over; the same command goes on",
    )
    assert begun(tmp_path) == ["compare"]


def test_no_row_begins_when_the_time_is_over(tmp_path: Path) -> None:
    assert begun(tmp_path, "--seconds", "20") == []


def test_rows_that_the_first_one_had_no_time_for_follow_it(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "check.txt").write_text("heal, two steps    not run: the time was over\n")
    assert begun(tmp_path)[:4] == ["check", "speeds", "commands", "large"]


BESIDE = "setsid sleep 1000"  # as servers have a session of their own


def test_what_a_row_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """It would hold the GPU, and the row's output."""
    (tmp_path / "leave").write_text(f"#!/bin/sh\n{BESIDE} &\n")
    (tmp_path / "leave").chmod(0o755)
    script = started(
        tmp_path, "predict", FAILS="-m surgeon.commands predict", LEAVES=str(tmp_path / "leave")
    )
    script.communicate(timeout=PATIENCE)
    assert script.returncode == 0
    assert (tmp_path / "out" / "predict.ended").read_text() == "0\n"
    assert processes_of(script) == []


@pytest.mark.parametrize("signalled", [signal.SIGINT, signal.SIGTERM])
def test_ended_it_ends_what_it_runs(tmp_path: Path, signalled: signal.Signals) -> None:
    script = started(tmp_path, "predict", FAILS="-m surgeon.commands predict", LEAVES=BESIDE)
    wait_until(lambda: (tmp_path / "out" / "predict.log").exists() and len(processes_of(script)) > 2)
    script.send_signal(signalled)
    script.communicate(timeout=PATIENCE)
    assert script.returncode == 130
    assert processes_of(script) == []
    assert not (tmp_path / "out" / "predict.ended").exists()  # it is a row for the next call
