"""Noticing that ranks are stuck: stopped from outside, or waiting for ever, which no closed connection tells of.

Every rank sends a pulse now and then, from a thread of its own: it lives, and so far it has come. While there is work
and none of them gets on, time runs; after long enough the ranks are given up. Long prompts, idle ranks, and time in
which this process was stopped itself do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE_SECONDS = 60.0
PULSES = 12  # within the time after which ranks are given up
MISSED = 3  # a rank of which so many pulses are missing does not answer


@dataclass(frozen=True)
class Pulse:
    """A rank's sign of life.

    Attributes:
        passes: forward passes it has computed; of the one being computed, the share of its steps.
    """

    rank: int
    passes: float


class Watchdog:
    """The state of ranks by their pulses; `check` is to be called every `interval` seconds."""

    def __init__(self, names: Sequence[str], patience: float = PATIENCE_SECONDS) -> None:
        self.interval = patience / PULSES
        self._names = tuple(names)
        self._patience = patience
        self._passes = [0.0] * len(names)
        self._unheard = [0.0] * len(names)  # seconds
        self._stuck = 0.0  # seconds

    def hear(self, pulse: Pulse) -> None:
        if pulse.passes != self._passes[pulse.rank]:
            self._stuck = 0.0
        self._passes[pulse.rank] = pulse.passes
        self._unheard[pulse.rank] = 0.0

    def check(self, seconds: float, busy: bool) -> str | None:
        """Let seconds pass, in which ranks were busy or not; returns why they are to be given up, if they are."""
        seconds = min(seconds, 2 * self.interval)  # what is more, this process was not there to see
        self._unheard = [each + seconds for each in self._unheard]
        self._stuck = self._stuck + seconds if busy else 0.0
        if self._stuck > self._patience:
            time = f"for {self._patience:g} seconds"
            silent = [
                rank for rank, seconds in enumerate(self._unheard) if seconds > MISSED * self.interval
            ]
            if silent:
                return f"{self._list(silent)} not answered {time}: stopped, or cut off"
            last = [rank for rank, passes in enumerate(self._passes) if passes == min(self._passes)]
            if len(last) < len(self._names):
                return f"{self._list(last)} been at the same step {time}, and the others wait for it"
            return f"no rank has come any further {time}"
        return None

    def _list(self, ranks: Sequence[int]) -> str:
        return (
            f"{' and '.join(self._names[rank] for rank in ranks)} {'has' if len(ranks) == 1 else 'have'}"
        )
