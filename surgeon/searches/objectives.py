"""What a search minimises: divergence, perplexity, a task's error, or anything that a program costs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from surgeon.errors import did_you_mean
from surgeon.language.program import Program
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import QUANTITIES, Aspect, aspect_of
from surgeon.searches.trial import MeasuredProgram, Trial

ACCURACY = "accuracy"
DEFAULT = "divergence"


@dataclass(frozen=True)
class Objective:
    """Something to be made as small as can be; accuracy counts as the share of wrong answers, speedup as its inverse.

    Attributes:
        aspect: what it is, unless it is a task's accuracy.
        task: of lm-eval, as `accuracy:piqa` names it.
    """

    aspect: Aspect | None = None
    task: str | None = None

    def __str__(self) -> str:
        return f"{ACCURACY}:{self.task}" if self.aspect is None else str(self.aspect)

    @property
    def is_priced(self) -> bool:
        """Whether it follows from the program alone."""
        return self.aspect is not None and not self.aspect.quantity.measured

    @property
    def is_of_few(self) -> bool:
        """Whether it takes so long that only the best by divergence are measured: a task's accuracy, time here."""
        return self.task is not None

    def cost(self, program: Program, measured: MeasuredProgram, pricing: Pricing) -> float:
        """What it is of a program; less is better. Infinite where it is not known."""
        if self.aspect is None:
            accuracy = measured.more.get(str(self), math.nan)
            return math.inf if math.isnan(accuracy) else 1 - accuracy
        if self.is_priced:
            return pricing.price(self.aspect, program)
        value = float(getattr(measured, self.aspect.name))
        return math.inf if math.isnan(value) else value

    def of(self, trial: Trial, pricing: Pricing) -> float:
        """The same of a trial."""
        return self.cost(Program.parse(trial.proposal.key), trial.measured, pricing)

    def natural(self, cost: float) -> float:
        """The number as people know it: accuracy, speedup, or the cost itself."""
        if self.aspect is None:
            return 1 - cost
        return 1 / cost if self.aspect.quantity.upward and cost else cost

    @property
    def label(self) -> str:
        """With its unit, for the axis of a picture."""
        units = {"divergence": "divergence from the original (nats/token)", "depth": "effective depth (layers)"}
        if self.aspect is None:
            return f"accuracy on {self.task}"
        unit = " (per token)" if self.aspect.name == "latency" else ""
        return units.get(self.aspect.name, str(self.aspect) + unit)


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """What a user wants to be minimised, with commas between.

    Raises:
        ValueError: if one is unknown, lacks its task or its hardware, or is there twice.
    """
    found: list[Objective] = []
    for part in text.split(","):
        objective = _objective(part.strip())
        if objective in found:
            raise ValueError(f"objective {text!r} names {objective} twice; keep one")
        found.append(objective)
    return tuple(found)


def _objective(text: str) -> Objective:
    name, colon, task = text.partition(":")
    if name == ACCURACY:
        if not task:
            raise ValueError(f"objective {text!r} is on a task; say on which, as in {ACCURACY}:piqa")
        return Objective(task=task)
    if colon and name in QUANTITIES:
        raise ValueError(f"objective {text!r}: only {ACCURACY} is of a task; write {name}")
    name, _, on = text.partition("@")
    if name not in QUANTITIES:
        known = (*QUANTITIES, f"{ACCURACY}:TASK")
        raise ValueError(f"unknown objective {name!r}; {did_you_mean(name, known)}")
    return Objective(aspect_of(name, on or None, text))


def aspects_to_price(objectives: Iterable[Objective]) -> tuple[Aspect, ...]:
    """What a `Pricing` has to know for these objectives."""
    return tuple(one.aspect for one in objectives if one.aspect is not None and one.is_priced)
