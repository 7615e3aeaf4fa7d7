"""Files are whole or what they were."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pandas as pd
import pytest

from surgeon.processes import files
from surgeon.processes.files import lock, lock_file, whole_file, write_json, write_table, write_text


def test_files_are_whole_or_what_they_were(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"wörd": 1.5})
    assert json.loads(path.read_text(encoding="utf-8")) == {"wörd": 1.5}
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half\udcff")
    assert json.loads(path.read_text(encoding="utf-8")) == {"wörd": 1.5}
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing/record\.json'$"):
        write_text(tmp_path / "missing" / "record.json", "{}")


def test_an_error_is_not_hidden_by_what_cannot_be_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def fail() -> None:
        with whole_file(folder / "record.json"):
            folder.rmdir()
            folder.write_text("")
            raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        fail()


def test_a_table_is_written_as_csv(tmp_path: Path) -> None:
    table = pd.DataFrame({"first": [0, 1], "value": [1 / 3, math.nan], "last": [math.inf, 2e-7]})
    write_table(tmp_path / "nine.csv", table)
    assert (tmp_path / "nine.csv").read_text() == "first,value,last\n0,0.333333333,inf\n1,nan,2e-07\n"
    write_table(tmp_path / "three.csv", table, digits=3, missing="")
    assert (tmp_path / "three.csv").read_text() == "first,value,last\n0,0.333,inf\n1,,2e-07\n"


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_to_last_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    path, synced = tmp_path / "library.so", list[tuple[str, bool]]()
    monkeypatch.setattr(files, "sync", lambda file: synced.append((file.read_text(), path.exists())))
    with whole_file(path, durable) as beside:
        beside.write_text("all of it")
    assert synced == ([("all of it", False)] if durable else [])
    assert path.read_text() == "all of it"


HOLD = """
import sys
from pathlib import Path
from surgeon.processes.files import lock_file
with lock_file(Path(sys.argv[1])):
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
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"

        def wait() -> None:
            with lock_file(path):
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
    with pytest.raises(OSError, match="No locks"), lock_file(tmp_path / ".lock"):
        pass
