"""What a search may spend: depth=12,latency<=12ms@h100-sxm,divergence<=0.02,params=0.8x on the command line."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from surgeon.language.program import Program
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import DRAFT, Aspect, aspect_of
from surgeon.searches.trial import MeasuredProgram
from surgeon.words import plural

_LIMIT = re.compile(r"(?P<name>[^=<>@\s]+)\s*(?P<sign>=|<=|>=)\s*(?P<amount>[^@\s]*)\s*(?:@\s*(?P<on>.+))?")
_NEAR = 1e-9  # in parts of a limit: what sums round


@dataclass(frozen=True)
class Limit:
    """The most that one quantity may cost.

    Attributes:
        amount: a cost as `Quantity` has it, or of relative limits, in parts of the unedited model's.
        text: as the user wrote it.
    """

    aspect: Aspect
    amount: float
    relative: bool
    text: str

    def __str__(self) -> str:
        return self.text

    def most(self, dense: float) -> float:
        """The limit, given the unedited model's cost."""
        if self.relative:
            return self.amount * dense
        return self.amount


def parse_limits(text: str) -> tuple[Limit, ...]:
    """The limits that a user writes, with commas between them.

    `=` is a limit like `<=`, or for a speedup like `>=`; behind a number, `x` is in parts of the unedited model's. A
    depth may have both: `depth>=20` is for a model that is to be deeper.

    Raises:
        ValueError: if one cannot be read, its quantity is unknown, it limits nothing, or one is limited twice.
    """
    limits = tuple(_limit(part.strip()) for part in text.split(","))
    for number, limit in enumerate(limits):
        for other in limits[:number]:
            if other.aspect == limit.aspect:
                raise ValueError(f"budget {text!r} limits {limit.aspect} twice, by {other} and {limit}; keep one")
    return limits


def _limit(text: str) -> Limit:
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise ValueError(f"budget {text!r} should be a quantity and a value, as in depth=12 or latency=12ms@h100-sxm")
    name, sign, amount, on = match.group("name", "sign", "amount", "on")
    aspect = aspect_of(name, on, text)
    if aspect.name == DRAFT:
        raise ValueError(
            f"budget {text!r}: a {DRAFT} is an objective, and no limit; leave it out, and ask for it as such"
        )
    aspect = replace(aspect, deep=aspect.name == "depth" and sign == ">=")
    if sign == ("<=" if aspect.quantity.upward else ">="):
        raise ValueError(
            f"budget {text!r} is no limit to what a search may spend; write {name}{'>=' if sign == '<=' else '<='}"
            f"{amount}{'' if on is None else '@' + on}"
        )
    try:
        return _read(aspect, amount, text)
    except ValueError as error:
        raise ValueError(f"budget {text!r}: {error}") from None


def _read(aspect: Aspect, amount: str, text: str) -> Limit:
    quantity = aspect.quantity
    if quantity.timed and quantity.upward:
        cost = quantity.read(amount)
        if cost >= 1:
            raise ValueError("it should be a number above 1, of times as fast as the unedited model")
        return Limit(aspect, cost, relative=False, text=text)
    if not amount.endswith("x"):
        return Limit(aspect, quantity.read(amount), relative=False, text=text)
    if not quantity.divides:
        raise ValueError(f"the unedited model's {aspect.name} is 0; write a number without x, as in {aspect.name}=0.02")
    try:
        share = float(amount[:-1])
    except ValueError:
        share = math.nan
    if not aspect.is_priced and not 1 <= share < math.inf:
        raise ValueError(f"{amount} of the unedited model's should be at least 1x, such as 1.05x")
    if aspect.deep and not 0 < share < math.inf:
        raise ValueError(f"{amount} of the unedited model's should be above 0, such as 1x or 1.25x")
    if aspect.is_priced and not aspect.deep and not 0 < share <= 1:
        raise ValueError(f"{amount} of the unedited model's should be above 0 and at most 1x, such as 0.8x")
    return Limit(aspect, share, relative=True, text=text)


@dataclass(frozen=True)
class SearchBudget:
    """Limits to a model's programs; checked as it is made.

    Attributes:
        pricing: of the aspects of all limits on what programs cost by themselves, and perhaps of others.

    Raises:
        ValueError: if the unedited model has nothing of what is limited.
    """

    limits: tuple[Limit, ...]
    pricing: Pricing

    def __post_init__(self) -> None:
        for limit in self.of_programs:
            if self.dense(limit) == 0:
                on = plural(self.pricing.deployment.ranks, "rank")
                raise ValueError(f"budget {limit}: the unedited model has {limit.aspect} 0 on {on}")

    def __str__(self) -> str:
        return ",".join(map(str, self.limits))

    @cached_property
    def of_programs(self) -> tuple[Limit, ...]:
        """Limits on what follows from a program alone."""
        return tuple(limit for limit in self.limits if limit.aspect.is_priced)

    @cached_property
    def of_quality(self) -> tuple[Limit, ...]:
        return tuple(limit for limit in self.limits if not limit.aspect.is_priced)

    def dense(self, limit: Limit) -> float:
        """What the unedited model costs of what one of `of_programs` limits."""
        return self._dense[limit.aspect]

    @cached_property
    def _dense(self) -> dict[Aspect, float]:
        return dict(zip(self.pricing.aspects, self.pricing.dense, strict=True))

    def most(self, limit: Limit) -> float:
        """The cost that one of `of_programs` allows."""
        return limit.most(self.dense(limit))

    def cost(self, limit: Limit, program: Program) -> float:
        """What a program costs of what one of `of_programs` limits."""
        return self.pricing.price(limit.aspect, program)

    def shortfalls(self, program: Program) -> tuple[float, ...]:
        """How far a program is from each of `of_programs`: 1 as far as the unedited model, 0 within the limit.

        Where the unedited model is within a limit, it is in parts of that limit. Infinite where the ranks cannot run
        the program.
        """
        return tuple(
            _shortfall(self.cost(limit, program), self.most(limit), self.dense(limit)) for limit in self.of_programs
        )

    def quality_shortfalls(self, measured: MeasuredProgram, original: MeasuredProgram) -> tuple[float, ...]:
        """How far a measured program is from each of `of_quality`, in parts of the limit; 0 within it.

        Args:
            original: the unedited model, measured on the same text.
        """
        return tuple(
            _shortfall(limit.aspect.measured(measured), limit.most(limit.aspect.measured(original)), math.inf)
            for limit in self.of_quality
        )

    def require_work(self) -> tuple[str, ...]:
        """What to know of limits that ask for nothing, one line each.

        Raises:
            ValueError: if there are limits on programs, and the unedited model is within all of them.
        """
        met = [limit for limit in self.of_programs if _within(self.dense(limit), self.most(limit))]
        said = [f"the unedited model has {limit.aspect.show(self.dense(limit))} already" for limit in met]
        if said and len(said) == len(self.of_programs):
            raise ValueError(f"budget {self}: {' and '.join(said)}; ask for {' and '.join(map(_more_of, met))}")
        kept = ("being shallower" if limit.aspect.deep else "needing more" for limit in met)
        notes = zip(met, said, kept, strict=True)
        return tuple(f"{limit}: {words}; it only keeps programs from {what}" for limit, words, what in notes)


def _more_of(limit: Limit) -> str:
    """What to ask for in the place of a limit that the unedited model is within."""
    if limit.aspect.deep:
        return "more"
    deeper = limit.aspect.name == "depth" and not limit.relative
    if deeper:
        return f"less, or for a deeper model by depth>={limit.amount:g}"
    return "less"


def _shortfall(cost: float, most: float, dense: float) -> float:
    if _within(cost, most):
        return 0.0
    return (cost - most) / (dense - most if most < dense < math.inf else abs(most))


def _within(cost: float, most: float) -> bool:
    return cost <= most + _NEAR * abs(most)
