"""What a search's table of trials says: the way to the best, which layers good trials touch, what edits go with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from surgeon.findings.edit import ADDITIVE, NEIGHBOUR, REGRESSION, SECOND_ORDER, WINDOW, Choice, Edit

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]

SOURCES = {
    WINDOW: "one unbroken stretch",
    ADDITIVE: "least sum of single damage",
    SECOND_ORDER: "least sum with pair terms",
    REGRESSION: "least sum, corrected by trials",
    NEIGHBOUR: "neighbour of the best",
}
MOST_DIVERGENCE = 1.0  # nats per token: what is further from the original than this is another model
DRAFT_TIME: Literal["draft_time"] = "draft_time"
BY = ("divergence", "perplexity", DRAFT_TIME)  # what trials can be ranked by, the usual one first
_BEST_PART = 0.1  # of the trials, that count as good
_LONGEST = 72  # characters of edits in a table
_FEWEST = 3  # trials with an edit, and without it, for a comparison of the two


@dataclass(frozen=True)
class EditEffect:
    """Trials with an edit against trials of the same level without it.

    Attributes:
        trials: how many have it.
        ratio: of their measure to the others', of geometric means; below 1 where trials with it are the lower ones.
        low, high: its 95% interval.
    """

    edit: Edit
    trials: int
    ratio: float
    low: float
    high: float

    @property
    def excludes_one(self) -> bool:
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class TrialTable:
    """The trials of a search, in the order in which they were asked for.

    Attributes:
        table: with the columns of trials.csv.
        by: what the search made small: one of `BY`, the first where it is none.
    """

    table: pd.DataFrame
    by: str = BY[0]

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def values(self) -> Numbers:
        """(trials,), of what they are ranked by."""
        return self.table[self.by].to_numpy(dtype=np.float64)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """Each trial's edits."""
        return tuple(tuple(map(Edit.parse, filter(None, text.split("; ")))) for text in self._words("edits"))

    def short_edits(self, row: int) -> str:
        """A trial's edits in few words: of each space its layers, neighbouring ones as one stretch."""
        groups: dict[tuple[str, str], list[list[int]]] = {}
        for edit in self.choices[row]:
            runs = groups.setdefault((edit.space, edit.option), [])
            if runs and len(edit.layers) == 1 and runs[-1][1] == edit.first:
                runs[-1][1] = edit.stop
            else:
                runs.append([edit.first, edit.stop])
        parts = [
            f"{space} {option + ' ' if option else ''}{' '.join(f'{first}:{stop}' for first, stop in runs)}"
            for (space, option), runs in groups.items()
        ]
        text = "; ".join(parts) or "no edits"
        if len(text) <= _LONGEST:
            return text
        return f"{text[: _LONGEST - 4]} ..."

    @cached_property
    def sources(self) -> list[str]:
        return [SOURCES.get(name, name) for name in self._words("source")]

    @cached_property
    def whole(self) -> Flags:
        """Which were measured on all of the text; the others were stopped, and their numbers are estimates."""
        return self._flags("whole")

    @cached_property
    def within(self) -> Flags:
        """Which of the whole ones keep the budget."""
        return self.whole & self._flags("within")

    @cached_property
    def levels(self) -> Numbers:
        """(trials,), which level of a cost each was made for; all 0 in a search with one goal."""
        return np.asarray(np.nan_to_num(self.table["level"].to_numpy(dtype=np.float64)), dtype=np.float64)

    @property
    def has_levels(self) -> bool:
        """Whether the search looked along a cost, so that trials of different levels do not compare."""
        return len(set(self.levels.tolist())) > 1

    def tip(self, row: int) -> str:
        trial = self.table.iloc[row]
        value = f"{self.by} {self.values[row]:.4g}" + ("" if self.whole[row] else " (estimate, stopped early)")
        return f"trial {int(trial['trial'])}, depth {trial['depth']:g}, {value}: {trial['edits'] or 'no edits'}"

    @cached_property
    def relative(self) -> Numbers:
        """(trials,): their measure, or in a search along a cost, times the least that was found at the same level.

        Within the budget, or at levels at which nothing is, of all; NaN where there is no trial to compare with.
        """
        if not self.has_levels:
            return self.values
        least = np.array([self._least(level) for level in self.levels])
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.where(least > 0, self.values / least, math.nan), dtype=np.float64)

    @cached_property
    def best_so_far(self) -> Numbers:
        """(trials,): the least `relative` value up to each trial, within the budget; NaN before there is one.

        Along a cost, the geometric mean over the levels, once all of them have a trial.
        """
        levels = list(dict.fromkeys(self.levels[self.within].tolist()))
        curves = []
        for level in levels:
            own = self.within & (self.levels == level) & np.isfinite(self.relative)
            curves.append(np.minimum.accumulate(np.where(own, self.relative, math.inf)))
        if not curves:
            return np.full(len(self), math.nan)
        table = np.array(curves)
        known = np.isfinite(table).all(axis=0)
        means = np.exp(np.mean(np.log(np.where(known & (table > 0), table, 1.0)), axis=0))
        return np.asarray(np.where(known, means if len(levels) > 1 else table[0], math.nan), dtype=np.float64)

    @cached_property
    def best_of_levels(self) -> list[int]:
        """Rows of the best within the budget, of each level or of all; the deepest level first."""
        found = []
        for level in sorted(set(self.levels.tolist()), reverse=True):
            rows = np.flatnonzero(self.within & (self.levels == level))
            if len(rows):
                found.append(int(rows[self.values[rows].argmin()]))
        return found

    @cached_property
    def ranked(self) -> list[int]:
        """Rows of those within the budget, the best first."""
        return [int(row) for row in np.argsort(self.values, kind="stable") if self.within[row]]

    @cached_property
    def good(self) -> list[int]:
        """Rows of the best tenth of all trials of every level that are within the budget, at least one of each."""
        found: list[int] = []
        for level in dict.fromkeys(self.levels.tolist()):
            count = max(1, math.ceil(_BEST_PART * (self.levels == level).sum()))
            rows = [row for row in self.ranked if self.levels[row] == level]
            found += rows[:count]
        return sorted(found)

    def spaces(self) -> list[str]:
        """Of all edits, in the order in which trials have them."""
        return list(dict.fromkeys(edit.space for choice in self.choices for edit in choice))

    def touched(self, space: str, layers: int, rows: Sequence[int]) -> Numbers:
        """(layers,): which share of some trials has an edit of a space on each layer."""
        found = np.zeros(layers)
        for row in rows:
            found[[*{layer for edit in self.choices[row] if edit.space == space for layer in edit.layers}]] += 1
        return found / max(1, len(rows))

    def shares(self, layers: int) -> pd.DataFrame:
        """(spaces, layers): which share of the good trials has an edit of a space on each layer."""
        spaces = self.spaces()
        found = [self.touched(space, layers, self.good) for space in spaces]
        return pd.DataFrame(np.reshape(found, (-1, layers)), index=spaces)

    def effects(self) -> list[EditEffect]:
        """Trials with each edit against those without, the surest differences first.

        The measure's logarithm, less its mean over the level's trials, is compared by Welch's t interval; stopped
        trials count with their estimates, for to leave them out would leave out the bad ones. It is what goes with an
        edit among the trials that a search chose to run, and no effect by itself: that is in terms.csv.
        """
        finite = np.isfinite(self.values) & (self.values > 0)
        logs = np.log(np.where(finite, self.values, 1.0))
        for level in set(self.levels.tolist()):
            own = finite & (self.levels == level)
            logs[own] -= logs[own].mean() if own.any() else 0.0
        edits = dict.fromkeys(edit for choice in self.choices for edit in choice)
        found = []
        for edit in edits:
            has = np.array([edit in choice for choice in self.choices])
            there = logs[finite & has]
            else_ = logs[finite & ~has]
            if min(len(there), len(else_)) >= _FEWEST and there.std() + else_.std() > 0:
                found.append(_effect(edit, there, else_))
        return sorted(found, key=lambda one: -abs(math.log(one.ratio)) / math.log(one.high / one.low))

    def _least(self, level: float) -> float:
        every = self.levels == level
        own = self.values[every & (self.within if (self.within & every).any() else self.whole)]
        if len(own):
            return float(own.min())
        return math.nan

    def _words(self, name: str) -> Iterator[str]:
        return (str(text) for text in self.table[name].fillna(""))

    def _flags(self, name: str) -> Flags:
        return np.array([str(value) in ("True", "1", "1.0") for value in self.table[name]])


def _effect(edit: Edit, there: Numbers, else_: Numbers) -> EditEffect:
    from scipy import stats  # half a second that a page without a search need not wait

    found: Any = stats.ttest_ind(there, else_, equal_var=False)
    low, high = found.confidence_interval(0.95)
    ratio = math.exp(there.mean() - else_.mean())
    return EditEffect(edit, len(there), ratio, math.exp(low), math.exp(high))
