"""Processes that are forks behave as those that begin anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.waiting import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux only")
SHOW = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ["WHERE"], os.getppid(), __name__]), flush=True)
print(*(os.read(int(number), 9).decode() for number in sys.argv[1:]), file=sys.stderr)
"""
ENDS = {
    "pass": (0, ""),
    "raise SystemExit(3)": (3, ""),
    "raise SystemExit('no more')": (1, "no more\n"),
    "import os, sys; print('partly', end='', file=sys.stderr); os._exit(4)": (4, "partly"),
    "import atexit, sys; atexit.register(print, 'at last', file=sys.stderr)": (0, "at last\n"),
    "1 / 0": (1, "ZeroDivisionError: division by zero\n"),
    "import os; os.kill(os.getpid(), 9)": (-9, ""),
}


@pytest.mark.parametrize("start", [warm.Popen, warm.ColdPopen])
def test_what_it_is_given(start: type[subprocess.Popen[str]], tmp_path: Path) -> None:
    """Descriptors keep their numbers, low and high ones; the process is a child of this one."""
    pipes = [os.pipe() for _ in range(3)]
    for number, (_, writer) in enumerate(pipes):
        os.write(writer, f"pipe {number}".encode())
    readers = [reader for reader, _ in pipes]
    command = [sys.executable, "-c", SHOW, *map(str, readers)]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"WHERE": "here"}
    process = start(command, cwd=tmp_path, env=environment, pass_fds=readers[::-1], **out)  # type: ignore[call-overload]
    shown, read = process.communicate(timeout=PATIENCE)
    for descriptor in [end for pipe in pipes for end in pipe]:
        os.close(descriptor)
    arguments = ["-c", *map(str, readers)]
    assert json.loads(shown) == [arguments, str(tmp_path), "here", os.getpid(), "__main__"]
    assert read == "pipe 0 pipe 1 pipe 2\n"
    assert process.returncode == 0


@pytest.mark.parametrize("code", ENDS)
@pytest.mark.parametrize("start", [warm.Popen, warm.ColdPopen])
def test_how_it_ends(start: type[subprocess.Popen[str]], code: str) -> None:
    process = start([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    _, said = process.communicate(timeout=PATIENCE)
    expected, end = ENDS[code]
    assert (process.returncode, said[len(said) - len(end) :]) == (expected, end)


@pytest.mark.parametrize("blocked", [False, True])
def test_ctrl_c_reaches_it(blocked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the first fork was asked for while signals were blocked, as multiprocessing's resource tracker is."""
    if blocked:
        monkeypatch.setattr(warm, "FORKS", warm.Forks())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        try:
            warm.Popen([sys.executable, "-c", "pass"]).wait(PATIENCE)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = "import time; print('ready', flush=True); time.sleep(60)"
    process = warm.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=PATIENCE)[1]
    assert process.returncode in (-signal.SIGINT, 1)


def test_others_begin_anew() -> None:
    code = "import sys; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
    assert subprocess.Popen is warm.RankPopen
