"""Progress of long work, on standard error: a bar with a time estimate on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 10.0

Advance = Callable[[float], None]


class TimeOver(Exception):
    """A time limit ended some work between two of its steps; results so far stay, as after Ctrl-C."""


_ends: list[float] = []  # of the time limits that hold, by `time.monotonic`


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End all work that shows its progress with `TimeOver` at its first step after so many seconds."""
    _ends.append(time.monotonic() + seconds)
    try:
        yield
    finally:
        _ends.pop()


def require_time() -> None:
    """End work whose time is over."""
    if _ends and time.monotonic() > min(_ends):
        raise TimeOver("the time was over")


@contextmanager
def progress(
    what: str, total: float | None, unit: str, done: float = 0, note: Callable[[], str] = lambda: ""
) -> Iterator[Advance]:
    """Show the progress of some work; yields a function to be called with each amount of it that is done.

    Within a `time_limit` that function raises `TimeOver` once the time is over.

    Args:
        what: the work, a few words.
        total: its amount, in `unit`; None where that is not known.
        done: the amount done earlier (a resumed run); it does not count towards the speed.
        note: a few current words to show beside it.
    """
    with (
        _bar(what, total, done, note)
        if sys.stderr.isatty()
        else _lines(what, total, unit, done, note) as show
    ):

        def advance(amount: float) -> None:
            show(amount)
            require_time()

        yield advance


@contextmanager
def stretch(advance: Advance, total: float) -> Iterator[Advance]:
    """Advance over work whose steps are known only roughly; at its end exactly `total` has been advanced."""
    done = 0.0

    def tell(amount: float) -> None:
        nonlocal done
        amount = min(amount, total - done)
        done += amount
        advance(amount)

    yield tell
    advance(total - done)


@contextmanager
def _bar(what: str, total: float | None, done: float, note: Callable[[], str]) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    times = (TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        *times,
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        bar.advance(task, done)

        def advance(amount: float) -> None:
            bar.update(task, advance=amount, description=", ".join(filter(None, [what, note()])))

        yield advance


@contextmanager
def _lines(
    what: str, total: float | None, unit: str, done: float, note: Callable[[], str]
) -> Iterator[Advance]:
    first = done
    begun = shown = time.monotonic()

    def advance(amount: float) -> None:
        nonlocal done, shown
        done += amount
        now = time.monotonic()
        if now - shown < SECONDS_BETWEEN_LINES or done <= first:
            return
        shown = now
        if total is None:
            said = [f"{done:,.0f} {unit}", note()]
        else:
            done = min(total, done)  # a resumed run may do a little twice
            left = (now - begun) * (total - done) / (done - first)
            said = [f"{done / max(total, 1):4.0%} of {total:,.0f} {unit}", f"{clock(left)} left", note()]
        print(f"{what}: {', '.join(filter(None, said))}", file=sys.stderr, flush=True)

    yield advance
    print(f"{what}: done, {clock(time.monotonic() - begun)}", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Write a time as minutes and seconds, 4:05, or with hours before them."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
