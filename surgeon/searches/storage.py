"""Where a study lies: a PostgreSQL database that many machines reach, or a SQLite or journal file of one machine."""

from __future__ import annotations

import json
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.storages.journal._file import get_lock_file
from sqlalchemy import URL, event, exc, make_url

from surgeon.errors import did_you_mean, first_line, full_disk, is_full_disk, naming
from surgeon.processes.files import make_folder
from surgeon.provenance import without_password

Say = Callable[[str], None]
JOURNAL_FILE = "study.log"
KINDS = "postgresql://user@host/database, sqlite:///file or journal:file"
JOURNAL_BEGINS = b'{"op_code":'
TRIES = 20  # of opening a database that another worker is just setting up
SECONDS_LOCKED = 60.0  # that a SQLite file may be busy before it counts as away
# Seconds to wait for a connection, and for a server that says nothing any more.
ANSWER = 10
SILENCE = 30
# Seconds between two signs of life of a worker, and without any until its trial is lost.
HEARTBEAT = 15
GRACE = 90


@dataclass(frozen=True)
class StudyStorage:
    """An open storage.

    Attributes:
        place: its address, as messages and records show it: without a password.
        file: where it lies on a disk of this machine.
    """

    backend: BaseStorage
    place: str
    file: Path | None = None


def say_aside(line: str) -> None:
    """Put a line on standard error."""
    print(f"search: {line}", file=sys.stderr, flush=True)


@contextmanager
def naming_storage(storage: StudyStorage) -> Iterator[None]:
    """Turn what a storage raises into errors that name it.

    Raises:
        ValueError: if the study is no longer in it.
        OSError: if it cannot be reached, or its disk is full.
    """
    try:
        yield
    except (StorageInternalError, exc.SQLAlchemyError, OSError) as error:
        if is_full_disk(error):
            raise full_disk(storage.file or storage.place) from error
        if isinstance(error, OSError):
            raise
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        said = without_password(first_line(cause))  # by the driver
        raise OSError(f"{storage.place}: {said}; the same command goes on from there") from error


def open_storage(address: str | None, output: Path) -> StudyStorage:
    """Open a storage, and set it up if it is new.

    Args:
        address: as the user writes it, one of `KINDS`; None for a file in the output folder.

    Raises:
        ValueError, OSError: if there is no such storage, or it cannot be used; in one line that says what to do, and
            no password.
        ImportError: if the database's driver is not installed.
    """
    if address is None:
        make_folder(output)
        return _open_journal(output / JOURNAL_FILE)  # of which a trial costs a 20th of what it costs SQLite
    kind, _, rest = address.partition(":")
    if kind == "journal":
        return _open_journal(Path(rest))
    if kind not in ("sqlite", "postgres", "postgresql") and not kind.startswith("postgresql+"):
        known = did_you_mean(kind, ["postgresql", "sqlite", "journal"])
        raise ValueError(f"{without_password(address)!r} is no storage; {known} (write {KINDS})")
    try:
        url = make_url(address)
    except (exc.ArgumentError, ValueError) as error:
        raise ValueError(f"{without_password(address)!r} is no address; it should be {KINDS}") from error
    if kind == "sqlite":
        if not url.database or url.database == ":memory:":
            raise ValueError(f"{address!r} names no file; it should be sqlite:///file")
        return _open_sqlite(Path(url.database))
    return _open_server(url)


def _open_sqlite(path: Path) -> StudyStorage:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to keep the study in; make it first")
    url = URL.create("sqlite", database=str(path))
    try:
        with naming(path):
            backend = _set_up(url, {"connect_args": {"timeout": SECONDS_LOCKED}})
    except exc.DatabaseError as error:
        raise OSError(f"{path} cannot hold a study: {first_line(error.orig or error)}; use another file") from error
    # Every transaction locks the file from its beginning. By default SQLite locks it at the first change, and Python's
    # module begins none before: two workers could both find a trial waiting, and both take it.
    backend.engine.dispose()  # of connections that began otherwise
    event.listen(backend.engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(backend.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return StudyStorage(backend, f"sqlite:///{path}", file=path)


def _open_server(url: URL) -> StudyStorage:
    driver = url.drivername.partition("+")[2] or "psycopg"
    url = url.set(drivername=f"postgresql+{driver}")
    place = without_password(url.set(drivername="postgresql").render_as_string(hide_password=True))
    patience: dict[str, Any] = {}
    if driver.startswith("psycopg"):  # they hand these on to libpq, which else waits a quarter of an hour
        alive = {"keepalives_idle": SILENCE, "keepalives_interval": ANSWER, "keepalives_count": 3}
        patience = {"connect_timeout": ANSWER, "tcp_user_timeout": 1000 * SILENCE, **alive}
    arguments = {name: value for name, value in patience.items() if name not in url.query}
    try:
        backend = _set_up(url, {"connect_args": arguments, "pool_pre_ping": True})
    except ImportError as error:
        raise ImportError(
            f"the driver of PostgreSQL ({driver}) is not installed; pip install 'surgeon[postgres]'"
        ) from error
    except (exc.SQLAlchemyError, StorageInternalError) as error:
        raise _explained(error, url, place) from None  # what it was raised from may quote the address
    return StudyStorage(backend, place)


def _explained(error: BaseException, url: URL, place: str) -> OSError:
    """What a server that refuses means, in one line."""
    said = _said(error, url)
    if re.search(r'database "[^"]*" does not exist', said):
        flags = "".join(f" -{f} {v}" for f, v in {"h": url.host, "p": url.port, "U": url.username}.items() if v)
        return OSError(f"there is no database {url.database!r} at {place}; make it: createdb{flags} {url.database}")
    if re.search(r'role "[^"]*" does not exist', said):
        return OSError(f"{place} knows no user {url.username!r}; make one, createuser NAME, or give another's name")
    if "no password supplied" in said or "password authentication failed" in said:
        if "no password" in said:
            wrong = "asks for a password"
        else:
            wrong = f"does not take the password of {url.username!r}"
        return OSError(f"{place} {wrong}; put the right one into ~/.pgpass, or into PGPASSWORD")
    if "permission denied" in said:
        return OSError(f"{place} does not let {url.username!r} make tables ({said}); use a database that is theirs")
    if isinstance(error, exc.OperationalError):
        return OSError(f"{place} cannot be reached ({said}); see that it runs, and that the address is right")
    return OSError(f"{place} cannot hold a study: {said}")


def _said(error: BaseException, url: URL) -> str:
    """What the server or its driver said: its last words, without a password."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, exc.DBAPIError):
        link = link.__cause__
    lines = str((link.orig if isinstance(link, exc.DBAPIError) else None) or error).strip().splitlines() or [""]
    telling = [line for line in lines if "FATAL:" in line or "ERROR:" in line or "failed:" in line]
    said = " ".join((telling or lines)[0].rpartition("failed: ")[2].split())
    for secret in filter(None, [url.password, url.query.get("password")]):
        said = said.replace(str(secret), "***")
    return said


def _set_up(url: URL, engine: dict[str, Any]) -> RDBStorage:
    """Open a database and make its tables; several workers may be at it at once."""
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # optuna formats it
    for left in reversed(range(TRIES)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)  # of heartbeats
                return RDBStorage(text, engine, heartbeat_interval=HEARTBEAT, grace_period=GRACE)
        except (exc.IntegrityError, exc.OperationalError, exc.ProgrammingError) as error:
            locked = "database is locked" in str(error.orig)
            raced = isinstance(error, exc.IntegrityError) or "already exists" in str(error) or locked
            if not raced or not left:
                raise
            time.sleep(random.uniform(0.05, 0.2))
        except RuntimeError as error:
            raise ValueError(f"{without_password(str(url))}: {' '.join(str(error).split())}") from error
    raise AssertionError("the last try raises")


def _open_journal(path: Path) -> StudyStorage:
    if not path.name or not path.parent.is_dir():
        raise FileNotFoundError(f"journal:{path} lies in no folder that is there; make it first, or name another file")
    if path.is_dir():
        raise IsADirectoryError(f"journal:{path} is a folder; name a file in it")
    first = b""
    if path.exists():
        with path.open("rb") as file:
            first = file.read(len(JOURNAL_BEGINS))
    if not JOURNAL_BEGINS.startswith(first):
        raise ValueError(f"{path} is no journal of a study; name another file")
    with naming(path):
        lock = JournalFileSymlinkLock(str(path))
        journal = JournalFileBackend(str(path), lock)
        # What a full disk or a lost machine has left of a last line is taken away: Optuna could not read on behind it.
        with get_lock_file(lock), path.open("r+b") as file:
            text = file.read()
            if not text.endswith(b"\n"):
                file.truncate(text.rfind(b"\n") + 1)
        try:
            for line in path.read_bytes().splitlines():  # Optuna passes over a last line that it cannot read
                json.loads(line)
            return StudyStorage(JournalStorage(journal), f"journal:{path}", path)
        except (ValueError, AssertionError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged: it has a line that is no entry of a study ({type(error).__name__}: "
                f"{first_line(error)}); take it out, or name another file to begin anew"
            ) from error
