"""Other workers that a command starts: what they are given, how they end, and what is said when one does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from surgeon.searches.study.workers import WorkerProcesses, gpu_of, interruptible, worker_command
from tests.waiting import PATIENCE, wait_until

# What a worker runs in these tests: it writes down what it was given, and that it was interrupted.
CODE = """
import os, sys, time
from pathlib import Path
folder, index, what = Path(sys.argv[4]), sys.argv[3], sys.argv[5]
(folder / index).write_text(" ".join([os.environ["OMP_NUM_THREADS"], *sys.argv[1:]]))
try:
    if what == "sleep": time.sleep(60)
    if what == "fail" and index == "2": sys.exit("error: no such model")
except KeyboardInterrupt:
    (folder / (index + ".interrupted")).touch()
"""
PROGRAM = ["-c", CODE]
ORPHAN = """
import sys, time
from pathlib import Path
from surgeon.searches.study import workers
program = ["-c", Path(sys.argv[2]).read_text()]
with workers.WorkerProcesses(2, program, ["search", sys.argv[1]], Path(sys.argv[1])):
    time.sleep(60)
"""
CHILD = """
import sys, time
from pathlib import Path
from surgeon.searches.study.workers import interruptible
try:
    with interruptible(1):
        Path(sys.argv[4], "started").touch()
        time.sleep(60)
except KeyboardInterrupt:
    Path(sys.argv[4], "interrupted").touch()
"""


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surgeon.threads.usable_cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def test_they_are_this_command_with_a_share_of_the_cores(tmp_path: Path) -> None:
    said: list[str] = []
    with WorkerProcesses(3, PROGRAM, ["search", str(tmp_path), "end"], tmp_path, said.append) as others:
        pass
    assert [process.returncode for process in others.processes] == [0, 0]
    for index in (1, 2):
        assert (tmp_path / f"{index}").read_text() == f"2 search --worker {index} {tmp_path} end"
    assert said == []


def test_one_that_fails_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    with WorkerProcesses(4, PROGRAM, ["search", str(tmp_path), "fail"], tmp_path, said.append) as others:
        wait_until(lambda: bool(said))
    number = others.processes[1].pid
    assert said == [f"worker 2 (process {number}) ended with exit code 1: error: no such model; the others go on"]


def test_one_that_is_killed_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    others = WorkerProcesses(3, PROGRAM, ["search", str(tmp_path), "sleep"], tmp_path, said.append)
    others.__enter__()
    wait_until(lambda: (tmp_path / "1").exists() and (tmp_path / "2").exists())
    others.processes[0].kill()
    wait_until(lambda: bool(said))
    others.__exit__(KeyboardInterrupt, None, None)
    assert "worker 1 (process" in said[0]
    assert said[0].endswith("was ended by SIGKILL; the others go on")
    assert len(said) == 1
    assert (tmp_path / "2.interrupted").exists()


def test_one_alone_starts_nothing(tmp_path: Path) -> None:
    with WorkerProcesses(1, PROGRAM, ["scan"], tmp_path) as others:
        assert others.processes == []
    assert list(tmp_path.iterdir()) == []


def test_only_a_search_can_be_started_again(tmp_path: Path) -> None:
    assert worker_command(["search", "demo", "-o", "x"], 2) == ["search", "--worker", "2", "demo", "-o", "x"]
    with pytest.raises(ValueError, match="from the command line, with surgeon search; use --workers 1"):
        WorkerProcesses(2, PROGRAM, ["pytest"], tmp_path).__enter__()


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


def test_gpus_are_given_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpu_of(3) == {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [gpu_of(index)["CUDA_VISIBLE_DEVICES"] for index in (1, 2, 3)] == ["1", "2", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert [gpu_of(index)["CUDA_VISIBLE_DEVICES"] for index in (1, 2, 3)] == ["6", "7", "4"]
