"""Opening storages: what is there afterwards, what is refused and how, and that a killed process holds nobody up."""

from __future__ import annotations

import errno
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import optuna
import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError, ProgrammingError

from surgeon.commands.app import explain
from surgeon.opened import without_password
from surgeon.searches import study as study_module
from surgeon.searches.study import naming_storage, open_storage

REFUSED = {
    "mysql://me:secret@host/db": "'mysql://me:***@host/db' is no storage; known: postgresql, sqlite, journal",
    "postgre://host/db": "did you mean 'postgresql'?",
    "study.db": "is no storage",
    "postgresql://me:secret@host:port/db": "'postgresql://me:***@host:port/db' is no address",
    "sqlite://": "names no file",
    "sqlite:///:memory:": "names no file",
    "sqlite:///missing/study.db": "no folder missing to keep the study in",
    "journal:": "lies in no folder",
    "journal:missing/study.log": "lies in no folder",
    "journal:.": "lies in no folder|is a folder",
}


@pytest.mark.parametrize(("address", "message"), REFUSED.items(), ids=REFUSED)
def test_what_is_no_storage_is_refused(
    address: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        (ValueError, OSError), match=message.replace("*", "\\*").replace("?", "\\?")
    ) as refused:
        open_storage(address, tmp_path)
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("this is a text, and longer than a hundred bytes: " * 3)
    with pytest.raises(
        OSError, match="other cannot hold a study: file is not a database; use another file"
    ):
        open_storage(f"sqlite:///{path}", tmp_path)
    before = path.read_text()
    with pytest.raises(ValueError, match="other is no journal of a study; name another file"):
        open_storage(f"journal:{path}", tmp_path)
    assert path.read_text() == before
    path.write_text('{"op_code":2}\n')
    with pytest.raises(ValueError, match="other is damaged: .* name another file to begin anew"):
        open_storage(f"journal:{path}", tmp_path)


def test_a_database_of_a_newer_optuna_is_refused(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/study.db"
    open_storage(address, tmp_path)
    with sqlite3.connect(tmp_path / "study.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'v99'")
    with pytest.raises(
        ValueError, match="study.db: The runtime optuna version .* Please try updating optuna"
    ):
        open_storage(address, tmp_path)


@pytest.mark.parametrize("name", ["with {braces} and 50%", "with spaces", "ünïcode"])
def test_folders_of_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    for address in (None, f"sqlite:///{folder}/study.db"):
        optuna.create_study(storage=open_storage(address, folder).backend, study_name="a")
        assert optuna.get_all_study_names(open_storage(address, folder).backend) == ["a"]
    # A lock beside it would be Optuna's.
    assert {path.name for path in folder.iterdir()} == {"study.log", "study.db"}


def test_several_may_set_up_a_database_at_once(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def set_up() -> None:
        try:
            storage = open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path).backend
            optuna.create_study(storage=storage, study_name="a", load_if_exists=True)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it fails the test
            failed.append(error)

    threads = [threading.Thread(target=set_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def damaged(path: Path, *attributes: str) -> list[bytes]:
    """A journal with a study that has these attributes, to be damaged: its lines."""
    study = optuna.create_study(
        storage=open_storage(f"journal:{path}", path.parent).backend, study_name="a"
    )
    for name in attributes:
        study.set_user_attr(name, 1)
    return path.read_bytes().splitlines(keepends=True)


def attributes_of(path: Path) -> list[str]:
    study = optuna.load_study(
        storage=open_storage(f"journal:{path}", path.parent).backend, study_name="a"
    )
    return list(study.user_attrs)


@pytest.mark.parametrize("ending", [b"", b'{"op_code":2,"wor'])
def test_a_journal_goes_on_behind_what_its_end_was_left_as(ending: bytes, tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    damaged(path, "b", "c")
    with path.open("ab") as file:
        file.write(ending)
    assert attributes_of(path) == ["b", "c"]
    optuna.load_study(
        storage=open_storage(f"journal:{path}", tmp_path).backend, study_name="a"
    ).set_user_attr("d", 1)
    assert attributes_of(path) == ["b", "c", "d"]


@pytest.mark.parametrize(
    "wrong", [b'{"op_code":2,"wor\n', b"\0\0\n", b'{"op_code":99,"worker_id":"x"}\n']
)
@pytest.mark.parametrize("place", [2, 3])
def test_a_damaged_line_of_a_journal_is_named(wrong: bytes, place: int, tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    lines = damaged(path, "b", "c")
    path.write_bytes(b"".join([*lines[:place], wrong, *lines[place:]]))
    with pytest.raises(
        ValueError, match=r"study\.log is damaged: it has a line that is no entry of a study"
    ) as refused:
        open_storage(f"journal:{path}", tmp_path)
    assert "\n" not in str(refused.value)


def test_a_full_disk_is_that_of_the_storage(tmp_path: Path) -> None:
    found = open_storage(f"journal:{tmp_path}/study.log", tmp_path)
    with pytest.raises(OSError, match="No space") as raised, naming_storage(found):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert raised.value.filename == str(tmp_path / "study.log")
    said = explain(raised.value, "elsewhere")[0]
    assert said.startswith(f"error: no space left for {tmp_path}/study.log; free some space")


# What psycopg 3.3 raised, by what was wrong (scripts/search/test_postgres has the database itself).
SAID = {
    'connection failed: connection to server at "127.0.0.1", port 5433 failed: FATAL:  database "db" does not exist': (
        "no database 'db' at postgresql://me:\\*\\*\\*@host:5433/db; make it: createdb -h host -p 5433 -U me db"
    ),
    'connection failed: connection to server at "127.0.0.1", port 5433 failed: FATAL:  role "you" does not exist': (
        "knows no user 'me'; make one"
    ),
    'connection failed: connection to server at "127.0.0.1", port 5433 failed: fe_sendauth: no password supplied': (
        "asks for a password; put the right one into ~/.pgpass, or into PGPASSWORD"
    ),
    'connection failed: connection to server at "127.0.0.1", port 5433 failed: FATAL:  password authentication failed '
    'for user "me"': "does not take the password of 'me'; put the right one",
    'connection failed: connection to server at "127.0.0.1", port 9 failed: Connection refused\n\tIs the server '
    "running on that host and accepting TCP/IP connections?": "db cannot be reached \\(Connection refused\\)",
    "[Errno -2] Name or service not known": "cannot be reached .*Name or service not known",
    "FATAL: secret": "cannot be reached \\(FATAL: \\*\\*\\*\\)",
}


@pytest.mark.parametrize(("said", "message"), SAID.items(), ids=range(len(SAID)))
def test_a_server_that_refuses_is_explained(said: str, message: str) -> None:
    url = make_url("postgresql+psycopg://me:secret@host:5433/db")
    place = "postgresql://me:***@host:5433/db"
    found = study_module._explain(OperationalError("", None, Exception(said)), url, place)
    with pytest.raises(OSError, match=message):
        raise found
    assert "secret" not in str(found)
    assert "\n" not in str(found)


def test_a_user_without_rights_is_told() -> None:
    error = ProgrammingError(
        "CREATE TABLE", None, Exception("permission denied for schema public\nLINE 2: CREATE")
    )
    found = study_module._explain(
        error, make_url("postgresql+psycopg://me@host/db"), "postgresql://me@host/db"
    )
    assert "does not let 'me' make tables (permission denied for schema public)" in str(found)


def test_a_driver_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(
        ImportError,
        match="driver of PostgreSQL \\(psycopg\\) is not installed; pip install 'surgeon\\[post",
    ):
        open_storage("postgresql://me@127.0.0.1:1/db", tmp_path)


def test_passwords_are_stars() -> None:
    assert (
        without_password("a postgresql://me:p@ss/w@host:1/db b") == "a postgresql://me:***@host:1/db b"
    )
    assert (
        without_password("postgresql://host:5432/db?password=abc&x=1")
        == "postgresql://host:5432/db?password=***&x=1"
    )
    assert (
        without_password("postgresql://me@host/db demo:text@main")
        == "postgresql://me@host/db demo:text@main"
    )
    command = "import sys; from surgeon.opened import command_line; print(command_line())"
    shown = subprocess.run(
        [sys.executable, "-c", command, "--storage=postgresql://me:secret@h/d"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == "-c '--storage=postgresql://me:***@h/d'"
