"""Goals of benchmarks: one that has measured everything and missed its goal ends otherwise than one that has failed."""

from __future__ import annotations

MISSED = 3  # as exit status; Python ends with 1 where something fails, argparse with 2
_BEGINNING = "goal missed: "


def missed(goal: str) -> SystemExit:
    """What ends a benchmark whose figures are all printed, but not as good as they should be.

    The goal is printed below them, on standard output, so that it is kept with them.
    """
    print(f"{_BEGINNING}{goal}", flush=True)
    return SystemExit(MISSED)


def missed_in(page: str) -> str | None:
    """The goal that a page of a benchmark's figures says was missed."""
    found = [line for line in page.splitlines() if line.startswith(_BEGINNING)]
    if found:
        return found[-1].removeprefix(_BEGINNING)
    return None
