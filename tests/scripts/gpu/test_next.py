"""scripts/gpu/next: which rows run, and run again, with a Python made of shell that notes what it is asked for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.waiting import PATIENCE

NEXT = Path(__file__).resolve().parents[3] / "scripts" / "gpu" / "next"
STAND_IN = """#!/bin/sh
case "$*" in
    *print\\(*) echo A0 F0; exit ;;
    "$FAILS"*) echo "$SAYS"; exit $STATUS ;;
esac
"""
ROWS = "check calibrate predict bench papers-lp papers-ladder papers-deinfer papers-pt explore drafts load-float32"
ROWS += " load-256 load-64 load-16 load-1 heal liger random quantised compare calibrate-2 bench-2"
ROWS += " scan-1 scan-2 heal-2 papers-racks"


def begun(folder: Path, *arguments: str, **environment: str) -> list[str]:
    """The rows that a call begins."""
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    done = subprocess.run(
        [str(NEXT), "--small", "-o", str(folder / "out"), *arguments],
        env=os.environ
        | {"MODEL": "demo", "PYTHON": str(stand_in), "FAILS": "nothing", "SAYS": "", "STATUS": "0"}
        | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE,
        check=True,
    )
    lines = done.stdout.splitlines()
    return [line.split()[1].rstrip(":") for line in lines if line.startswith("== ")]


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
    (tmp_path / "out" / "check.txt").write_text("heal, two steps    not run: 570 s were over\n")
    assert begun(tmp_path)[:4] == ["check", "speeds", "commands", "calibrate"]
