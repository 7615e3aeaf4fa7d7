"""Locks keep others out, and go with the process that has them."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from surgeon.processes.locks import lock, locked

HOLD = """
import sys
from pathlib import Path
from surgeon.processes.locks import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_one_has_it_until_it_is_closed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    path.mkdir() if kind == "folder" else path.touch()
    first, second = (os.open(path, os.O_RDONLY) for _ in range(2))
    assert lock(first)
    assert not lock(second)
    os.close(first)
    assert lock(second)
    os.close(second)


def test_others_wait_and_a_kill_lets_them_go_on(tmp_path: Path) -> None:
    path, passed = tmp_path / ".lock", list[str]()
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"

        def wait() -> None:
            with locked(path):
                passed.append("locked")

        thread = Thread(target=wait)
        thread.start()
        thread.join(0.1)
        assert passed == []
        process.kill()
        thread.join(20)
        assert passed == ["locked"]


def test_a_file_system_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks"), locked(tmp_path / ".lock"):
        pass
