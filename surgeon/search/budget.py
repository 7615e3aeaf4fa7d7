"""What a search may spend: depth=12, latency=12ms@h100-sxm or speedup>=1.3@h100-sxm on the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from surgeon.errors import did_you_mean
from surgeon.runtime.comm.link import parse_seconds

QUANTITIES = ("depth", "latency", "speedup")
_BUDGET = re.compile(r"\s*(?P<name>[^=<>\s]+)\s*(?P<sign>=|<=|>=)\s*(?P<value>[^@\s]*)\s*(?:@\s*(?P<hardware>.+?)\s*)?")

# Seconds per token of a model some of whose layers run in so many pairs; it is asked only if the budget is one of time.
Price = Callable[[int], float]


class Budget(Protocol):
    """Something that LP pairs bring a model to."""

    @property
    def hardware(self) -> str | None:
        """On what time is predicted; None if the budget is none of time."""

    def pairs_needed(self, num_layers: int, price: Price) -> int:
        """How many LP pairs bring a model of this many layers to the budget: each saves one layer of depth.

        Raises:
            ValueError: if none are needed, or if so many do not fit; it says how far pairs come.
        """


def parse_budget(text: str) -> Budget:
    """Read a budget.

    Raises:
        ValueError: if the quantity is unknown or its value is none.
    """
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise ValueError(f"budget {text!r} should be a quantity and a value, as in depth=12 or latency=12ms@h100-sxm")
    name, sign, value, hardware = match.group("name", "sign", "value", "hardware")
    if name not in QUANTITIES:
        raise ValueError(f"unknown budget {name!r}; {did_you_mean(name, QUANTITIES)}")
    if sign == {"depth": ">=", "latency": ">=", "speedup": "<="}[name]:
        raise ValueError(f"budget {text!r} is no limit to what a search may spend; write {name}{sign[1]}{value}")
    if name == "depth":
        return _depth(value, hardware)
    if hardware is None:
        raise ValueError(f"budget {text!r} is predicted on a hardware; say on which, as in {name}={value}@h100-sxm")
    if name == "latency":
        return LatencyBudget(parse_seconds(value), hardware)
    return SpeedupBudget(_above_one(text, value), hardware)


def _depth(value: str, hardware: str | None) -> DepthBudget:
    if hardware is not None:
        raise ValueError(f"budget depth={value}@{hardware}: depth is the same on any hardware; leave @{hardware} out")
    if not value.isdecimal() or int(value) == 0:
        raise ValueError(f"budget depth={value} should be a whole number of layers, at least 1")
    return DepthBudget(int(value))


def _above_one(text: str, value: str) -> float:
    try:
        times = float(value.removesuffix("x"))
    except ValueError:
        times = 0.0
    if not 1 < times < float("inf"):
        raise ValueError(f"budget {text!r} should be a number above 1, of times as fast as the unedited model")
    return times


@dataclass(frozen=True)
class DepthBudget:
    """The effective depth to come down to, in layers of the unedited model."""

    depth: int
    hardware: None = None

    def pairs_needed(self, num_layers: int, price: Price) -> int:  # noqa: ARG002 - depth has no time
        """As `Budget.pairs_needed`."""
        if self.depth > num_layers:
            raise ValueError(
                f"budget depth={self.depth} is more than the model's {num_layers} layers; use at most {num_layers}"
            )
        pairs = num_layers - self.depth
        if 2 * pairs > num_layers:
            least = num_layers - num_layers // 2
            raise ValueError(
                f"budget depth={self.depth} is out of reach: pairs bring {num_layers} layers to {least} at the least"
            )
        return pairs


@dataclass(frozen=True)
class LatencyBudget:
    """Seconds per token to come down to, as predicted on a hardware."""

    seconds: float
    hardware: str

    def pairs_needed(self, num_layers: int, price: Price) -> int:
        """As `Budget.pairs_needed`."""
        return _fewest_pairs(f"latency={1e3 * self.seconds:g}ms@{self.hardware}", self.seconds, num_layers, price)


@dataclass(frozen=True)
class SpeedupBudget:
    """How many times as fast as the unedited model per token, as predicted on a hardware."""

    times: float
    hardware: str

    def pairs_needed(self, num_layers: int, price: Price) -> int:
        """As `Budget.pairs_needed`."""
        return _fewest_pairs(f"speedup={self.times:g}@{self.hardware}", price(0) / self.times, num_layers, price)


def _fewest_pairs(budget: str, limit: float, num_layers: int, price: Price) -> int:
    seconds = [price(pairs) for pairs in range(num_layers // 2 + 1)]
    if seconds[0] <= limit:
        raise ValueError(f"budget {budget}: the unedited model is predicted to take {1e3 * seconds[0]:.3g} ms already")
    found = next((pairs for pairs, own in enumerate(seconds) if own <= limit), None)
    if found is None:
        least = min(seconds)
        pairs = seconds.index(least)
        raise ValueError(
            f"budget {budget} is out of reach: {pairs} pairs come to {1e3 * least:.3g} ms per token, "
            f"{seconds[0] / least:.3g} times as fast as the unedited model"
        )
    return found
