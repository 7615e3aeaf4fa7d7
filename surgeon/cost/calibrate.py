"""A hardware file for this machine, measured at a model's shapes: products, collectives, and what passes take besides.

Every round measures everything once; figures are made of the medians over the rounds. Shares are those of the peaks
that were seen: the most operations and bytes per second of all ranks together.

Passes are not taken apart: what those of a whole model take longer than those of its first layers, beyond what the cost
model has for products, memory and collectives, is shared out evenly among the kernels in between.
"""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median

import psutil
import torch
from scipy.optimize import nnls

from surgeon.cost.deployment import Deployment
from surgeon.cost.hardware import Algorithm, Device, Figure, Hardware, Host, Interconnect, Kind, RankShare, Shares
from surgeon.cost.hardware_file import parse_hardware, write_hardware
from surgeon.cost.passes import PredictedRanks
from surgeon.cost.samples import (
    BATCHES,
    NEW,
    PROMPT,
    SHORT,
    SIZES,
    WHOLE,
    Round,
    Typical,
    matrices_of,
    measure_ranks,
    merged,
    short_plan,
)
from surgeon.cost.work import Forward
from surgeon.models.shapes import ModelShapes
from surgeon.opened import Model, open_model
from surgeon.progress import progress
from surgeon.provenance import command_line, versions
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.options import choose_device
from surgeon.threads import threads_per_rank, usable_cores
from surgeon.words import plural

DIGITS = 4
WIDTH = 120
LENGTH = 64  # tokens of a text, as much as passes need
WAYS = {"cpu": ("shm", "gloo"), "cuda": ("nccl", "gloo")}
KINDS: dict[str, Kind] = {"shm": "shared-memory", "gloo": "ring", "nccl": "ring"}
LEAST = 0.02  # of a measured time that is left, at least, when launches are taken off it
UNIT = 1e-3  # seconds of a launch, to count launches in a predicted pass


@dataclass(frozen=True)
class MachineCalibration:
    """What is measured.

    Attributes:
        shapes: of the model.
        plans: of the unedited model, by number of ranks; one rank is among them.
        device: "cpu" or "cuda".
        rounds: how often everything is measured.
        ways: in which ranks are connected, the first one in passes.
        typical: which of several times of the same counts. The median, unless other work disturbs most of them.
    """

    shapes: ModelShapes
    plans: Mapping[int, Plan]
    device: str = "cpu"
    rounds: int = 5
    ways: tuple[str, ...] = WAYS["cpu"]
    typical: Typical = median

    @property
    def steps(self) -> int:
        """How often `measure` calls `advance`."""
        exchanges = len(self.ways) * sum(ranks > 1 for ranks in self.plans)
        return self.rounds * (exchanges + len(self.plans))

    def measure(self, advance: Callable[[float], None]) -> dict[int, list[Round]]:
        return {
            ranks: measure_ranks(plan, self.shapes, self.device, self.ways, self.rounds, self.typical, advance)
            for ranks, plan in sorted(self.plans.items())
        }


def plan_calibration(
    model: str | Path | Model, counts: Sequence[int], rounds: int, device: str = "auto", dtype: str = "auto"
) -> MachineCalibration:
    """What has to be measured for a hardware file at a model's shapes.

    Args:
        model: a checkpoint folder, a hub name, or a model that is open.
        counts: numbers of ranks, as `check_ranks` wants them.
        device: "cpu", "cuda", or "auto".
        dtype: as `make_plan` takes it.

    Raises:
        FileNotFoundError, ValueError: if the model cannot be run by these ranks here, or takes short texts only.
    """
    check_ranks(counts)
    chosen = choose_device(device, max(counts))
    opened = open_model(model)
    longest = make_plan(opened, 1, None, device=chosen, dtype=dtype).max_tokens
    if longest < LENGTH:
        raise ValueError(f"{opened.name} takes texts of {longest} tokens at most, and measuring needs {LENGTH}")
    plans = {count: make_plan(opened, count, LENGTH, device=chosen, dtype=dtype) for count in counts}
    return MachineCalibration(opened.shapes, plans, chosen, rounds, WAYS[chosen])


def calibrate(
    name: str, model: str | Path | Model, counts: Sequence[int], rounds: int, device: str = "auto", dtype: str = "auto"
) -> str:
    """A hardware file for this machine, as text; arguments and errors as of `plan_calibration`."""
    calibration = plan_calibration(model, counts, rounds, device, dtype)
    with progress("calibrate", calibration.steps, "measurements") as advance:
        return hardware_text(name, calibration, calibration.measure(advance))


def check_ranks(ranks: Sequence[int]) -> None:
    """Refuse numbers of ranks that cannot be measured.

    Raises:
        ValueError: if one rank alone is not among them, or one is named twice.
    """
    if 1 not in ranks or len(set(ranks)) < len(ranks):
        raise ValueError(f"ranks {','.join(map(str, ranks))}: name each number once, and 1 among them, as in 1,2,4")


@dataclass(frozen=True)
class RankFigures:
    """What one of so many ranks was seen to do.

    Attributes:
        flops: per second in products, by rows; those of more rows do no less, whatever disturbed measuring.
        bandwidth: bytes per second.
        links: by the way ranks are connected: seconds of a collective, and bytes per second.
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
    links = {way: _link(calibration, ranks, way, one) for way in calibration.ways if ranks > 1}
    starting = one.starting[calibration.ways[0], SIZES[0]] if ranks > 1 else 0.0
    asynchronous = calibration.device == "cuda"
    host = Host(_rounded(one.launches["operation"]), 0.0, _rounded(starting), Figure.constant(0.0), asynchronous)
    figures = RankFigures(flops, moved / computing[1], host, links)
    return replace(figures, host=_fit_host(calibration, ranks, one, figures))


def _link(calibration: MachineCalibration, ranks: int, way: str, one: Round) -> tuple[float, float]:
    """Seconds of a collective beyond what it takes to start one, and bytes per second."""
    least = SIZES[0]
    most = SIZES[-1]
    shortest = one.starting[way, least] + one.waiting[way, least]
    slope = _beyond(one.starting[way, most] + one.waiting[way, most], shortest) / (most - least)
    often = ranks + 1 if way == "shm" else 2 * (ranks - 1) / ranks  # how often an operand's bytes are moved
    return max(0.0, shortest - one.starting[calibration.ways[0], least]), often / slope


def _fit_host(calibration: MachineCalibration, ranks: int, one: Round, figures: RankFigures) -> Host:
    """A host whose launches and passes take what measured passes take besides what is predicted of them."""
    plans = {WHOLE: calibration.plans[ranks], SHORT: short_plan(calibration.plans[ranks])}
    idle = replace(figures.host, launch=0.0)
    free = Figure.constant(0.0)
    hosts = (
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
        least = predict(layers, forward, idle, idle.asynchronous)
        left[layers, texts] = seconds - least
        counts[layers, texts] = [(predict(layers, forward, host, idle.asynchronous) - least) / UNIT for host in hosts]
    launch, attention = _share_out(one.passes, left, counts)
    rest = {}
    for texts in BATCHES:
        kernels, attentions = counts[SHORT, texts]
        rest[texts] = max(0.0, left[SHORT, texts] - launch * kernels - attention * attentions)
    host = replace(figures.host, graph=_rounded(launch), forward=_table(rest))
    if host.asynchronous:  # passes were captured graphs
        return host
    # Passes of prompts are computed in Python, one attention for each text: what they take besides is counted there.
    host = replace(host, launch=host.graph, launches={"attention": free})
    for (layers, texts), seconds in one.prompts.items():
        forward = Forward(texts, PROMPT, asked=1)
        left[layers, texts] = seconds - predict(layers, forward, host, graphs=False)
        least = predict(layers, forward, idle, graphs=False)
        counts[layers, texts] = [(predict(layers, forward, hosts[1], graphs=False) - least) / UNIT]
    (prompt,) = _share_out(one.prompts, left, counts)
    return replace(host, launches={"attention": _table({1: attention, PROMPT: prompt})})


def _share_out(
    seconds: Mapping[tuple[str, int], float],
    left: Mapping[tuple[str, int], float],
    counts: Mapping[tuple[str, int], Sequence[float]],
) -> list[float]:
    """Seconds of one of each sort of launch, which make up for what whole passes have left more than short ones."""
    more = []
    longer = []
    for texts in BATCHES:  # each as much as any other, however long
        whole = seconds[WHOLE, texts]
        both = zip(counts[WHOLE, texts], counts[SHORT, texts], strict=True)
        more.append([(of_whole - of_short) / whole for of_whole, of_short in both])
        longer.append((left[WHOLE, texts] - left[SHORT, texts]) / whole)
    return [float(each) for each in nnls(more, longer)[0]]


def _beyond(seconds: float, others: float) -> float:
    """Take times off one that they are in; something is left, because of what disturbs measuring."""
    return max(seconds - others, LEAST * seconds)


def hardware_text(name: str, calibration: MachineCalibration, measured: Mapping[int, list[Round]]) -> str:
    """The hardware file.

    Raises:
        ValueError: if what was measured makes no hardware.
    """
    typical = {ranks: fit(calibration, ranks, merged(each, calibration.typical)) for ranks, each in measured.items()}
    text = f"{_head(calibration)}\n{write_hardware(_hardware(name, calibration, typical))}"
    parse_hardware(text)
    return text


def _head(calibration: MachineCalibration) -> str:
    plan = calibration.plans[1]
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    ranks = sorted(calibration.plans)
    threads = ", ".join(f"{plural(count, 'rank')} with {threads_per_rank(count)}" for count in ranks)
    said = (
        f"Measured by `{command_line()}`, every figure: from the medians of {calibration.rounds} "
        f"rounds. {platform.machine()}, {usable_cores()} cores, "
        f"threads: {threads}; {plan.hidden} wide, {plan.layers} layers, {plan.dtype}; {used}."
    )
    return textwrap.fill(said, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _hardware(
    name: str,
    calibration: MachineCalibration,
    figures: Mapping[int, RankFigures],
) -> Hardware:
    """Hardware with these figures, by number of ranks: rates in parts of the peaks that they have together."""
    flops = max(ranks * rate for ranks, one in figures.items() for rate in one.flops.values())
    bandwidth = max(ranks * one.bandwidth for ranks, one in figures.items())
    several = {ranks: one for ranks, one in figures.items() if ranks > 1}
    links = {}
    for way in calibration.ways if several else ():
        most = max(one.links[way][1] for one in several.values())
        base = {ranks: one.links[way][0] for ranks, one in several.items()}
        reached = {ranks: one.links[way][1] / most for ranks, one in several.items()}
        algorithm = Algorithm(KINDS[way], _table(base), Figure.constant(0.0), _table(reached))
        links[way] = Interconnect(_rounded(most), (algorithm,))

    def share(one: RankFigures) -> RankShare:
        products = {rows: rate / flops for rows, rate in one.flops.items()}
        return RankShare(Shares(_table(products), _table({1: one.bandwidth / bandwidth})), one.host)

    first = share(figures[min(figures)])
    peaks = {calibration.plans[1].dtype: _rounded(flops)}
    note = f"measured at the shapes of {calibration.shapes.name}"
    if calibration.device == "cpu":
        memory = _rounded(psutil.virtual_memory().total)
        device = Device(memory, _rounded(bandwidth), peaks, first.shares)
        sharing = {ranks: share(one) for ranks, one in several.items()}
        return Hardware(name, 1, device, first.host, links, sharing=sharing, note=note)
    memory = _rounded(torch.cuda.get_device_properties(0).total_memory)
    device = Device(memory, _rounded(bandwidth), peaks, first.shares)
    return Hardware(name, torch.cuda.device_count(), device, first.host, links, note=note)


def _table(values: Mapping[int, float]) -> Figure:
    return Figure(tuple((float(size), _rounded(value)) for size, value in sorted(values.items())))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
