"""Where a study lies: a PostgreSQL database that many machines reach, or a SQLite or journal file of one machine."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import BaseJournalBackend
from sqlalchemy import URL, event, exc, make_url
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential

from surgeon.errors import did_you_mean, first_line, full_disk, is_full_disk, naming
from surgeon.processes.files import make_folder
from surgeon.processes.locks import locked
from surgeon.provenance import without_password

Say = Callable[[str], None]
Found = TypeVar("Found")
JOURNAL_FILE = "study.log"
KINDS = "postgresql://user@host/database, sqlite:///file or journal:file"
JOURNAL_BEGINS = b'{"op_code":'
TRIES = 20  # of opening a database that another worker is just setting up
SECONDS_LOCKED = 60.0  # that a SQLite file may be busy before it counts as away
SHORTEST, LONGEST = 0.25, 10.0  # seconds between two tries to reach one that is away
SECONDS_BETWEEN_WORDS = 60.0
ANSWER, SILENCE = 10, 30  # seconds to wait for a connection, and for a server that says nothing any more


@dataclass(frozen=True)
class Pace:
    """How often workers look at the storage, in seconds.

    Attributes:
        heartbeat: between two signs of life of a worker.
        grace: after which others take over a trial that shows none, where they cannot see its process.
        poll, longest_poll: before a worker without work looks again; it doubles from one to the other.
    """

    heartbeat: float = 15.0
    grace: float = 90.0
    poll: float = 0.05
    longest_poll: float = 2.0


@dataclass(frozen=True)
class StudyStorage:
    """An open storage.

    Attributes:
        place: its address, as messages and records show it: without a password.
        is_server: whether it is a database of its own, which can go away and come back.
        file: where it lies on a disk of this machine.
    """

    backend: BaseStorage
    place: str
    is_server: bool = False
    file: Path | None = None
    pace: Pace = Pace()

    def is_away(self, error: BaseException) -> bool:
        """Whether an error says that the storage cannot be reached now, and nothing of what was asked of it."""
        link: BaseException | None = error
        while link is not None:
            if self.is_server and isinstance(link, exc.OperationalError | exc.InterfaceError):
                return True
            if isinstance(link, exc.DBAPIError) and (link.connection_invalidated or _is_locked(link)):
                return True
            link = link.__cause__ or link.__context__
        return False


def say_aside(line: str) -> None:
    """Put a line on standard error."""
    print(f"search: {line}", file=sys.stderr, flush=True)


class PatientCalls:
    """Asks a storage until it answers: while it is away workers wait, say so, and go on.

    Attributes:
        steady_since: when it last came back, on `time.monotonic`; what has been seen of others before means nothing.
    """

    def __init__(self, storage: StudyStorage, say: Say) -> None:
        self.storage, self.say = storage, say
        self.steady_since = float("-inf")

    def __call__(self, ask: Callable[[], Found]) -> Found:
        """What the storage answers.

        Raises:
            ValueError: if the study is no longer in it.
            OSError: if it answers that it cannot do that, its disk being full, say.
        """
        begun, said, storage = time.monotonic(), float("-inf"), self.storage
        of_storages = (StorageInternalError, exc.SQLAlchemyError)

        def tell(state: RetryCallState) -> None:
            nonlocal said
            # The first try may have met a connection that was cut, and nothing is said of it.
            if state.attempt_number > 1 and time.monotonic() - said >= SECONDS_BETWEEN_WORDS:
                said, error = time.monotonic(), state.outcome and state.outcome.exception()
                assert error
                self.say(f"{storage.place} does not answer ({_words(error)}); waiting until it does")

        tries = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, of_storages) and storage.is_away(error)),
            wait=wait_exponential(multiplier=SHORTEST, max=LONGEST),
            before_sleep=tell,
        )
        try:
            found = tries(ask)
        except KeyError as error:
            raise ValueError(f"the study is no longer in {storage.place}: somebody deleted it") from error
        except of_storages as error:
            if is_full_disk(error):
                raise full_disk(storage.file or storage.place) from error
            raise OSError(f"{storage.place}: {_words(error)}") from error
        if tries.statistics["attempt_number"] > 1:
            self.steady_since = time.monotonic()
        if said > begun:
            self.say(f"{storage.place} is back after {time.monotonic() - begun:.0f} s; going on")
        return found


def _words(error: BaseException) -> str:
    """What the driver said."""
    while error.__cause__ is not None:
        error = error.__cause__
    return without_password(first_line(error))


def open_storage(address: str | None, output: Path, pace: Pace | None = None) -> StudyStorage:
    """Open a storage, and set it up if it is new.

    Args:
        address: as the user writes it, one of `KINDS`; None for a file in the output folder.

    Raises:
        ValueError, OSError: if there is no such storage, or it cannot be used; in one line that says what to do, and
            no password.
        ImportError: if the database's driver is not installed.
    """
    pace = pace or Pace()
    if address is None:
        make_folder(output)
        return _open_journal(output / JOURNAL_FILE, pace)  # of which a trial costs a 20th of what it costs SQLite
    kind, _, rest = address.partition(":")
    if kind == "journal":
        return _open_journal(Path(rest), pace)
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
        return _open_sqlite(Path(url.database), pace)
    return _open_server(url, pace)


def _open_sqlite(path: Path, pace: Pace) -> StudyStorage:
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
    return StudyStorage(backend, f"sqlite:///{path}", file=path, pace=pace)


def _open_server(url: URL, pace: Pace) -> StudyStorage:
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
    return StudyStorage(backend, place, is_server=True, pace=pace)


def _explained(error: BaseException, url: URL, place: str) -> OSError:
    """What a server that refuses means, in one line."""
    said = _said(error, url)
    if re.search(r'database "[^"]*" does not exist', said):
        flags = "".join(f" -{f} {v}" for f, v in {"h": url.host, "p": url.port, "U": url.username}.items() if v)
        return OSError(f"there is no database {url.database!r} at {place}; make it: createdb{flags} {url.database}")
    if re.search(r'role "[^"]*" does not exist', said):
        return OSError(f"{place} knows no user {url.username!r}; make one, createuser NAME, or give another's name")
    if "no password supplied" in said or "password authentication failed" in said:
        wrong = "asks for a password" if "no password" in said else f"does not take the password of {url.username!r}"
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
            return RDBStorage(text, engine)
        except (exc.IntegrityError, exc.OperationalError, exc.ProgrammingError) as error:
            raced = isinstance(error, exc.IntegrityError) or "already exists" in str(error) or _is_locked(error)
            if not raced or not left:
                raise
            time.sleep(random.uniform(0.05, 0.2))
        except RuntimeError as error:
            raise ValueError(f"{without_password(str(url))}: {' '.join(str(error).split())}") from error
    raise AssertionError("the last try raises")


def _is_locked(error: exc.DBAPIError) -> bool:
    return "database is locked" in str(error.orig)


def _open_journal(path: Path, pace: Pace) -> StudyStorage:
    if not path.name or not path.parent.is_dir():
        raise FileNotFoundError(f"journal:{path} lies in no folder that is there; make it first, or name another file")
    if path.is_dir():
        raise IsADirectoryError(f"journal:{path} is a folder; name a file in it")
    first = b""
    if path.exists():
        with path.open("rb") as file:
            first = file.read(len(JOURNAL_BEGINS))
    if not JOURNAL_BEGINS.startswith(first):  # it would be mended (`writing_to`), so nothing else may be taken for one
        raise ValueError(f"{path} is no journal of a study; name another file")
    return StudyStorage(StudyJournal(path).storage(), f"journal:{path}", file=path, pace=pace)


class StudyJournal(BaseJournalBackend):
    """A journal of Optuna's, in its format: what was done to a study, a line each.

    Optuna's own cannot read on behind an empty line, as programs that were killed and editors leave them, and does not
    say which file, or which line of it, it cannot read or write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()
        self._entries, self._line, self._place = 0, 0, 0  # read so far: entries, lines, bytes

    def storage(self) -> JournalStorage:
        """What the journal says was done, done.

        Raises:
            ValueError: if it is damaged; naming the line.
        """
        try:
            return JournalStorage(self)
        except (AssertionError, AttributeError, LookupError, TypeError) as error:
            raise self._damaged(error) from error

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The entries from that one on.

        Raises:
            ValueError: at a line that is none.
        """
        if log_number_from != self._entries:
            self._entries, self._line, self._place = 0, 0, 0
        with self.path.open("rb") as file:
            file.seek(self._place)
            for text in file:
                if not text.endswith(b"\n"):  # it is being written, or was when its process was killed
                    return
                self._line, self._place = self._line + 1, self._place + len(text)
                if not text.strip():
                    continue
                try:
                    entry = json.loads(text)
                except ValueError as error:
                    raise self._damaged(error) from error
                self._entries += 1
                if self._entries > log_number_from:
                    yield entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write entries down; when it returns they are on the disk."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with writing_to(self.path), naming(self.path), self.path.open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(
            f"{self.path} is damaged: line {self._line} is no entry of a study ({type(error).__name__}: "
            f"{first_line(error)}); take it out, or name another file to begin anew"
        )


@contextmanager
def writing_to(journal: Path) -> Iterator[None]:
    """While inside, no other process of this machine writes to a journal.

    Optuna's own locks are files, which stay when their process is killed, and hold everybody up. This one goes with its
    process, and is on the journal itself: a file beside it would hold up Optuna's own writers, who take it for theirs.
    Whoever has it next takes away the line that the dead one could not finish: the line after it would else be part of
    it, and the journal could not be read any more.
    """
    with locked(journal):
        with journal.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        yield
