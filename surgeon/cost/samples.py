"""What is measured of a machine before anything is fitted: passes taken apart, collectives, and launches, in rounds.

All ranks compute at the same time, because ranks of one machine share its memory and, where there are more of them than
cores, these as well. Every round does everything once, so that whatever else the machine does disturbs all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from surgeon.cost.dissect import PassParts, load_dissected, run_dissected
from surgeon.cost.workload import Workload
from surgeon.language.program import Program
from surgeon.runtime.comm.collectives import Alone, Counts
from surgeon.runtime.kernels.recording import CudaRecorder
from surgeon.runtime.model.linear import Linear, LowRank
from surgeon.runtime.model.low_rank import Gathered, Sharing
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.ranks import Ranks

WHOLE, SHORT = "whole", "short"  # the model's program, and its first layers
SHORT_LAYERS = 2
NEW = 10  # tokens added to each text: passes of which the typical one counts
PROMPT = 16
MORE_PROMPTS = 2  # times that prompts alone are computed, which a text has only one pass of
LONG = 384  # tokens of a long prompt, as far as the model takes it
BATCHES = (1, 2, 4, 8, 16, 32)
SHORT_BATCHES = (1, 8, 32)
SIZES = (256, 4096, 65536, 1 << 20)  # bytes of each rank's operand
EXCHANGES = 30  # of each size
LAUNCHES = 20
FEATURES = 8  # of a product that takes no time
CHAIN = 100  # small operations that are timed together

Typical = Callable[[Sequence[float]], float]  # of several times of the same


@dataclass(frozen=True)
class PassSample:
    """A pass of some texts on rank 0, the typical one of those alike.

    Attributes:
        layers: WHOLE or SHORT.
        texts: how many.
        new: tokens of each.
        cached: tokens of each before them.
        seconds: of the whole pass.
        parts: seconds of one occurrence, by what took them.
        counts: how often it occurs.
    """

    layers: str
    texts: int
    new: int
    cached: float
    seconds: float
    parts: Mapping[str, float]
    counts: Mapping[str, int]

    @property
    def decode(self) -> bool:
        """Whether it added one token to each text."""
        return self.new == 1


@dataclass
class Round:
    """What one round has measured of one number of ranks.

    Attributes:
        launches: seconds of what computes next to nothing, by name as of `time_launches`.
        starting, waiting: seconds of a collective, by the way ranks are connected and the size of an operand.
    """

    passes: list[PassSample] = field(default_factory=list)
    launches: dict[str, float] = field(default_factory=dict)
    starting: dict[tuple[str, int], float] = field(default_factory=dict)
    waiting: dict[tuple[str, int], float] = field(default_factory=dict)


def loads(max_tokens: int) -> list[tuple[str, Workload]]:
    """What is computed in a round, by the layers that it goes through."""
    long = min(LONG, max_tokens - NEW)
    found = [(WHOLE, Workload(batch, PROMPT, NEW)) for batch in BATCHES]
    found.append((WHOLE, Workload(1, long, NEW)))
    return found + [(SHORT, Workload(batch, PROMPT, NEW)) for batch in SHORT_BATCHES]


def measure_ranks(
    plan: Plan, device: str, ways: Sequence[str], rounds: int, typical: Typical, advance: Callable[[float], None]
) -> list[Round]:
    """Everything of one number of ranks, round by round.

    Args:
        plan: of the unedited model, for so many ranks.
        ways: in which ranks can be connected; the first one is used for the passes.
        advance: called with 1 after each of the `loads`, and of the ways of several ranks, in every round.
    """
    found = [Round() for _ in range(rounds)]
    with Ranks(RankOptions(plan.ranks, device, ways[0])) as ranks:
        load_sampled(ranks, plan)
        for one in found:
            sample_passes(ranks, plan, one, typical, advance)
    for way in ways if plan.ranks > 1 else ():
        with Ranks(RankOptions(plan.ranks, device, way)) as ranks:
            for one in found:
                sample_exchanges(ranks, way, one, typical)
                advance(1)
    return found


def load_sampled(ranks: Ranks, plan: Plan) -> None:
    """Load what `sample_passes` runs, and let caches, allocators and clocks get used to it."""
    nodes = Program.parse(plan.program).nodes[: SHORT_LAYERS * plan.family.steps_per_layer]
    for layers, program in ((WHOLE, plan.program), (SHORT, str(Program(nodes)))):
        ranks.call(load_dissected, replace(plan, program=program), layers)
    for layers, load in loads(plan.max_tokens):
        ranks.call(run_dissected, layers, replace(load, new=2))


def sample_passes(ranks: Ranks, plan: Plan, one: Round, typical: Typical, advance: Callable[[float], None]) -> None:
    """Note every kind of pass in a round, and what launches take."""
    for layers, load in loads(plan.max_tokens):
        found: list[PassParts] = []
        for each in (load, *[replace(load, new=1)] * MORE_PROMPTS):
            found += ranks.call(run_dissected, layers, each)[0]
        for decode in (False, True):
            alike = [one for one in found if one.decode == decode]
            counts = {name: times for name, (_, times) in alike[0].parts.items()}
            sample = PassSample(
                layers=layers,
                texts=load.batch,
                new=1 if decode else load.prompt,
                cached=sum(one.cached for one in alike) / len(alike),
                seconds=typical([one.seconds for one in alike]),
                parts={name: typical([one.parts[name][0] / n for one in alike]) for name, n in counts.items()},
                counts=counts,
            )
            one.passes.append(sample)
        advance(1)
    times: dict[str, list[float]] = ranks.call(time_launches, LAUNCHES)[0]
    one.launches = {name: typical(each) for name, each in times.items()}


def sample_exchanges(ranks: Ranks, way: str, one: Round, typical: Typical) -> None:
    """Note collectives in a round, of ranks that are connected in this way."""
    by_rank: list[dict[int, list[tuple[float, float]]]] = ranks.call(time_exchanges, SIZES, EXCHANGES)
    for size in SIZES:
        for noted, which in ((one.starting, 0), (one.waiting, 1)):
            noted[way, size] = median(typical([times[which] for times in each[size]]) for each in by_rank)


def merged(rounds: Sequence[Round], typical: Typical) -> Round:
    """One round in place of several: of everything the typical one."""

    def each(alike: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
        return {key: typical([one[key] for one in alike]) for key in alike[0]}

    passes = [
        replace(alike[0], seconds=typical([one.seconds for one in alike]), parts=each([one.parts for one in alike]))
        for alike in zip(*(one.passes for one in rounds), strict=True)
    ]
    others = ([getattr(one, name) for one in rounds] for name in ("launches", "starting", "waiting"))
    return Round(passes, *map(each, others))


# What ranks do for it.


@torch.inference_mode()
def time_exchanges(rank: Rank, sizes: Sequence[int], times: int) -> dict[int, list[tuple[float, float]]]:
    """Runs on a rank: sum float32 numbers over all ranks, over and over.

    Args:
        sizes: in bytes, of each rank's operand.
        times: for each size.

    Returns:
        By size, of every time: seconds until the rank can go on, and then of waiting for the result.
    """
    found = {}
    for size in sizes:
        every = [_exchange(rank, torch.ones(size // 4, device=rank.device)) for _ in range(times + 1)]
        found[size] = every[1:]  # the first one connects, and allocates
    return found


def _exchange(rank: Rank, operand: Tensor) -> tuple[float, float]:
    _synchronize(rank)
    began = time.perf_counter()
    wait = rank.collectives.all_reduce(operand, Counts())
    started = time.perf_counter()
    wait()
    _synchronize(rank)
    return started - began, time.perf_counter() - started


@torch.inference_mode()
def time_launches(rank: Rank, times: int) -> dict[str, list[float]]:
    """Runs on a rank: launch operations that compute next to nothing, some at a time.

    Returns:
        Seconds of one of them, of every time, by name. "product": a matrix product, as the runtime calls it; "join":
        what maps by two factors take besides their products; "gathered": and what they take more where ranks share out
        the first ones, without the collective; "operation": a sum of two tensors; "graph": one operation of a captured
        graph, where there are graphs.
    """
    x, weight = (torch.ones(rows, FEATURES, device=rank.device) for rows in (1, FEATURES))
    roles = ["q", "k", "v"]
    tensors = {f"{role}.{which}.weight": weight for role in roles for which in ("first", "second")}
    launches: dict[str, Callable[[], object]] = {"operation": lambda: x + x}
    linear = Linear([weight], [None])
    factored = LowRank(tensors, roles)
    shared = Gathered(tensors, roles, Sharing(Alone, Counts))
    launches |= {"product": lambda: linear(x), "join": lambda: factored(x), "gathered": lambda: shared(x)}
    if rank.device.type == "cuda":
        replay = CudaRecorder(rank.device)(lambda: [x + x for _ in range(CHAIN)])
    found: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(times):
        seconds = {name: _seconds(rank, launch, CHAIN) for name, launch in launches.items()}
        products = (1 + len(roles)) * seconds["product"]
        seconds["join"] = max(0.0, seconds["join"] - products)
        seconds["gathered"] = max(0.0, seconds["gathered"] - products - seconds["join"])
        if rank.device.type == "cuda":
            seconds["graph"] = _seconds(rank, replay, CHAIN) / CHAIN
        for name, each in seconds.items():
            found.setdefault(name, []).append(each)
    return found


def _seconds(rank: Rank, launch: Callable[[], object], times: int) -> float:
    """Of one of a number of launches."""
    _synchronize(rank)
    began = time.perf_counter()
    for _ in range(times):
        launch()
    _synchronize(rank)
    return (time.perf_counter() - began) / times


def _synchronize(rank: Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
