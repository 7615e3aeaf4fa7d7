"""What workers do while their database is away: they wait, say so, and go on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

from surgeon.errors import first_line, full_disk, is_full_disk
from surgeon.provenance import without_password
from surgeon.searches.study.storage import StudyStorage

Say = Callable[[str], None]
Found = TypeVar("Found")
SHORTEST, LONGEST = 0.25, 10.0  # seconds between two tries
SECONDS_BETWEEN_WORDS = 60.0


def say_aside(line: str) -> None:
    """Put a line on standard error."""
    print(f"search: {line}", file=sys.stderr, flush=True)


class PatientCalls:
    """Asks a storage until it answers.

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
        outage = _Outage(self.storage, self.say)
        while True:
            try:
                found = ask()
            except KeyError as error:
                raise ValueError(f"the study is no longer in {self.storage.place}: somebody deleted it") from error
            except (StorageInternalError, SQLAlchemyError) as error:
                if not self.storage.is_away(error):
                    if is_full_disk(error):
                        raise full_disk(self.storage.file or self.storage.place) from error
                    raise OSError(f"{self.storage.place}: {_words(error)}") from error
                outage.wait(error)
            else:
                if outage.tries:
                    self.steady_since = time.monotonic()
                outage.end()
                return found


class _Outage:
    """One time without an answer."""

    def __init__(self, storage: StudyStorage, say: Say) -> None:
        self.place, self.say = storage.place, say
        self.begun, self.tries, self.pause = time.monotonic(), 0, SHORTEST
        self.said: float | None = None

    def wait(self, error: BaseException) -> None:
        """Wait before the next try. The first may have met a connection that was cut, and nothing is said of it."""
        now = time.monotonic()
        if self.tries and (self.said is None or now - self.said >= SECONDS_BETWEEN_WORDS):
            self.said = now
            self.say(f"{self.place} does not answer ({_words(error)}); waiting until it does")
        time.sleep(self.pause)
        self.tries, self.pause = self.tries + 1, min(2 * self.pause, LONGEST)

    def end(self) -> None:
        """Say that it is over, if anything was said."""
        if self.said is not None:
            self.say(f"{self.place} is back after {time.monotonic() - self.begun:.0f} s; going on")


def _words(error: BaseException) -> str:
    """What the driver said."""
    link = error
    while link.__cause__ is not None:
        link = link.__cause__
    return without_password(first_line(link))
