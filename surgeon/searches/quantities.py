"""Quantities that a search limits or minimises: priced by a program alone, or measured of it.

Every quantity is a cost, of which less is better: a speedup of 1.25 is 0.8 of the unedited model's time, an accuracy
the share of wrong answers. Per token is of one more token of one text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surgeon.machine import parse_size, show_size
from surgeon.words import did_you_mean

if TYPE_CHECKING:  # who reads quantities does without numpy
    from surgeon.language.program import Program
    from surgeon.quality.summary import Quality

HERE = "here"  # in the place of a hardware: this machine
DRAFT = "draft"
DRAFT_PASS = "draft_pass"
_LIMIT = re.compile(
    r"(?P<name>[^=<>@\s]+)\s*(?P<sign>=|<=|>=)\s*(?P<amount>[^@\s]*)\s*(?:@\s*(?P<on>.+))?"
)
NEAR = 1e-9  # in parts of a cost: what sums round
_THOUSANDS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Quantity:
    """A number of every program.

    Attributes:
        read: a cost from a user's text; ValueError with a fix.
        show: a cost for people.
        price: its cost by a `Pricing`, a program, and a hardware where it is `timed`; ValueError where the ranks cannot
            run the program. None: it is measured.
        measure: its cost by a program's quality and the aspect's name; NaN where that is not known.
        timed: whether it is of a hardware.
        upward: whether more is better: its cost is its inverse, or of a depth its negative.
        divides: whether limits can be written in parts of the unedited model's.
    """

    name: str
    read: Callable[[str], float]
    show: Callable[[float], str]
    price: Callable[[Any, Program, str], float] | None = None
    measure: Callable[[Quality, str], float] | None = None
    timed: bool = False
    upward: bool = False
    divides: bool = True


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{text!r} is no number; write one of at least 0, such as 12 or 0.02")
    return value


def _layers(text: str) -> float:
    value = _number(text)
    if value <= 0 or 2 * value != int(2 * value):
        raise ValueError(f"{text!r} is no depth; write whole or half layers, such as 12 or 11.5")
    return value


def _whole(text: str) -> float:
    value = _number(text)
    if value != int(value):
        raise ValueError(f"{text!r} should be a whole number")
    return value


def _parameters(text: str) -> float:
    scale = text[-1:].upper() if text[-1:].isalpha() else ""
    if scale not in _THOUSANDS:
        raise ValueError(f"{text!r} is no number of parameters; write e.g. 3M, 6.7B or 2097152")
    return _number(text[: len(text) - len(scale)]) * _THOUSANDS[scale]


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise ValueError(f"{text!r} should be above 0")
    return value


def _times(text: str) -> float:
    return 1 / _positive(text.removesuffix("x"))


def _seconds(text: str) -> float:
    # Imports torch, which commands do without until they run.
    from surgeon.runtime.comm.collectives import parse_seconds

    return parse_seconds(text)


def show_seconds(seconds: float) -> str:
    """A time for people: 12.3 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def _show_number(value: float) -> str:
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _show_times(cost: float) -> str:
    if cost:
        return f"{1 / cost:.4g}x"
    return "infinite"


QUANTITIES = {
    quantity.name: quantity
    for quantity in (
        # Steps one after the other, in layers of the model.
        Quantity("depth", _layers, "{:g}".format, lambda costs, program, _: costs.depth(program)),
        # Synchronisations of one forward pass on the ranks.
        Quantity(
            "syncs",
            _whole,
            _show_number,
            lambda costs, program, _: program.sync_points(costs.deployment.ranks),
        ),
        # Of the layers' matrices, each counted once.
        Quantity(
            "params", _parameters, _show_number, lambda costs, program, _: costs.parameters(program)
        ),
        # That these take, as the model stores them.
        Quantity(
            "weight_bytes",
            parse_size,
            show_size,
            lambda costs, program, _: costs.parameters(program) * costs.stored_bytes,
        ),
        # Of the whole model's weights, as it stores them.
        Quantity(
            "size",
            parse_size,
            show_size,
            lambda costs, program, _: (
                (costs.parameters(program) + costs.model.shapes.outside_layers) * costs.stored_bytes
            ),
        ),
        # That a mixture has, the mean over the model's mixtures.
        Quantity("experts", _number, "{:.4g}".format, lambda costs, program, _: costs.experts(program)),
        # That all ranks together cache of one token.
        Quantity("kv_bytes", parse_size, show_size, lambda costs, program, _: costs.kept_bytes(program)),
        # That a rank sums or gathers per token.
        Quantity(
            "wire_bytes", parse_size, show_size, lambda costs, program, _: costs.sent_bytes(program)
        ),
        # Seconds per token, predicted or measured here.
        Quantity(
            "latency",
            _seconds,
            show_seconds,
            lambda costs, program, on: costs.seconds(program, on),
            timed=True,
        ),
        # Times the unedited model's tokens per second.
        Quantity(
            "speedup",
            _times,
            _show_times,
            lambda costs, program, on: (
                costs.seconds(program, on) / costs.seconds(costs.model.program, on)
            ),
            timed=True,
            upward=True,
            divides=False,
        ),
        # Seconds of a pass that drafts a token of every text, beside the unedited model's keys and values.
        Quantity(
            DRAFT_PASS,
            _seconds,
            show_seconds,
            lambda costs, program, on: costs.seconds(program, on, costs.drafting(on).plan(program)),
            timed=True,
        ),
        # Times the unedited model's tokens per second, with the same text, where the program drafts for it.
        Quantity(
            DRAFT,
            _times,
            _show_times,
            measure=lambda found, _: found.more.get("draft_time", math.nan),
            timed=True,
            upward=True,
            divides=False,
        ),
        # From the unedited model, nats per token.
        Quantity(
            "divergence",
            _positive,
            "{:.4g} nats".format,
            measure=lambda found, _: found.divergence,
            divides=False,
        ),
        # Quality on the text.
        Quantity("perplexity", _positive, "{:.4g}".format, measure=lambda found, _: found.perplexity),
    )
}


_DEEP = Quantity(
    "depth",
    lambda text: -_layers(text),
    lambda cost: f"{-cost:g}",
    lambda costs, program, _: -costs.depth(program),
    upward=True,
)
ACCURACY = "accuracy"  # of a task; it takes so long that only the best by divergence are measured
_ACCURACY = Quantity(
    ACCURACY, _number, "{:.4g}".format, measure=lambda found, name: 1 - found.more.get(name, math.nan)
)
_UNITS = {"divergence": "divergence from the original (nats/token)", "depth": "effective depth (layers)"}


@dataclass(frozen=True, order=True)
class Aspect:
    """A quantity, on a hardware where it is one of time, on a task where it is an accuracy: depth, latency@h100-sxm.

    Attributes:
        name: of the quantity.
        on: the hardware's name or file, or `HERE`; of an accuracy, lm-eval's task.
        deep: of a depth, whether more is better.
    """

    name: str
    on: str | None = None
    deep: bool = False

    def __str__(self) -> str:
        if self.on is None:
            return self.name
        return f"{self.name}{':' if self.name == ACCURACY else '@'}{self.on}"

    @property
    def quantity(self) -> Quantity:
        if self.deep:
            return _DEEP
        if self.name == ACCURACY:
            return _ACCURACY
        return QUANTITIES[self.name]

    @property
    def is_priced(self) -> bool:
        return self.quantity.price is not None

    def read_cost(self, found: Quality) -> float:
        """Read its cost from a program's quality; infinite where that is not known."""
        measure = self.quantity.measure
        assert measure is not None, f"{self} follows from a program"
        value = measure(found, str(self))
        if math.isnan(value):
            return math.inf
        return value

    def natural(self, cost: float) -> float:
        """Convert a cost to the number that people know: accuracy, speedup, or the cost itself."""
        if self.name == ACCURACY:
            return 1 - cost
        if self.deep:
            return -cost
        if self.quantity.upward and cost:
            return 1 / cost
        return cost

    @property
    def label(self) -> str:
        """Name and unit, for the axis of a picture."""
        if self.name == ACCURACY:
            return f"accuracy on {self.on}"
        return _UNITS.get(self.name, f"{self}{' (per token)' if self.name == 'latency' else ''}")

    def show(self, cost: float) -> str:
        return f"{self.name} {self.quantity.show(cost)}" + (f"@{self.on}" if self.on else "")


DEPTH = Aspect("depth")
SIZE = Aspect("size")
DIVERGENCE = Aspect("divergence")


def aspect_of(name: str, on: str | None, text: str) -> Aspect:
    """Make an aspect of a user's text; ValueError for an unknown quantity, or a hardware missing or needless."""
    if name not in QUANTITIES:
        raise ValueError(f"unknown quantity {name!r} in {text!r}; {did_you_mean(name, QUANTITIES)}")
    if name == DRAFT and not on:
        on = HERE
    if QUANTITIES[name].timed and not on:
        raise ValueError(
            f"{text!r}: a {name} is predicted on a hardware; say on which, as in {text}@h100-sxm, or measured on this "
            f"machine: {text}@{HERE}"
        )
    if on and not QUANTITIES[name].timed:
        raise ValueError(f"{text!r}: {name} is the same on any hardware; leave @{on} out")
    return Aspect(name, on or None)


def parse_objectives(text: str) -> tuple[Aspect, ...]:
    """Parse objectives, with commas between.

    Raises:
        ValueError: if one is unknown, lacks its task or its hardware, or is there twice.
    """
    found: list[Aspect] = []
    for part in map(str.strip, text.split(",")):
        before, colon, task = part.partition(":")
        name, _, on = part.partition("@")
        if before == ACCURACY:
            if not task:
                raise ValueError(f"objective {part!r} is on a task; say on which, as in {ACCURACY}:piqa")
            objective = Aspect(ACCURACY, task)
        elif colon and before in QUANTITIES:
            raise ValueError(f"objective {part!r}: only {ACCURACY} is of a task; write {before}")
        elif name not in QUANTITIES:
            raise ValueError(
                f"unknown objective {name!r}; {did_you_mean(name, (*QUANTITIES, f'{ACCURACY}:TASK'))}"
            )
        else:
            objective = aspect_of(name, on or None, part)
        if objective in found:
            raise ValueError(f"objective {text!r} names {objective} twice; keep one")
        found.append(objective)
    return tuple(found)


@dataclass(frozen=True)
class Limit:
    """The most that one quantity may cost.

    Attributes:
        amount: a cost, or of relative limits, in parts of the unedited model's.
        text: as the user wrote it.
    """

    aspect: Aspect
    amount: float
    relative: bool
    text: str

    def __str__(self) -> str:
        return self.text

    def most(self, dense: float) -> float:
        if self.relative:
            return self.amount * dense
        return self.amount

    def shortfall(self, cost: float, dense: float) -> float:
        """The distance of a cost from the limit: 0 within it, 1 as far as the unedited model's cost.

        Where that is within the limit, or measured, in parts of the limit.
        """
        most = self.most(dense)
        if cost <= most + NEAR * abs(most):
            return 0.0
        if most < dense < math.inf and self.aspect.is_priced:
            return (cost - most) / (dense - most)
        return (cost - most) / abs(most)

    def lack(self, measured: Quality, original: Quality) -> float:
        """The shortfall of a measured program, given the unedited model on the same text."""
        return self.shortfall(self.aspect.read_cost(measured), self.aspect.read_cost(original))


def select_priced(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """Select the limits on programs; the others are on their quality."""
    return tuple(limit for limit in limits if limit.aspect.is_priced)


def parse_limits(text: str) -> tuple[Limit, ...]:
    """Parse limits, with commas between.

    `=` is a limit like `<=`, or for a speedup like `>=`; behind a number, `x` is in parts of the unedited model's. A
    depth may have both: `depth>=20` is for a model that is to be deeper.

    Raises:
        ValueError: if one cannot be read, its quantity is unknown, it limits nothing, or one is limited twice.
    """
    limits: dict[Aspect, Limit] = {}
    for part in map(str.strip, text.split(",")):
        match = _LIMIT.fullmatch(part)
        if match is None:
            raise ValueError(
                f"budget {part!r} should be a quantity and a value, as in depth=12 or latency=12ms@h100-sxm"
            )
        name, sign, amount, on = match.group("name", "sign", "amount", "on")
        aspect = aspect_of(name, on, part)
        if aspect.name == DRAFT:
            raise ValueError(
                f"budget {part!r}: a {DRAFT} is an objective, and no limit; leave it out, and ask for it as such"
            )
        aspect = replace(aspect, deep=aspect.name == "depth" and sign == ">=")
        if sign == ("<=" if aspect.quantity.upward else ">="):
            raise ValueError(
                f"budget {part!r} is no limit to what a search may spend; write "
                f"{name}{'>=' if sign == '<=' else '<='}{amount}{'' if on is None else '@' + on}"
            )
        try:
            limit = _read(aspect, amount, part)
        except ValueError as error:
            raise ValueError(f"budget {part!r}: {error}") from None
        other = limits.setdefault(aspect, limit)
        if other is not limit:
            raise ValueError(f"budget {text!r} limits {aspect} twice, by {other} and {limit}; keep one")
    return tuple(limits.values())


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
        raise ValueError(
            f"the unedited model's {aspect.name} is 0; write a number without x, as in {aspect.name}=0.02"
        )
    try:
        share = float(amount[:-1])
    except ValueError:
        share = math.nan
    if not aspect.is_priced and not 1 <= share < math.inf:
        raise ValueError(f"{amount} of the unedited model's should be at least 1x, such as 1.05x")
    if aspect.deep and not 0 < share < math.inf:
        raise ValueError(f"{amount} of the unedited model's should be above 0, such as 1x or 1.25x")
    if aspect.is_priced and not aspect.deep and not 0 < share <= 1:
        raise ValueError(
            f"{amount} of the unedited model's should be above 0 and at most 1x, such as 0.8x"
        )
    return Limit(aspect, share, relative=True, text=text)
