"""A search as an Optuna study that any number of workers share.

Every worker runs Optuna's own loop over the same storage: a PostgreSQL database that many machines reach, or a SQLite
or journal file of one machine. Nobody leads, and nobody waits for others but at the end. Trials of dead processes are
failed, so that they are asked for again: Optuna's heartbeats in a database tell of them, and of this machine's its
process table.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import psutil
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.storages.journal._file import get_lock_file
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import URL, event, exc, make_url

from surgeon.opened import without_password
from surgeon.processes.children import when_parent_ends
from surgeon.processes.files import full_disk, is_full_disk, make_folder, name_file
from surgeon.searches.search import PROGRAM
from surgeon.searches.workers import say_aside
from surgeon.words import did_you_mean, first_line

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


@contextmanager
def naming_storage(storage: StudyStorage) -> Iterator[None]:
    """Turn a storage's errors into ones that name it: ValueError if the study is gone, else OSError."""
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
    """Open a storage, one of `KINDS`, and set it up if it is new; without an address, a file in the output folder.

    Raises:
        ValueError, OSError, ImportError: if there is no such storage, or it cannot be used; without its password.
    """
    if address is None:
        make_folder(output)
        # A trial costs a journal a 20th of the time that it costs SQLite.
        return _open_journal(output / JOURNAL_FILE)
    kind, _, rest = address.partition(":")
    if kind == "journal":
        return _open_journal(Path(rest))
    if kind not in ("sqlite", "postgres", "postgresql") and not kind.startswith("postgresql+"):
        suggestion = did_you_mean(kind, ["postgresql", "sqlite", "journal"])
        raise ValueError(f"{without_password(address)!r} is no storage; {suggestion} (write {KINDS})")
    try:
        url = make_url(address)
    except (exc.ArgumentError, ValueError) as error:
        raise ValueError(f"{without_password(address)!r} is no address; it should be {KINDS}") from error
    if kind == "sqlite":
        if not url.database or url.database == ":memory:":
            raise ValueError(f"{address!r} names no file; it should be sqlite:///file")
        path = Path(url.database)
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"there is no folder {path.parent} to keep the study in; make it first"
            )
        url = URL.create("sqlite", database=str(path))
        try:
            with name_file(path):
                backend = _set_up(url, {"connect_args": {"timeout": SECONDS_LOCKED}})
        except exc.DatabaseError as error:
            raise OSError(
                f"{path} cannot hold a study: {first_line(error.orig or error)}; use another file"
            ) from error
        # Every transaction locks the file from its beginning. By default SQLite locks it at the first change, and
        # Python's module begins none before: two workers could both find a trial waiting, and both take it.
        engine = backend.engine
        engine.dispose()  # of connections that began otherwise
        event.listen(engine, "connect", lambda one, _: setattr(one, "isolation_level", None))
        event.listen(engine, "begin", lambda one: one.exec_driver_sql("BEGIN IMMEDIATE"))
        return StudyStorage(backend, f"sqlite:///{path}", file=path)
    return _open_server(url)


def _open_server(url: URL) -> StudyStorage:
    driver = url.drivername.partition("+")[2] or "psycopg"
    url = url.set(drivername=f"postgresql+{driver}")
    place = without_password(url.set(drivername="postgresql").render_as_string(hide_password=True))
    patience: dict[str, Any] = {}
    # They hand these on to libpq, which else waits a quarter of an hour.
    if driver.startswith("psycopg"):
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
        raise _explain(error, url, place) from None  # what it was raised from may quote the address
    return StudyStorage(backend, place)


def _explain(error: BaseException, url: URL, place: str) -> OSError:
    """Explain a server's refusal in one line, without a password."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, exc.DBAPIError):
        link = link.__cause__
    lines = str(
        (link.orig if isinstance(link, exc.DBAPIError) else None) or error
    ).strip().splitlines() or [""]
    telling = [line for line in lines if "FATAL:" in line or "ERROR:" in line or "failed:" in line]
    # The server's or the driver's last words.
    said = " ".join((telling or lines)[0].rpartition("failed: ")[2].split())
    for secret in filter(None, [url.password, url.query.get("password")]):
        said = said.replace(str(secret), "***")
    if re.search(r'database "[^"]*" does not exist', said):
        flags = "".join(
            f" -{f} {v}" for f, v in {"h": url.host, "p": url.port, "U": url.username}.items() if v
        )
        return OSError(
            f"there is no database {url.database!r} at {place}; make it: createdb{flags} {url.database}"
        )
    if re.search(r'role "[^"]*" does not exist', said):
        return OSError(
            f"{place} knows no user {url.username!r}; make one, createuser NAME, or give another's name"
        )
    if "no password supplied" in said or "password authentication failed" in said:
        wrong = f"does not take the password of {url.username!r}"
        if "no password" in said:
            wrong = "asks for a password"
        return OSError(f"{place} {wrong}; put the right one into ~/.pgpass, or into PGPASSWORD")
    if "permission denied" in said:
        return OSError(
            f"{place} does not let {url.username!r} make tables ({said}); use a database that is theirs"
        )
    if isinstance(error, exc.OperationalError):
        return OSError(
            f"{place} cannot be reached ({said}); see that it runs, and that the address is right"
        )
    return OSError(f"{place} cannot hold a study: {said}")


def _set_up(url: URL, engine: dict[str, Any]) -> RDBStorage:
    """Open a database and make its tables; several workers may be at it at once."""
    # Optuna formats it.
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
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
        raise FileNotFoundError(
            f"journal:{path} lies in no folder that is there; make it first, or name another file"
        )
    if path.is_dir():
        raise IsADirectoryError(f"journal:{path} is a folder; name a file in it")
    first = b""
    if path.exists():
        with path.open("rb") as file:
            first = file.read(len(JOURNAL_BEGINS))
    if not JOURNAL_BEGINS.startswith(first):
        raise ValueError(f"{path} is no journal of a study; name another file")
    with name_file(path):
        lock = JournalFileSymlinkLock(str(path))
        journal = JournalFileBackend(str(path), lock)
        # What a full disk or a lost machine has left of a last line is taken away: Optuna could not read on behind it.
        with get_lock_file(lock), path.open("r+b") as file:
            text = file.read()
            if not text.endswith(b"\n"):
                file.truncate(text.rfind(b"\n") + 1)
        try:
            # Optuna passes over a last line that it cannot read.
            for line in path.read_bytes().splitlines():
                json.loads(line)
            return StudyStorage(JournalStorage(journal), f"journal:{path}", path)
        except (ValueError, AssertionError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged: it has a line that is no entry of a study ({type(error).__name__}: "
                f"{first_line(error)}); take it out, or name another file to begin anew"
            ) from error


# Attributes of the study.
SETTINGS = "settings"
METRICS = "objectives"
WORKER = "worker"  # attribute of trials
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
COUNTED = (TrialState.WAITING, TrialState.RUNNING, *FINISHED)
SECONDS_BETWEEN_ASKS = 0.01
LONGEST_ASK = 2.0  # seconds
SECONDS_BETWEEN_LOOKS = 0.3  # of a worker that waits for others
SAME_START = 2.0  # seconds that two readings of a process' start may be apart


class NotTried(Exception):
    """Ends a trial that is one too many, or of which nothing is left to try; it is failed, and counts for nothing."""


def open_study(
    storage: StudyStorage, name: str, settings: Mapping[str, Any], metrics: Sequence[str]
) -> optuna.Study:
    """Open a study in a storage, made or gone on with.

    Args:
        name: of the study; a storage can have many.
        settings: of the search, as JSON values.
        metrics: names of the values to minimise.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    directions = [optuna.study.StudyDirection.MINIMIZE] * len(metrics)
    study = optuna.create_study(
        storage=storage.backend, study_name=name, directions=directions, load_if_exists=True
    )
    wanted = json.loads(json.dumps({**settings, METRICS: dict.fromkeys(metrics, "minimize")}))
    if SETTINGS not in study.user_attrs:
        study.set_user_attr(SETTINGS, wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names([*metrics])
    stored = study.user_attrs[SETTINGS]  # another worker may have been quicker
    for key in [*wanted, *(key for key in stored if key not in wanted)]:
        if stored.get(key) != wanted.get(key):
            raise ValueError(
                f"the study {name!r} in {storage.place} has another {key} ({stored.get(key)}, not {wanted.get(key)}); "
                "give the same settings to go on with it, or another name of the study or output folder to begin one"
            )
    return study


def compute_once(study: optuna.Study, name: str, compute: Callable[[], Any]) -> Any:
    """Compute a JSON value that all workers need once, and keep it in the study."""
    identifier = study._study_id
    backend = study._storage
    if name not in backend.get_study_system_attrs(identifier):
        value = json.dumps(compute())
        if name not in backend.get_study_system_attrs(identifier):
            backend.set_study_system_attr(identifier, name, value)
    return json.loads(backend.get_study_system_attrs(identifier)[name])


def list_trials(study: optuna.Study) -> list[FrozenTrial]:
    """List the trials that were not given up."""
    return study.get_trials(deepcopy=False, states=COUNTED)


def run_trials(
    study: optuna.Study,
    objective: Callable[[optuna.Trial], Any],
    trials: int,
    until: float | None,
    tell: Callable[[FrozenTrial], object],
) -> None:
    """Work with all other workers until the study has so many trials, or no more can be asked for."""
    told = {one.number for one in list_trials(study) if one.state in FINISHED}
    # Numbers of processes are given again.
    me = [platform.node(), os.getpid(), psutil.Process().create_time()]

    def is_open() -> bool:
        is_over = until is not None and time.monotonic() >= until and bool(told)
        return not is_over and len(list_trials(study)) < trials

    def after(study: optuna.Study, _: FrozenTrial) -> None:
        _tell_new(study, told, tell)
        if not is_open():
            study.stop()

    def measure(trial: optuna.Trial) -> Any:
        trial.set_user_attr(WORKER, me)
        if sum(one.number < trial.number for one in list_trials(study)) >= trials or _is_twin(
            study, trial
        ):
            raise NotTried
        found = objective(trial)
        if getattr(study.sampler, "is_exhausted", False):  # it has said the best trial once more
            raise NotTried
        return found

    states_then: list[TrialState] | None = None
    while True:
        _fail_lost(study, me)
        # Else nothing was left to ask for, and nothing is new.
        if is_open() and states_then != [one.state for one in list_trials(study)]:
            study.optimize(measure, callbacks=[after], catch=(NotTried,))
            states_then = [one.state for one in list_trials(study)]
        _tell_new(study, told, tell)
        if not _running_trials(study):
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _tell_new(study: optuna.Study, told: set[int], tell: Callable[[FrozenTrial], object]) -> None:
    for one in list_trials(study):
        if one.state in FINISHED and one.number not in told:
            told.add(one.number)
            tell(one)


def _running_trials(study: optuna.Study) -> list[FrozenTrial]:
    """List trials that workers run; a notebook's are left to it."""
    return [
        one for one in list_trials(study) if one.state == TrialState.RUNNING and WORKER in one.user_attrs
    ]


def _is_twin(study: optuna.Study, trial: optuna.Trial) -> bool:
    """Tell whether an earlier trial has the same program, as when two workers ask at the same moment."""
    # Asks the sampler, which Optuna else does when the first parameter is wanted.
    _ = trial.relative_params
    program = study._storage.get_trial(trial._trial_id).user_attrs.get(PROGRAM)
    if program is None:  # samplers of Optuna name none; what they say twice is not measured again
        return False
    until = time.monotonic() + LONGEST_ASK
    while True:
        others = [one for one in list_trials(study) if one.number != trial.number]
        earlier = [
            one for one in others if one.number < trial.number and one.state == TrialState.RUNNING
        ]
        # Who asked before may not have been answered yet; a worker that was killed as it asked never will be.
        if all(PROGRAM in one.user_attrs for one in earlier) or time.monotonic() >= until:
            break
        time.sleep(SECONDS_BETWEEN_ASKS)
    finished = [one for one in others if one.state.is_finished()]
    return any(one.user_attrs.get(PROGRAM) == program for one in (*earlier, *finished))


def _fail_lost(study: optuna.Study, me: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    for trial in _running_trials(study):
        machine, number, began = trial.user_attrs[WORKER]
        has_ended = [machine, number, began] == me
        if machine == platform.node() and not has_ended:
            try:
                process = psutil.Process(number)
                is_another = abs(process.create_time() - began) > SAME_START
                has_ended = is_another or process.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                has_ended = True
        if has_ended:
            say_aside(
                f"trial {trial.number} was lost with process {number} on {machine}; it is tried again"
            )
            with suppress(UpdateFinishedTrialError):
                study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


@contextmanager
def interruptible(index: int) -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that trials are given back; all workers but 0 end with the first one, too."""
    if threading.current_thread() is not threading.main_thread():  # only that one can take signals
        yield
        return
    # A shell that starts something in the background lets it ignore Ctrl-C, and so all that it starts.
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    if index:
        main = threading.main_thread().ident
        assert main is not None
        # The signal goes to that thread, as it may be asleep.
        when_parent_ends(lambda: signal.pthread_kill(main, signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
