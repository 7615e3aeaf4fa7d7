"""A hardware file for this machine, measured at a model's shapes: products, passes, collectives.

All ranks compute at the same time, as they share the machine. Every round measures everything once; figures come from
the medians over the rounds. Shares are of the peaks that were seen, of all ranks together.

The time by which passes of the whole model exceed those of its first layers and the predicted products, memory and
collectives is shared out evenly among the kernels in between.
"""

from __future__ import annotations

import platform
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from scipy.optimize import nnls
from torch import Tensor

from surgeon.cost.deployment import Deployment, Workload
from surgeon.cost.hardware import (
    Algorithm,
    Device,
    Figure,
    Hardware,
    Host,
    Interconnect,
    Kind,
    RankShare,
    Shares,
    parse_hardware,
    write_hardware,
)
from surgeon.cost.predict import PredictedRanks
from surgeon.cost.work import Forward, RankWork
from surgeon.language.program import Program
from surgeon.machine import threads_per_rank, usable_cores
from surgeon.models.shapes import ModelShapes
from surgeon.opened import Model, command_line, open_model, versions
from surgeon.progress import progress
from surgeon.runtime.batching.blocks import blocks_for
from surgeon.runtime.batching.request import Row
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.kernels.recording import CudaRecorder
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.linear import Linear
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.rank_model import Results
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.placement import work_of
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import Rank, RankOptions, choose_device
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import complete, keep
from surgeon.words import plural

WHOLE = "whole"  # the model's program
SHORT = "short"  # its first layers
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


@dataclass
class Round:
    """Seconds that one round has measured of one number of ranks.

    Attributes:
        launches: of an "operation" on two numbers, and of a "product" of small matrices.
        products: of a rank's matrices (`matrices_of`), one after the other, by the rows of their input.
        prompts: passes of a prompt of each text, by WHOLE or SHORT and the number of texts.
        passes: those that add a token to each text, likewise.
        starting, waiting: of a collective, by the connection and the size of an operand.
    """

    launches: dict[str, float] = field(default_factory=dict)
    products: dict[int, float] = field(default_factory=dict)
    prompts: dict[tuple[str, int], float] = field(default_factory=dict)
    passes: dict[tuple[str, int], float] = field(default_factory=dict)
    starting: dict[tuple[str, int], float] = field(default_factory=dict)
    waiting: dict[tuple[str, int], float] = field(default_factory=dict)


def merge_rounds(rounds: Sequence[Round]) -> Round:
    """Merge rounds: of everything the median."""
    merged = {}
    for name, table in vars(rounds[0]).items():
        merged[name] = {key: median(vars(one)[name][key] for one in rounds) for key in table}
    return Round(**merged)


def short_plan(plan: Plan) -> Plan:
    """Plan the first layers alone, half of them where there are few."""
    layers = max(1, min(SHORT_LAYERS, plan.layers // 2))
    nodes = Program.parse(plan.program).nodes[: layers * plan.family.steps_per_layer]
    return replace(plan, program=str(Program(nodes)))


def matrices_of(plan: Plan, shapes: ModelShapes) -> list[int]:
    """List the output widths of rank 0's matrices, with inputs as wide as the stream, up to `MOST_BYTES`."""
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


def sample_computing(ranks: Ranks, plan: Plan, shapes: ModelShapes, one: Round) -> None:
    """Note products, and passes of both programs, in a round."""
    products = ranks.call(time_products, matrices_of(plan, shapes), plan.hidden, plan.dtype)[0]
    one.products = {rows: median(seconds) for rows, seconds in products.items()}
    launches = ranks.call(time_launches)[0]
    one.launches = {name: median(seconds) for name, seconds in launches.items()}
    for layers in (WHOLE, SHORT):
        for batch in BATCHES:
            prompts, passes = ranks.call(time_passes, layers, Workload(batch, PROMPT, NEW))[0]
            one.prompts[layers, batch] = median(prompts)
            one.passes[layers, batch] = median(passes)


# What ranks do.


class PacedEngine(RankEngine):
    """Notes the seconds of each decoding pass."""

    seconds: list[float]

    def step(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        before = self.figures.decode.seconds
        results = super().step(rows, cache)
        if self.figures.decode.seconds > before:
            self.seconds.append(self.figures.decode.seconds - before)
        return results


def load_paced(rank: Rank, plan: Plan, name: str) -> None:
    """Load a rank's slices of a model, and keep the engine under a name."""
    keep(rank, name, PacedEngine(plan, rank.collectives, rank.device, rank.engines.values()))


def time_passes(rank: Rank, name: str, load: Workload) -> tuple[list[float], list[float]]:
    """Compute texts on a rank; seconds of each pass of their prompts, and of each that adds a token."""
    engine: PacedEngine = rank.engines[name]
    plan = engine.plan
    limits = Limits(
        load.batch, plan.max_tokens, pass_tokens=load.batch * load.prompt, long_texts=plan.long_texts
    )
    engine.seconds = []
    prompts = []
    for each in (load, *[replace(load, new=1)] * MORE_PROMPTS):
        requests = each.requests(plan.vocabulary)
        _, figures = complete(rank, requests, load.batch * blocks_for(load.length), limits, name)
        prompts.append(figures.prefill.seconds)
    return prompts, engine.seconds


@torch.inference_mode()
def time_products(rank: Rank, outputs: Sequence[int], hidden: int, dtype: str) -> dict[int, list[float]]:
    """Multiply by matrices of these outputs on a rank, one after the other.

    Returns:
        Seconds of all of them, of every turn, by the rows of the input.
    """
    made: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": rank.device}
    matrices = [Linear([torch.randn(width, hidden, **made)], [None]) for width in outputs]
    found: dict[int, list[float]] = {}

    def multiply(x: Tensor) -> None:
        for matrix in matrices:
            matrix(x)

    for rows in ROWS:
        multiply_all = _again(rank, partial(multiply, torch.randn(rows, hidden, **made)))
        multiply_all()
        found[rows] = [_seconds(rank, multiply_all) for _ in range(TURNS)]
    return found


@torch.inference_mode()
def time_launches(rank: Rank) -> dict[str, list[float]]:
    """Launch trivial kernels on a rank; seconds of one "operation" or "product", of every turn."""
    x = torch.ones(1, SMALL, device=rank.device)
    linear = Linear([torch.ones(SMALL, SMALL, device=rank.device)], [None])
    products = _again(rank, lambda: [linear(x) for _ in range(CALLS)])
    return {
        "operation": [_seconds(rank, lambda: x + x, CALLS) for _ in range(TURNS)],
        "product": [_seconds(rank, products) / CALLS for _ in range(TURNS)],
    }


@torch.inference_mode()
def time_exchanges(rank: Rank, sizes: Sequence[int], times: int) -> dict[int, list[tuple[float, float]]]:
    """Sum float32 numbers over all ranks, over and over.

    Returns:
        By size, of every time: seconds until the rank can go on, and then of waiting for the result.
    """
    found = {}
    for size in sizes:
        every = []
        for _ in range(times + 1):
            operand = torch.ones(size // 4, device=rank.device)
            _synchronize(rank)
            began = time.perf_counter()
            wait = rank.collectives.all_reduce(operand, Counts())
            started = time.perf_counter()
            wait()
            _synchronize(rank)
            every.append((started - began, time.perf_counter() - started))
        found[size] = every[1:]  # the first one connects, and allocates
    return found


def _again(rank: Rank, compute: Callable[[], object]) -> Callable[[], object]:
    """Compute something again as passes do: on GPUs from a recording, which takes less than its launches would."""
    if rank.device.type == "cuda":
        return CudaRecorder(rank.device)(compute)
    return compute


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


DIGITS = 4
WIDTH = 120
LENGTH = 64  # tokens of a text, as much as passes need
WAYS = {"cpu": ("shm", "gloo"), "cuda": ("nccl", "gloo")}
KINDS: dict[str, Kind] = {"shm": "shared-memory", "gloo": "ring", "nccl": "ring"}
LEAST = 0.02  # of a measured time that is left, at least, when launches are taken off it
UNIT = 1e-3  # seconds of a launch, to count launches in a predicted pass


@dataclass(frozen=True)
class MachineCalibration:
    """Measurements to make.

    Attributes:
        plans: of the unedited model, by number of ranks; one rank is among them.
        device: "cpu" or "cuda".
        ways: of connecting ranks, the first one in passes.
    """

    shapes: ModelShapes
    plans: Mapping[int, Plan]
    device: str = "cpu"
    rounds: int = 5
    ways: tuple[str, ...] = WAYS["cpu"]

    @property
    def steps(self) -> int:
        exchanges = len(self.ways) * sum(ranks > 1 for ranks in self.plans)
        return self.rounds * (exchanges + len(self.plans))

    def measure(self, advance: Callable[[float], None]) -> dict[int, list[Round]]:
        """Measure each number of ranks, round by round."""
        measured = dict[int, list[Round]]()
        for count, plan in sorted(self.plans.items()):
            measured[count] = found = [Round() for _ in range(self.rounds)]
            with Ranks(RankOptions(count, self.device, self.ways[0])) as ranks:
                ranks.call(load_paced, plan, WHOLE)
                ranks.call(load_paced, short_plan(plan), SHORT)
                # To warm up caches, allocators and clocks.
                sample_computing(ranks, plan, self.shapes, Round())
                for one in found:
                    sample_computing(ranks, plan, self.shapes, one)
                    advance(1)
            for way in self.ways if count > 1 else ():
                with Ranks(RankOptions(count, self.device, way)) as ranks:
                    for one in found:
                        by_rank = ranks.call(time_exchanges, SIZES, EXCHANGES)
                        for size in SIZES:
                            starting = [median(began for began, _ in own[size]) for own in by_rank]
                            waiting = [median(waited for _, waited in own[size]) for own in by_rank]
                            one.starting[way, size] = median(starting)
                            one.waiting[way, size] = median(waiting)
                        advance(1)
        return measured


def calibrate(
    name: str,
    model: str | Path | Model,
    counts: Sequence[int],
    rounds: int,
    device: str = "auto",
    dtype: str = "auto",
) -> str:
    """Measure this machine at a model's shapes, and return the text of a hardware file."""
    check_ranks(counts)
    chosen = choose_device(device, max(counts))
    opened = open_model(model)
    longest = make_plan(opened, 1, None, device=chosen, dtype=dtype).max_tokens
    if longest < LENGTH:
        raise ValueError(
            f"{opened.name} takes texts of {longest} tokens at most, and measuring needs {LENGTH}"
        )
    plans = {count: make_plan(opened, count, LENGTH, device=chosen, dtype=dtype) for count in counts}
    calibration = MachineCalibration(opened.shapes, plans, chosen, rounds, WAYS[chosen])
    with progress("calibrate", calibration.steps, "measurements") as advance:
        return hardware_text(name, calibration, calibration.measure(advance))


def check_ranks(ranks: Sequence[int]) -> None:
    """Refuse numbers of ranks that cannot be measured."""
    if 1 not in ranks or len(set(ranks)) < len(ranks):
        raise ValueError(
            f"ranks {','.join(map(str, ranks))}: name each number once, and 1 among them, as in 1,2,4"
        )


@dataclass(frozen=True)
class RankFigures:
    """Figures of one of so many ranks.

    Attributes:
        flops: per second in products, by rows; those of more rows do no less, whatever disturbed measuring.
        bandwidth: bytes per second.
        links: by the connection: seconds of a collective beyond those of starting one, and bytes per second.
    """

    flops: Mapping[int, float]
    bandwidth: float
    host: Host
    links: Mapping[str, tuple[float, float]]


def fit(calibration: MachineCalibration, ranks: int, one: Round) -> RankFigures:
    """Fit the cost model's figures to a round's times."""
    plan = calibration.plans[ranks]
    matrices = matrices_of(plan, calibration.shapes)
    launching = len(matrices) * one.launches["product"]
    computing = {rows: _beyond(seconds, launching) for rows, seconds in sorted(one.products.items())}
    numbers = sum(matrices) * plan.hidden
    rates = accumulate((2 * rows * numbers / seconds for rows, seconds in computing.items()), max)
    flops = dict(zip(computing, rates, strict=True))
    moved = plan.dtype_bytes * (numbers + sum(width + plan.hidden for width in matrices))
    least = SIZES[0]
    most = SIZES[-1]
    starting = 0.0
    links = {}
    if ranks > 1:
        starting = one.starting[calibration.ways[0], least]
        for way in calibration.ways:
            shortest = one.starting[way, least] + one.waiting[way, least]
            slope = _beyond(one.starting[way, most] + one.waiting[way, most], shortest) / (most - least)
            # How often an operand's bytes are moved.
            often = 2 * (ranks - 1) / ranks
            if way == "shm":
                often = ranks + 1.0
            links[way] = max(0.0, shortest - starting), often / slope
    asynchronous = calibration.device == "cuda"
    host = Host(
        _round(one.launches["operation"]), 0.0, _round(starting), Figure.constant(0.0), asynchronous
    )
    figures = RankFigures(flops, moved / computing[1], host, links)

    # Launches and passes take what measured passes take besides their prediction.
    plans = {WHOLE: plan, SHORT: short_plan(plan)}
    idle = replace(host, launch=0.0)
    free = Figure.constant(0.0)
    units = (
        replace(idle, launch=UNIT, graph=UNIT, launches={"attention": free}),
        replace(idle, launches={"attention": Figure.constant(UNIT)}),
    )

    def predict(layers: str, forward: Forward, host: Host, graphs: bool) -> float:
        alone = {ranks: replace(figures, host=host)}
        machine = _hardware("measured", calibration, alone)
        predicted = PredictedRanks(calibration.shapes, plans[layers], machine, Deployment(ranks))
        return predicted.forward(forward, graphs).seconds

    left: dict[tuple[str, int], float] = {}
    counts: dict[tuple[str, int], list[float]] = {}
    for (layers, texts), seconds in one.passes.items():
        forward = Forward(texts, 1, PROMPT + NEW // 2)
        idling = predict(layers, forward, idle, asynchronous)
        left[layers, texts] = seconds - idling
        counts[layers, texts] = [
            (predict(layers, forward, host, asynchronous) - idling) / UNIT for host in units
        ]
    launch, attention = _share_out(one.passes, left, counts)
    rest = {}
    for texts in BATCHES:
        kernels, attentions = counts[SHORT, texts]
        rest[texts] = max(0.0, left[SHORT, texts] - launch * kernels - attention * attentions)
    host = replace(host, graph=_round(launch), forward=_table(rest))
    if asynchronous:  # passes were captured graphs
        return replace(figures, host=host)
    # Passes of prompts are computed in Python, one attention for each text: what they take besides is counted there.
    host = replace(host, launch=host.graph, launches={"attention": free})
    for (layers, texts), seconds in one.prompts.items():
        forward = Forward(texts, PROMPT, asked=1)
        left[layers, texts] = seconds - predict(layers, forward, host, graphs=False)
        idling = predict(layers, forward, idle, graphs=False)
        counts[layers, texts] = [(predict(layers, forward, units[1], graphs=False) - idling) / UNIT]
    (prompt,) = _share_out(one.prompts, left, counts)
    host = replace(host, launches={"attention": _table({1: attention, PROMPT: prompt})})
    return replace(figures, host=host)


def _share_out(
    seconds: Mapping[tuple[str, int], float],
    left: Mapping[tuple[str, int], float],
    counts: Mapping[tuple[str, int], Sequence[float]],
) -> list[float]:
    """Seconds of one of each sort of launch, to explain what whole passes leave more than short ones."""
    more = []
    longer = []
    for texts in BATCHES:  # each as much as any other, however long
        whole = seconds[WHOLE, texts]
        both = zip(counts[WHOLE, texts], counts[SHORT, texts], strict=True)
        more.append([(of_whole - of_short) / whole for of_whole, of_short in both])
        longer.append((left[WHOLE, texts] - left[SHORT, texts]) / whole)
    return [float(each) for each in nnls(more, longer)[0]]


def _beyond(seconds: float, others: float) -> float:
    """Take times off one that contains them; something is left, because measuring is disturbed."""
    return max(seconds - others, LEAST * seconds)


def hardware_text(
    name: str, calibration: MachineCalibration, measured: Mapping[int, list[Round]]
) -> str:
    """Write the hardware file; ValueError if what was measured makes no hardware."""
    typical = {ranks: fit(calibration, ranks, merge_rounds(each)) for ranks, each in measured.items()}
    plan = calibration.plans[1]
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    ranks = sorted(calibration.plans)
    threads = ", ".join(f"{plural(count, 'rank')} with {threads_per_rank(count)}" for count in ranks)
    said = (
        f"Measured by `{command_line()}`, every figure: from the medians of {calibration.rounds} "
        f"rounds. {platform.machine()}, {usable_cores()} cores, "
        f"threads: {threads}; {plan.hidden} wide, {plan.layers} layers, {plan.dtype}; {used}."
    )
    head = textwrap.fill(
        said, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
    text = f"{head}\n{write_hardware(_hardware(name, calibration, typical))}"
    parse_hardware(text)
    return text


def _hardware(
    name: str,
    calibration: MachineCalibration,
    figures: Mapping[int, RankFigures],
) -> Hardware:
    """Make hardware of figures by number of ranks: rates as shares of the peaks that they reach together."""
    flops = max(ranks * rate for ranks, one in figures.items() for rate in one.flops.values())
    bandwidth = max(ranks * one.bandwidth for ranks, one in figures.items())
    several = {ranks: one for ranks, one in figures.items() if ranks > 1}
    links = {}
    for way in calibration.ways if several else ():
        most = max(one.links[way][1] for one in several.values())
        base = {ranks: one.links[way][0] for ranks, one in several.items()}
        reached = {ranks: one.links[way][1] / most for ranks, one in several.items()}
        algorithm = Algorithm(KINDS[way], _table(base), Figure.constant(0.0), _table(reached))
        links[way] = Interconnect(_round(most), (algorithm,))
    shared = {}
    for ranks, one in figures.items():
        products = {rows: rate / flops for rows, rate in one.flops.items()}
        shares = Shares(_table(products), _table({1: one.bandwidth / bandwidth}))
        shared[ranks] = RankShare(shares, one.host)
    first = shared[min(figures)]
    peaks = {calibration.plans[1].dtype: _round(flops)}
    note = f"measured at the shapes of {calibration.shapes.name}"
    memory = psutil.virtual_memory().total
    devices = 1
    sharing = {ranks: shared[ranks] for ranks in several}
    if calibration.device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        devices = torch.cuda.device_count()
        sharing = {}
    device = Device(_round(memory), _round(bandwidth), peaks, first.shares)
    return Hardware(name, devices, device, first.host, links, sharing=sharing, note=note)


def _table(values: Mapping[int, float]) -> Figure:
    return Figure(tuple((float(size), _round(value)) for size, value in sorted(values.items())))


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
