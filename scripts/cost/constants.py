"""The constants that are fitted to the papers' rows: factors of what hardware files say, and what software costs.

A factor of 1 is what the files ship, which is what was fitted once, rounded. `fit` pulls every constant towards its
start, with a spread; so rows which say nothing about a constant leave it there, and what the others find depends on a
paper that is left out by the starts alone: a few of them (a launch, small messages) lean on early fits of all papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from scripts.cost.cases import Case, Run
from surgeon.cost.hardware import Algorithm, Figure, Hardware, Interconnect, Shares

Values = Mapping[str, float]
Seconds = Callable[[Run, Values], float]
Array = NDArray[np.float64]
NOISE = 0.03  # of a printed speedup, in logarithms: what a pull of one spread is worth
PARTS = 0.2  # of a printed part of a layer's time, which is no speed
ABSOLUTE = 0.3  # of a printed time: a paper's own software adds to it what the model does not know
STEP = 0.02  # in logarithms, for differences
FARTHEST = 3.0  # spreads that a constant may go from its start
Apply = Callable[[Hardware, float, Run], Hardware]
# Seconds: rings whose messages take less are NCCL's LL; those of its Simple protocol take longer.
LOW_LATENCY = 3.2e-6
MOST = 0.97  # of a peak


@dataclass(frozen=True)
class Constant:
    """One of them.

    Attributes:
        name: for tables.
        start: where it starts, and what it is pulled towards.
        spread: by which factor it may well differ from that.
        apply: puts it into a piece of hardware.
        concerns: which runs depend on it.
    """

    name: str
    start: float
    spread: float
    apply: Apply
    concerns: Callable[[Run], bool]


def scaled(figure: Figure, factor: float, most: float = math.inf) -> Figure:
    """Every point of a figure times a factor."""
    return Figure(tuple((size, min(value * factor, most)) for size, value in figure.points))


def _shares(**names: bool) -> Apply:
    def apply(hardware: Hardware, factor: float, _: Run) -> Hardware:
        shares: Shares = hardware.device.shares
        changed = {
            name: scaled(figure, factor, MOST)
            for name in names
            if (figure := getattr(shares, name)) is not None
        }
        return replace(hardware, device=replace(hardware.device, shares=replace(shares, **changed)))

    return apply


def _host(**names: bool) -> Apply:
    def apply(hardware: Hardware, factor: float, _: Run) -> Hardware:
        changed = {name: getattr(hardware.host, name) * factor for name in names}
        return replace(hardware, host=replace(hardware.host, **changed))

    return apply


def _forward(hardware: Hardware, seconds: float, _: Run) -> Hardware:
    return replace(hardware, host=replace(hardware.host, forward=Figure.constant(seconds)))


def _text(hardware: Hardware, seconds: float, run: Run) -> Hardware:
    return _forward(hardware, hardware.host.forward.at(run.batch) + seconds * run.batch, run)


def _links(
    staged: bool, concerned: Callable[[Algorithm], bool], *figures: str, most: float = math.inf
) -> Apply:
    def changed(each: Algorithm, link: str, factor: float) -> Algorithm:
        through_host = is_staged(link) and each.kind != "sharp"  # the switch needs no peer to peer
        if through_host != staged or not concerned(each):
            return each
        new: dict[str, Any] = {name: scaled(getattr(each, name), factor, most) for name in figures}
        return replace(each, **new)

    def apply(hardware: Hardware, factor: float, _: Run) -> Hardware:
        links = {
            name: replace(
                link, algorithms=tuple(changed(each, name, factor) for each in link.algorithms)
            )
            for name, link in hardware.links.items()
        }
        return replace(hardware, links=links)

    return apply


def is_staged(link: str) -> bool:
    """Whether a link goes through the host's memory, or over PCIe at least."""
    return link.endswith("-off") or link.startswith("pcie")


def _low_latency(algorithm: Algorithm) -> bool:
    return algorithm.kind in ("ring", "tree") and algorithm.hop.points[0][1] < LOW_LATENCY


def _for_large(algorithm: Algorithm) -> bool:
    return not _low_latency(algorithm)


def _at_once(algorithm: Algorithm) -> bool:
    return algorithm.kind == "one-shot"


def _contention(hardware: Hardware, value: float, _: Run) -> Hardware:
    def slowed(link: Interconnect) -> Interconnect:
        return replace(link, contention=min(value, 0.95))

    return replace(
        hardware,
        links={name: slowed(link) for name, link in hardware.links.items()},
        networks={name: slowed(link) for name, link in hardware.networks.items()},
    )


def _everything(_: Run) -> bool:
    return True


def _of(*stacks: str) -> Callable[[Run], bool]:
    return lambda run: run.stack in stacks


def _staged(run: Run) -> bool:
    return (run.link is not None and is_staged(run.link)) or run.hardware in ("rtx-4090", "a100-pcie")


def _peer(run: Run) -> bool:
    return run.hardware not in ("rtx-4090", "a100-pcie")


SHARED = (
    Constant("bandwidth shares", 0.93, 1.1, _shares(bandwidth=True, cache=True), _everything),
    Constant("FLOP/s shares", 1.35, 1.15, _shares(flops=True, attention=True), _everything),
    Constant("gap in a graph", 0.7, 2.0, _host(graph=True), lambda run: run.graphs),
    Constant("NVLink latency", 0.85, 1.3, _links(False, _low_latency, "base", "hop"), _peer),
    Constant("NVLink, small messages", 0.7, 4.0, _links(False, _low_latency, "share", most=1.0), _peer),
    Constant("NVLink, large messages", 1.0, 1.2, _links(False, _for_large, "share", most=1.0), _peer),
    Constant(
        "one-shot latency", 1.3, 1.5, _links(False, _at_once, "base", "hop"), _of("trtllm", "vllm")
    ),
    Constant("PCIe latency", 0.7, 1.5, _links(True, _low_latency, "base", "hop"), _staged),
    Constant("PCIe, small messages", 2.0, 4.0, _links(True, _low_latency, "share", most=1.0), _staged),
    Constant("PCIe, large messages", 1.4, 1.5, _links(True, _for_large, "share", most=1.0), _staged),
    Constant("contention", 0.2, 2.0, _contention, lambda run: run.system.startswith("ladder")),
)
# These are of each stack of software that a paper used, not of hardware: how many times what a kernel's launch takes,
# seconds of a pass besides its kernels, and those for each text of a server's. No hardware file has them.
STACKS = (
    Constant(
        "launch, eager PyTorch", 10.0, 3.0, _host(launch=True, collective=True), _of("eager", "forward")
    ),
    Constant("launch, DeInfer's vLLM", 6.0, 1.5, _host(launch=True, collective=True), _of("deinfer")),
    Constant("eager PyTorch, a pass", 1e-3, 3.0, _forward, _of("eager")),
    Constant("gpt-fast, a pass", 1e-4, 3.0, _forward, _of("graphs")),
    Constant("TensorRT-LLM, a pass", 2e-3, 3.0, _forward, _of("trtllm")),
    Constant("vLLM, a pass", 4e-3, 3.0, _forward, _of("vllm")),
    Constant("DeInfer's vLLM, a pass", 1e-2, 3.0, _forward, _of("deinfer")),
    Constant("servers, a text", 1.5e-4, 3.0, _text, _of("trtllm", "vllm")),
)
CONSTANTS = (*SHARED, *STACKS)


def fitted(hardware: Hardware, run: Run, values: Mapping[str, float]) -> Hardware:
    """The hardware of a run, with the constants that concern it."""
    for constant in CONSTANTS:
        if constant.concerns(run):
            hardware = constant.apply(hardware, values[constant.name], run)
    return hardware


def starts() -> dict[str, float]:
    """The constants as the files ship them."""
    return {constant.name: constant.start for constant in CONSTANTS}


def fit(
    cases: Sequence[Case], seconds: Seconds, rounds: int, left_out: Sequence[str] = ()
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The constants that agree best with the cases (of use "fit") and with what is shipped, which 0 rounds keep.

    Every round takes the residuals as straight lines through where it is and goes to their best place, but no further
    than a spread. The last round's lines also say where the constants would be without the cases of a paper.

    Args:
        left_out: papers.

    Returns: the constants, and by paper those without it.
    """
    used = [case for case in cases if case.use == "fit"]
    problem = _Problem(used, seconds)
    place = np.zeros(len(CONSTANTS))
    everything = np.ones(len(used) + len(CONSTANTS), dtype=bool)
    without = {paper: problem.values(place) for paper in left_out}
    for _ in range(rounds):
        residuals = problem.residuals(place)
        jacobian = problem.jacobian(place)
        for paper in left_out:
            others = np.array([case.paper != paper for case in used] + [True] * len(CONSTANTS))
            without[paper] = problem.values(_best(residuals, jacobian, place, others, FARTHEST))
        place = _best(residuals, jacobian, place, everything, 1.0)
    return problem.values(place), without


def _best(
    residuals: Array, jacobian: Array, place: Array, chosen: NDArray[np.bool_], reach: float
) -> Array:
    """Where lines through a place are smallest together, large residuals counting less than their squares."""
    low = np.maximum(place - reach, -FARTHEST - 1e-9)
    high = np.minimum(place + reach, FARTHEST + 1e-9)
    found = least_squares(
        lambda at: (residuals + jacobian @ (at - place))[chosen],
        place,
        bounds=(low, high),
        loss="soft_l1",
    )
    return np.asarray(found.x)


class _Problem:
    """Residuals by how far constants are from their starts, in spreads."""

    def __init__(self, cases: Sequence[Case], seconds: Seconds) -> None:
        self.cases = cases
        self.seconds = seconds

    def values(self, place: Array) -> dict[str, float]:
        """The constants at a place."""
        return {
            constant.name: constant.start * constant.spread**moved
            for constant, moved in zip(CONSTANTS, place, strict=True)
        }

    def residuals(self, place: Array) -> Array:
        """Of every case, and of every constant its own pull."""
        values = self.values(place)
        return np.array([self._residual(case, values) for case in self.cases] + list(place))

    def jacobian(self, place: Array) -> Array:
        """By differences; a case is asked again for the constants only that concern it."""
        values = self.values(place)
        table = np.zeros((len(self.cases) + len(CONSTANTS), len(CONSTANTS)))
        for column, constant in enumerate(CONSTANTS):
            step = STEP / math.log(constant.spread)
            moved = {**values, constant.name: values[constant.name] * math.exp(STEP)}
            for row, case in enumerate(self.cases):
                if constant.concerns(case.run) or constant.concerns(case.baseline or case.run):
                    table[row, column] = (
                        self._residual(case, moved) - self._residual(case, values)
                    ) / step
            table[len(self.cases) + column, column] = 1
        return table

    def _residual(self, case: Case, values: Values) -> float:
        if case.baseline is None or case.speedup is None:
            if case.seconds is None:
                return 0.0
            return math.log(self.seconds(case.run, values) / case.seconds) / ABSOLUTE
        noise = PARTS if case.run.per_layers else NOISE
        return math.log(speedup(case, self.seconds, values) / case.speedup) / noise


def speedup(case: Case, seconds: Seconds, values: Values) -> float:
    """What the model says of a case that has a baseline."""
    assert case.baseline is not None
    return seconds(case.baseline, values) / seconds(case.run, values)
