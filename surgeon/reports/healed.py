"""What healing regained of what an edit lost, from a run's record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

NO_INTERVAL = (math.nan, math.nan)


@dataclass(frozen=True)
class WithInterval:
    """A number with the ends of its 95% interval; NaN where they are not known."""

    value: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        """Whether it is known how far off it may be."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def overlaps(self, other: WithInterval) -> bool:
        """Whether both intervals are known and have a value in common."""
        known = self.has_interval and other.has_interval
        return known and self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class OnHeldOut:
    """A model on held-out text: as it was, as edited, or as healed.

    Attributes:
        divergence: from the original, whose own is 0; NaN where the original is not known.
    """

    perplexity: WithInterval
    divergence: WithInterval
    tokens: int

    @classmethod
    def of(cls, stored: dict[str, Any], original: bool = False) -> OnHeldOut:
        """From what `TextQuality.to_json` wrote.

        Raises:
            ValueError: if a perplexity is not above 0.
        """
        perplexity = _measured(stored, "perplexity")
        divergence = WithInterval(0.0, 0.0, 0.0) if original else _measured(stored, "divergence")
        if not perplexity.value > 0:
            raise ValueError(f"a perplexity of {perplexity.value:g} is not above 0")
        return cls(perplexity, divergence, int(stored["tokens"]))


def _measured(stored: dict[str, Any], name: str) -> WithInterval:
    ends = stored.get(f"{name}_interval") or NO_INTERVAL
    low, high = (float(end) for end in ends)
    return WithInterval(math.nan if stored[name] is None else float(stored[name]), low, high)


@dataclass(frozen=True)
class Regained:
    """How much of what the edit lost is back.

    Attributes:
        share: 0 as edited, 1 as good as the original; below 0 training has made it worse. NaN where nothing was lost.
        low, high: the least and the most that it can be with both numbers inside their intervals, which is a wider
            range than a 95% interval of the share; NaN where that is not known.
        certain: the loss itself lies outside what the intervals leave open. Where it does not, a share of it says
            little.
    """

    share: float
    low: float
    high: float
    certain: bool

    @property
    def is_known(self) -> bool:
        """Whether anything was lost of which a share could be told."""
        return math.isfinite(self.share)


NOTHING = Regained(math.nan, math.nan, math.nan, certain=False)


@dataclass(frozen=True)
class Healing:
    """One run: the three models on the same held-out text; the original is None where it is not known."""

    original: OnHeldOut | None
    edited: OnHeldOut
    healed: OnHeldOut

    @classmethod
    def of(cls, record: dict[str, Any]) -> Healing:
        """From `run.json`; errors as in `OnHeldOut.of`."""
        original = None if record["original"] is None else OnHeldOut.of(record["original"], original=True)
        return cls(original, OnHeldOut.of(record["edited"]), OnHeldOut.of(record["healed"]))

    @property
    def of_perplexity(self) -> Regained | None:
        """Of log-perplexity, (edited - healed) / (edited - original); None where the original is not known.

        The intervals are of each model by itself over the same windows, and so much wider than that of a difference;
        no range of the share follows from them.
        """
        if self.original is None:
            return None
        original, edited, healed = (s.perplexity for s in (self.original, self.edited, self.healed))
        lost = _log(edited.value) - _log(original.value)
        if not (math.isfinite(lost) and lost > 0):
            return NOTHING
        share = (_log(edited.value) - _log(healed.value)) / lost
        return Regained(share, *NO_INTERVAL, certain=edited.has_interval and not edited.overlaps(original))

    @property
    def of_divergence(self) -> Regained | None:
        """Of divergence, (edited - healed) / edited: that of the original from itself is 0."""
        edited, healed = self.edited.divergence, self.healed.divergence
        if math.isnan(edited.value):
            return None
        if not (math.isfinite(edited.value) and edited.value > 0):
            return NOTHING
        certain = edited.has_interval and edited.low > 0
        ends = (1 - healed.high / edited.low, 1 - healed.low / edited.high) if certain else NO_INTERVAL
        return Regained(1 - healed.value / edited.value, *ends, certain=certain)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
