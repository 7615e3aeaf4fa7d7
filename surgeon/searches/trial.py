"""What a search asks, and what it learns: proposals, measurements, trials."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from surgeon.findings.edit import Choice, Edit
from surgeon.language.program import Program
from surgeon.quality.summary import Quality, Values

_BY_PLACE = ("nll", "divergences", "blocks", "draft_times")  # of the text


@dataclass(frozen=True)
class MeasuredProgram:
    """How well a program predicts.

    Attributes:
        divergence_low, divergence_high: of the divergence (nats per token), the 95% interval; NaN: not known.
        tokens: that were predicted in all.
        nll, divergences: by window, in the order of the text, of as many windows as were run.
        blocks: the same as `divergences` by smaller parts of the windows, which races look at; nothing where windows
            are many.
        acceptances: by window, too, of what the program would draft for the original, by name.
        draft_times: by window, too: of a token, where the program drafts for the unedited model, in parts of that one's
            (`searches.drafting.valued`); nothing where that is not asked for, or it cannot.
        whole: whether those were all; else it was stopped, being worse than the best, and the numbers are estimates.
        more: what else was measured of it, by name: a task's accuracy, say.
    """

    perplexity: float
    divergence: float
    divergence_low: float
    divergence_high: float
    tokens: int
    nll: tuple[float, ...] = ()
    divergences: tuple[float, ...] = ()
    blocks: tuple[float, ...] = ()
    acceptances: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    draft_times: tuple[float, ...] = ()
    whole: bool = True
    more: Mapping[str, float] = field(default_factory=dict)

    def acceptance(self, name: str) -> float:
        """One of the acceptances, the mean over the windows that were run; NaN: it was not measured."""
        if name in self.acceptances:
            return fmean(self.acceptances[name])
        return math.nan

    @property
    def draft_time(self) -> float:
        """The mean of `draft_times`; NaN where there are none."""
        if self.draft_times:
            return fmean(self.draft_times)
        return math.nan

    def to_json(self) -> dict[str, Any]:
        """As JSON values (infinities and NaN among them)."""
        return asdict(self)

    @classmethod
    def of(cls, found: Quality, tokens: int, nll: Values, divergences: Values, **more: Any) -> MeasuredProgram:
        """What was estimated from the windows that were run.

        Args:
            nll, divergences: (windows,) each.
            more: further fields.
        """
        known = found.perplexity, found.divergence, found.divergence_low, found.divergence_high
        return cls(*known, tokens, tuple(nll.tolist()), tuple(divergences.tolist()), **more)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MeasuredProgram:
        accepted = {name: tuple(own) for name, own in values.get("acceptances", {}).items()}
        read = {name: tuple(values.get(name, ())) for name in _BY_PLACE}
        return cls(**{**values, **read, "acceptances": accepted})


@dataclass(frozen=True)
class Proposal:
    """A program to try.

    Attributes:
        key: the program's text: equal programs are tried once.
        source: where the choice comes from, one of `surgeon.findings.edit.SOURCES`.
        level: for which budget it was made, where a search has several: the effective depth, say.
    """

    key: str
    source: str
    choice: Choice
    level: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "source": self.source, "choice": [*map(str, self.choice)], "level": self.level}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Proposal:
        return cls(values["key"], values["source"], tuple(map(Edit.parse, values["choice"])), values["level"])


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Attributes:
        number: its place in the order in which trials were asked for.
    """

    number: int
    proposal: Proposal
    measured: MeasuredProgram

    @property
    def program(self) -> Program:
        return Program.parse(self.proposal.key)
