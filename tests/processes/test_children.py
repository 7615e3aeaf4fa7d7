"""Children end with their parent, and say how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from surgeon.processes.children import Child
from tests.waiting import wait_until

WAIT = """
import os, sys, time
from surgeon.processes.children import when_parent_ends
when_parent_ends(lambda: os._exit(7))
print("reads", repr(sys.stdin.read()), flush=True)
time.sleep(60)
"""
PARENT = f"""
import sys, time
from pathlib import Path
from surgeon.processes.children import Child
print(*(Child(["-c", {WAIT!r}], Path(sys.argv[1]) / str(index), 1).pid for index in range(2)), flush=True)
time.sleep(60)
"""
PARENT_OF_WORKERS = """
import multiprocessing, os, sys, time
from surgeon.processes.children import when_parent_ends
def wait(log):
    when_parent_ends(lambda: os._exit(7))
    log.write_text("reads \'\'\\n")
    time.sleep(60)
if __name__ == "__main__":
    from pathlib import Path
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=wait, args=(Path(sys.argv[1]) / str(index),)) for index in range(2)]
    for worker in workers:
        worker.start()
    print(*(worker.pid for worker in workers), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("code", [PARENT, PARENT_OF_WORKERS], ids=["started", "of multiprocessing"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_they_end_with_their_parent_however_it_ends(tmp_path: Path, number: int, code: str) -> None:
    (tmp_path / "parent.py").write_text(code)
    command = [sys.executable, tmp_path / "parent.py", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        logs = [tmp_path / str(index) for index in range(2)]
        wait_until(
            lambda: all(log.is_file() and log.read_text() == "reads ''\n" for log in logs)
        )  # of their parent's input, nothing
        assert len(children) == 2
        parent.send_signal(number)
        assert psutil.wait_procs(children, timeout=30)[1] == []


def test_what_a_child_is(tmp_path: Path) -> None:
    code = (
        "import os, sys; print(os.environ['OMP_NUM_THREADS'], os.environ.get('OWN'), 'PWD' in os.environ, sys.argv[1:],"
        " os.getpgid(0) == os.getpid(), os.getsid(0))"
    )
    child = Child(["-c", code, "a", "b"], tmp_path / "log", 3, environment={"OWN": "1"})
    assert child.wait(60) == child.poll() == 0
    assert child.read_output() == f"3 1 False ['a', 'b'] True {os.getsid(0)}\n"


def test_how_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier one\n")
    endings = {}
    for code in (
        "import sys; print(1); sys.exit('error: no')",
        "raise SystemExit(3)",
        "import time; time.sleep(60)",
    ):
        child = Child(["-c", code], log, 1)
        if "sleep" in code:
            assert child.poll() is None
            child.kill()
        child.wait(60)
        endings[child.describe_end()] = child.read_output()
    assert endings == {
        "ended with exit code 1: error: no": "1\nerror: no\n",
        "ended with exit code 3: it wrote nothing": "",
        "was ended by SIGKILL": "",
    }
    assert log.read_text() == "of an earlier one\n1\nerror: no\n"


def test_an_interrupted_one(tmp_path: Path) -> None:
    child = Child(["-c", "print('there', flush=True); import time; time.sleep(60)"], tmp_path / "log", 1)
    wait_until(lambda: child.read_output() != "")
    child.interrupt()
    child.wait(60)
    assert child.describe_end() == "was ended by SIGINT"
    child.interrupt()  # there is nobody
