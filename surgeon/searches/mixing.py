"""What mixing wins: the best program of several spaces together against the best of one space alone, at equal cost.

Both are the best of many on the text of the search, so that they are compared on held-out text, window by window. The
intervals of all levels hold together with 95% (Bonferroni), and mixing is said to win only where one excludes 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from surgeon.language.program import Program
from surgeon.quality.summary import CONFIDENCE, interval
from surgeon.results.trials import MOST_DIVERGENCE
from surgeon.searches.front import TOGETHER, QualityCurve
from surgeon.searches.quantities import Aspect
from surgeon.searches.trial import MeasuredProgram, Trial
from surgeon.words import listed


@dataclass(frozen=True)
class MixedLevel:
    """At one level of a cost the best of all spaces together, and the best of one alone.

    Attributes:
        cost: neither program has more of `along`.
        space: of the one alone.
        alone: None where no space by itself comes to this level.
    """

    along: Aspect
    cost: float
    together: Trial
    space: str
    alone: Trial | None

    @property
    def programs(self) -> list[Program]:
        return [trial.program for trial in (self.together, self.alone) if trial is not None]


@dataclass(frozen=True)
class MixingGain:
    """The two programs of a level, measured.

    Attributes:
        held_out: whether on text that the search did not see.
        together, alone: divergences in nats per token; `alone` is NaN where there is no such program.
        difference: together less alone, below 0 where mixing wins.
        low, high: its interval; those of all levels hold together with 95%.
    """

    level: MixedLevel
    held_out: bool
    together: float
    alone: float
    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> Literal["better", "not told apart", "worse", "the same program", "only together"]:
        """What the mixture is, compared with the best single space."""
        if self.level.alone is None:
            return "only together"
        if self.level.alone.number == self.level.together.number:
            return "the same program"
        if self.high < 0:
            return "better"
        return "worse" if self.low > 0 else "not told apart"

    @property
    def lower_by(self) -> float:
        """By which part the mixture's divergence is lower; NaN where there is nothing to compare with."""
        return 1 - self.together / self.alone if self.alone > 0 else math.nan

    def line(self) -> str:
        """In words, where two programs are told apart, or there is none of one space alone."""
        level, at = self.level, f"at {self.level.along.show(self.level.cost)}"
        if level.alone is None:
            return f"{at}: {self.together:.4g} (trial {level.together.number}); no space alone comes so far"
        apart = f"{abs(self.lower_by):.0%} {'lower' if self.lower_by > 0 else 'higher'}"
        return (
            f"{at}: {self.together:.4g} together (trial {level.together.number}), {self.alone:.4g} by {level.space} "
            f"alone (trial {level.alone.number}): {apart}, difference {self.difference:+.2g} "
            f"(interval {self.low:+.2g} to {self.high:+.2g}), {self.verdict}"
        )

    def to_json(self) -> dict[str, Any]:
        level = self.level
        return {
            "along": str(level.along),
            "cost": level.along.natural(level.cost),
            "trial": level.together.number,
            "together": self.together,
            "space": level.space,
            "alone_trial": None if level.alone is None else level.alone.number,
            "alone": self.alone,
            "lower_by": self.lower_by,
            "difference": self.difference,
            "difference_low": self.low,
            "difference_high": self.high,
            "verdict": self.verdict,
            "held_out": self.held_out,
        }


def mixed_levels(curves: Sequence[QualityCurve], levels: Mapping[Aspect, Sequence[float]]) -> list[MixedLevel]:
    """What there is to compare: for each level the programs of least divergence, as far as it is below 1 nat.

    Of levels with the same two programs the cheapest.

    Args:
        curves: of each cost that was looked along, for each space and for all.
        levels: of each of these costs, the dearest first.
    """
    found: dict[tuple[Aspect, int, int | None], MixedLevel] = {}
    for along, costs in levels.items():
        own = {curve.name: curve for curve in curves if curve.along == along}
        every = own.pop(TOGETHER, None)
        for cost in costs:
            best = None if every is None else every.best(cost)
            if best is None or best.trial is None or best.divergence > MOST_DIVERGENCE:
                continue
            single = {name: point for name, curve in own.items() if (point := curve.best(cost)) is not None}
            space = min(single, key=lambda name: single[name].divergence, default="")
            alone = single[space].trial if space else None
            key = along, best.trial.number, None if alone is None else alone.number
            found[key] = MixedLevel(along, cost, best.trial, space, alone)
    return list(found.values())


def mixing_gains(
    levels: Sequence[MixedLevel], unseen: Mapping[Program, MeasuredProgram] | None = None
) -> list[MixingGain]:
    """By how much the programs of each level differ.

    Args:
        unseen: all of their programs on held-out text; without it they are compared on the text of the search.
    """
    compared = sum(level.alone is not None and level.alone.number != level.together.number for level in levels)
    confidence = 1 - (1 - CONFIDENCE) / max(1, compared)
    found = []
    for level in levels:
        together, *others = (
            trial.measured if unseen is None else unseen[trial.program]
            for trial in (level.together, level.alone)
            if trial is not None
        )
        alone = difference = low = high = math.nan
        for other in others:
            differences = np.array(together.divergences) - np.array(other.divergences)
            alone, difference = other.divergence, float(differences.mean())
            low, high = interval(differences, confidence)
        found.append(MixingGain(level, unseen is not None, together.divergence, alone, difference, low, high))
    return found


def gains_in_words(gains: Sequence[MixingGain]) -> list[str]:
    """For each cost a sentence on all of its levels, one for each that is told apart, and one on those that are not."""
    found = []
    for along in dict.fromkeys(gain.level.along for gain in gains):
        own = [gain for gain in gains if gain.level.along == along]
        wins = [gain for gain in own if gain.verdict in ("better", "only together")]
        most = max((gain for gain in wins if gain.verdict == "better"), key=lambda gain: gain.lower_by, default=None)
        text = "held-out text" if own[0].held_out else "the text that they were chosen on"
        by = "" if most is None else f", most at {along.show(most.level.cost)}, where it is {most.lower_by:.0%} lower"
        found.append(
            f"mixing spaces has less divergence than the best space alone at {len(wins)} of {len(own)} levels of "
            f"{along}{by} ({text}; {CONFIDENCE:.0%} for all intervals at once)"
        )
        found += [gain.line() for gain in own if gain.verdict not in ("the same program", "not told apart")]
        alike = [along.show(gain.level.cost) for gain in own if gain.verdict == "not told apart"]
        found += [f"not told apart at {listed(alike)}"] if alike else []
    return found
