"""The constants that are fitted to the papers' rows: factors of what hardware files say, and what software costs.

A factor of 1 is what the files ship, which is what was fitted once, rounded. `fit` pulls every constant towards its
start, with a spread; so rows which say nothing about a constant leave it there, and what the others find depends on a
paper that is left out by the starts alone: a few of them (a launch, small messages) lean on early fits of all papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scripts.cost.cases import Run
from surgeon.cost.hardware import Algorithm, Figure, Hardware, Interconnect, Shares

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
# Of each stack of software that a paper used, not of hardware: how many times what a kernel's launch takes, seconds of
# a pass besides its kernels, and those for each text of a server's. No hardware file has them.
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
