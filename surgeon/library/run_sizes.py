"""How much an exploration measures: of how much text and how fine, by what a run takes here and the time there is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surgeon.analysis.cells import select
from surgeon.analysis.engine.sharing import SharedPlan
from surgeon.analysis.pace import RunPace
from surgeon.quality.data import DEFAULT_TOKENS
from surgeon.words import number

TOKENS = tuple(DEFAULT_TOKENS >> halved for halved in range(4))  # the most first
WINDOWS = 16  # that they are cut into: enough to screen by, and for intervals
PLACES = (6, 3)  # stretches begin in at least so many, in models that have as many layers; where time is short
SIMILARITY = 6  # runs of the model that it takes the time of
SEARCH = 30  # of a search for a knee: single edits, some trials, the winners on other text
SEARCH_LAYER = 1  # and of each layer, as there are as many depths
OPENINGS = 4  # of the model: each pass loads it
DRAWING = 15.0  # seconds, of all tables, pictures and the page
_PLANNED = 0.85  # of the time; the rest is for finer stretches, more trials, and other work on the machine


@dataclass(frozen=True)
class RunSizes:
    """What is measured on.

    Attributes:
        tokens: of the text, for the scan as for the search, in windows of `window`.
        every: stretches of layers begin at its multiples, and are as long.
    """

    tokens: int
    window: int
    every: int


def coarse(layers: int) -> list[int]:
    """The grids of the first scan, the finest first: powers of 2, so that finer ones have the stretches of others."""
    return [1 << max(0, int(math.log2(max(1, layers / places)))) for places in PLACES]


def cells(operations: Sequence[str], layers: int, every: int) -> int:
    """How many cells a scan on such a grid has."""
    return len(operations) * sum(1 for _ in select(operations, layers, every=every).stretches())


def finer(operations: Sequence[str], layers: int, every: int, cell: float, seconds: float) -> int:
    """The finest grid that there is time for.

    Args:
        every: the grid of what is measured already.
        cell: seconds that one more cell takes.
    """
    known = cells(operations, layers, every)
    grids = [1 << power for power in range(every.bit_length())]
    return next((one for one in grids if (cells(operations, layers, one) - known) * cell <= seconds), every)


def search_runs(layers: int) -> int:
    """How many runs of a model a search takes the time of at least."""
    return SEARCH + SEARCH_LAYER * layers


def require_text(data: str, tokens: int) -> None:
    """Refuse a text that is too short.

    Raises:
        ValueError: with how much it would take.
    """
    least = 2 * TOKENS[-1]
    if tokens < least:
        raise ValueError(
            f"{data} has {tokens:,} tokens, and exploring takes {least:,} at least: half of them to measure on, and "
            "half held out to judge by; give a longer text"
        )


def choose_sizes(
    pace: RunPace,
    plans: Mapping[int, SharedPlan],
    *,
    layers: int,
    window: int,
    text: int,
    seconds: float,
    beside: float,
    name: str,
) -> RunSizes:
    """The most text on which all passes fit into the time.

    Args:
        pace: of the model here.
        plans: of the scan, on grids of stretches, the one that is wanted first; the others are for the least text.
        layers: of the model.
        window: the longest that the model may get.
        text: tokens that there are, as many as `require_text` wants; a search holds out as many as it is on.
        seconds: that there are.
        beside: seconds that everything else takes: loading the model, drawing.
        name: of the model, for what is said.

    Raises:
        ValueError: if the least takes longer, saying how much time it would take.
    """

    def needed(tokens: int, every: int) -> float:
        runs = (SIMILARITY + search_runs(layers)) * tokens * pace.own
        return (pace.seconds(plans[every], tokens) + runs + beside) / _PLANNED

    first, *others = plans
    wanted = [(tokens, first) for tokens in TOKENS if 2 * tokens <= text]
    wanted += [(TOKENS[-1], every) for every in others]
    found = next((one for one in wanted if needed(*one) <= seconds), None)
    if found is None:
        least, run, left = needed(*wanted[-1]), TOKENS[-1] * pace.own, max(0.0, seconds) / 60
        raise ValueError(
            f"{left:.3g} minutes are too few here: one run of {name} over {TOKENS[-1]:,} tokens takes "
            f"{number(run, 3)} s, and the least exploration {number(least / 60, 2)} minutes; give "
            f"{math.ceil(least / 6) / 10:g} minutes, or explore where it runs faster"
        )
    tokens, every = found
    return RunSizes(tokens, min(window, tokens // WINDOWS), every)
