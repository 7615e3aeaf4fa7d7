"""Other workers that a command starts: what they are given, how they end, and what is said when one does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import torch

from surgeon.processes.children import Child
from surgeon.searches.study import interruptible
from surgeon.searches.workers import worker_processes
from tests.waiting import PATIENCE, wait_until

# What a worker runs in these tests: it writes down what it was given, and that it was interrupted.
CODE = """
import os, sys, time
from pathlib import Path
from surgeon.searches.workers import given_to_worker
index, given = given_to_worker()
folder, what = Path(given["folder"]), given["what"]
try:  # whoever sees the file may interrupt
    (folder / str(index)).write_text(" ".join([os.environ["OMP_NUM_THREADS"], what, *sys.argv[1:]]))
    if what == "sleep": time.sleep(60)
    if what == "fail" and index == 2: sys.exit("error: no such model")
except KeyboardInterrupt:
    (folder / f"{index}.interrupted").touch()
"""
COMMAND = ["-c", CODE, "a"]
ORPHAN = """
import sys, time
from pathlib import Path
from surgeon.searches import workers
with workers.worker_processes(2, ["-c", Path(sys.argv[2]).read_text(), sys.argv[1]], {}, Path(sys.argv[1])):
    time.sleep(60)
"""
CHILD = """
import sys, time
from pathlib import Path
from surgeon.searches.study import interruptible
try:
    with interruptible(1):
        Path(sys.argv[1], "started").touch()
        time.sleep(60)
except KeyboardInterrupt:
    Path(sys.argv[1], "interrupted").touch()
"""


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surgeon.machine.usable_cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def workers(
    count: int, folder: Path, what: str, say: Callable[[str], None]
) -> AbstractContextManager[list[Child]]:
    return worker_processes(count, COMMAND, {"folder": str(folder), "what": what}, folder, say)


def test_they_run_what_they_are_given_with_a_share_of_the_cores(tmp_path: Path) -> None:
    said: list[str] = []
    with workers(3, tmp_path, "end", said.append) as others:
        pass
    assert [process.poll() for process in others] == [0, 0]
    for index in (1, 2):
        assert (tmp_path / f"{index}").read_text() == "2 end a"
    assert said == []


def test_one_that_fails_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    with workers(4, tmp_path, "fail", said.append) as others:
        wait_until(lambda: bool(said))
    number = others[1].pid
    assert said == [
        f"worker 2 (process {number}) ended with exit code 1: error: no such model; the others go on"
    ]


def test_one_that_is_killed_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    others = workers(3, tmp_path, "sleep", said.append)
    processes = others.__enter__()
    wait_until(lambda: (tmp_path / "1").exists() and (tmp_path / "2").exists())
    processes[0].kill()
    wait_until(lambda: bool(said))
    others.__exit__(KeyboardInterrupt, None, None)
    assert "worker 1 (process" in said[0]
    assert said[0].endswith("was ended by SIGKILL; the others go on")
    assert len(said) == 1
    assert (tmp_path / "2.interrupted").exists()


def test_they_are_interrupted_when_the_first_is_killed(tmp_path: Path) -> None:
    (tmp_path / "child").write_text(CHILD)
    first = subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path), str(tmp_path / "child")])
    wait_until((tmp_path / "started").exists)
    children = psutil.Process(first.pid).children()
    first.kill()
    first.wait()
    wait_until((tmp_path / "interrupted").exists)
    assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []


def test_the_end_of_a_job_is_an_interruption() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def be_ended() -> None:
        with interruptible(0):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        be_ended()
    assert signal.getsignal(signal.SIGTERM) == before
