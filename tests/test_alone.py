"""Tests that are marked `alone` run while no other worker runs a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
# The first test of each worker waits until the other's has begun, too, so that both work beside each other.
TESTS = """
import os, time, pytest
from pathlib import Path
folder, first = Path(r"{folder}"), True
marks = {{7: pytest.mark.alone, 12: pytest.mark.alone}}
@pytest.mark.parametrize("number", [pytest.param(n, marks=marks.get(n, ())) for n in range(20)])
def test_span(number):
    global first
    began = time.monotonic()
    if first:
        (folder / os.environ["PYTEST_XDIST_WORKER"]).touch()
        while len(list(folder.glob("gw*"))) < 2:
            time.sleep(0.01)
    first = False
    time.sleep(0.05)
    with open(r"{log}", "a") as log:
        log.write(f"{{number}} {{began}} {{time.monotonic()}}\\n")
"""


def test_no_other_test_runs_meanwhile(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    log = tmp_path / "log"
    (tmp_path / "test_spans.py").write_text(TESTS.format(log=log, folder=tmp_path))
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    options = [
        "-p",
        "xdist.plugin",
        "-n",
        "2",
        "--dist",
        "load",
        "-c",
        "/dev/null",
        f"--rootdir={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    spans = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    assert len(spans) == 20
    beside = {
        number: sum(one < ended and other > began for _, one, other in spans) - 1
        for number, began, ended in spans
    }
    assert beside.pop(7) == beside.pop(12) == 0
    assert sum(beside.values()) > 0
