"""What is measured of a machine: products, passes of a whole model and of its first layers, collectives; in rounds.

All ranks compute at the same time, because ranks of one machine share its memory and, where there are more of them than
cores, these as well. Every round does everything once, so that whatever else the machine does disturbs all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from surgeon.cost.work import Forward, RankWork
from surgeon.cost.workload import Workload
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.batching.sequence import Row
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.linear import Linear
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.rank_model import Results
from surgeon.runtime.plan.placement import work_of
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import complete, keep

WHOLE, SHORT = "whole", "short"  # the model's program, and its first layers
SHORT_LAYERS = 2
PROMPT = 16
NEW = 24  # tokens added to each text: passes of which the typical one counts
MORE_PROMPTS = 2  # times that prompts alone are computed, which a text has only one pass of
TURNS = 5  # times that products are timed in a round
BATCHES = (1, 8, 32)
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)  # of products
MOST_BYTES = 1 << 29  # of matrices: what no cache holds
SMALL = 16  # features of a product that takes no time
CALLS = 100  # of what takes little time, timed together
SIZES = (256, 4096, 65536, 1 << 20)  # bytes of each rank's operand
EXCHANGES = 30  # of each size

Typical = Callable[[Sequence[float]], float]  # of several times of the same


@dataclass
class Round:
    """What one round has measured of one number of ranks, in seconds.

    Attributes:
        launches: of an "operation" on two numbers, and of a "product" of small matrices.
        products: of a rank's matrices (`matrices_of`), one after the other, by the rows of their input.
        prompts: passes of a prompt of each text, by WHOLE or SHORT and the number of texts.
        passes: those that add a token to each text, likewise.
        starting, waiting: of a collective, by the way ranks are connected and the size of an operand.
    """

    launches: dict[str, float] = field(default_factory=dict)
    products: dict[int, float] = field(default_factory=dict)
    prompts: dict[tuple[str, int], float] = field(default_factory=dict)
    passes: dict[tuple[str, int], float] = field(default_factory=dict)
    starting: dict[tuple[str, int], float] = field(default_factory=dict)
    waiting: dict[tuple[str, int], float] = field(default_factory=dict)


def merged(rounds: Sequence[Round], typical: Typical) -> Round:
    """One round in place of several: of everything the typical one."""
    found = Round()
    for one in fields(Round):
        alike = [getattr(each, one.name) for each in rounds]
        setattr(found, one.name, {key: typical([each[key] for each in alike]) for key in alike[0]})
    return found


def short_plan(plan: Plan) -> Plan:
    """The plan of the first layers alone."""
    nodes = Program.parse(plan.program).nodes[: SHORT_LAYERS * plan.family.steps_per_layer]
    return replace(plan, program=str(Program(nodes)))


def matrices_of(plan: Plan, shapes: ModelShapes) -> list[int]:
    """The matrices of rank 0, as outputs of so many for inputs as wide as the stream, as far as `MOST_BYTES` go."""
    rank_work = RankWork(plan, shapes, lambda _: False)
    found: list[int] = []
    room = MOST_BYTES
    for work in work_of(plan, 0):
        for kernel in rank_work.items(work, Forward(1, 1)):
            outputs = round(getattr(kernel, "flops", 0.0) / (2 * plan.hidden))
            if getattr(kernel, "nature", None) == "product" and (not found or room > 0):
                found.append(max(1, outputs))
                room -= outputs * plan.hidden * plan.dtype_bytes
    return found


def measure_ranks(
    plan: Plan,
    shapes: ModelShapes,
    device: str,
    ways: Sequence[str],
    rounds: int,
    typical: Typical,
    advance: Callable[[float], None],
) -> list[Round]:
    """Everything of one number of ranks, round by round.

    Args:
        plan: of the unedited model, for so many ranks.
        ways: in which ranks can be connected; the first one is used for the passes.
        advance: called with 1 for each of the ways of several ranks and for the rest, in every round.
    """
    found = [Round() for _ in range(rounds)]
    with Ranks(RankOptions(plan.ranks, device, ways[0])) as ranks:
        load_sampled(ranks, plan, shapes)
        for one in found:
            sample_computing(ranks, plan, shapes, one, typical)
            advance(1)
    for way in ways if plan.ranks > 1 else ():
        with Ranks(RankOptions(plan.ranks, device, way)) as ranks:
            for one in found:
                sample_exchanges(ranks, way, one, typical)
                advance(1)
    return found


def load_sampled(ranks: Ranks, plan: Plan, shapes: ModelShapes) -> None:
    """Load what `sample_computing` runs, and let caches, allocators and clocks get used to it."""
    ranks.call(load_paced, plan, WHOLE)
    ranks.call(load_paced, short_plan(plan), SHORT)
    sample_computing(ranks, plan, shapes, Round(), median)


def sample_computing(ranks: Ranks, plan: Plan, shapes: ModelShapes, one: Round, typical: Typical) -> None:
    """Note products, and passes of both programs, in a round."""
    products = ranks.call(time_products, matrices_of(plan, shapes), plan.hidden, plan.dtype)[0]
    one.products = {rows: typical(seconds) for rows, seconds in products.items()}
    launches = ranks.call(time_launches)[0]
    one.launches = {name: typical(seconds) for name, seconds in launches.items()}
    for layers in (WHOLE, SHORT):
        for batch in BATCHES:
            prompts, passes = ranks.call(time_passes, layers, Workload(batch, PROMPT, NEW))[0]
            one.prompts[layers, batch] = typical(prompts)
            one.passes[layers, batch] = typical(passes)


def sample_exchanges(ranks: Ranks, way: str, one: Round, typical: Typical) -> None:
    """Note collectives in a round, of ranks that are connected in this way."""
    by_rank: list[dict[int, list[tuple[float, float]]]] = ranks.call(time_exchanges, SIZES, EXCHANGES)
    for size in SIZES:
        for noted, which in ((one.starting, 0), (one.waiting, 1)):
            noted[way, size] = median(typical([times[which] for times in each[size]]) for each in by_rank)


# What ranks do for it.


class PacedEngine(RankEngine):
    """Notes the seconds of each pass that adds one token to each text, from the end of the one before."""

    seconds: list[float]

    def step(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        """One forward pass, which extends the cache."""
        before = self.figures.decode.seconds
        results = super().step(rows, cache)
        if self.figures.decode.seconds > before:
            self.seconds.append(self.figures.decode.seconds - before)
        return results


def load_paced(rank: Rank, plan: Plan, name: str) -> None:
    """Runs on a rank: load its slices of a model, and keep the engine under a name."""
    keep(rank, name, PacedEngine(plan, rank.collectives, rank.device, rank.engines.values()))


def time_passes(rank: Rank, name: str, load: Workload) -> tuple[list[float], list[float]]:
    """Runs on a rank: compute some texts; seconds of each pass of their prompts, and of each that adds a token."""
    engine: PacedEngine = rank.engines[name]
    plan = engine.plan
    limits = Limits(load.batch, plan.max_tokens, pass_tokens=load.batch * load.prompt, long_texts=plan.long_texts)
    engine.seconds = []
    prompts = []
    for each in (load, *[replace(load, new=1)] * MORE_PROMPTS):
        requests = each.requests(plan.vocabulary)
        _, figures = complete(rank, requests, load.batch * blocks_for(load.length), limits, name)
        prompts.append(figures.prefill.seconds)
    return prompts, engine.seconds


@torch.inference_mode()
def time_products(rank: Rank, outputs: Sequence[int], hidden: int, dtype: str) -> dict[int, list[float]]:
    """Runs on a rank: multiply by matrices of so many outputs, one after the other, as the runtime does.

    Returns:
        Seconds of all of them, of every time, by the rows of the input.
    """
    made: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": rank.device}
    matrices = [Linear([torch.randn(width, hidden, **made)], [None]) for width in outputs]
    found: dict[int, list[float]] = {}

    def multiply(x: Tensor) -> None:
        for matrix in matrices:
            matrix(x)

    for rows in ROWS:
        multiply_all = partial(multiply, torch.randn(rows, hidden, **made))
        multiply_all()
        found[rows] = [_seconds(rank, multiply_all) for _ in range(TURNS)]
    return found


@torch.inference_mode()
def time_launches(rank: Rank) -> dict[str, list[float]]:
    """Runs on a rank: launch what computes next to nothing; seconds of one "operation" or "product", of every time."""
    x = torch.ones(1, SMALL, device=rank.device)
    linear = Linear([torch.ones(SMALL, SMALL, device=rank.device)], [None])
    launches: dict[str, Callable[[], object]] = {"operation": lambda: x + x, "product": lambda: linear(x)}
    return {name: [_seconds(rank, one, CALLS) for _ in range(TURNS)] for name, one in launches.items()}


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


def _seconds(rank: Rank, compute: Callable[[], object], times: int = 1) -> float:
    _synchronize(rank)
    began = time.perf_counter()
    for _ in range(times):
        compute()
    _synchronize(rank)
    return (time.perf_counter() - began) / times


def _synchronize(rank: Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
