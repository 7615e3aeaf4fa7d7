"""Which of the known programs is fastest under a quality budget, and where each of them pays."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import pandas as pd

from surgeon.cost.candidates import Candidate
from surgeon.cost.deployment import Deployment
from surgeon.cost.hardware import Hardware
from surgeon.cost.predict import Prediction
from surgeon.cost.sweep import SweepCell, sweep
from surgeon.cost.workload import Workload
from surgeon.errors import did_you_mean
from surgeon.language.operations.lowrank import lowrank
from surgeon.language.operations.pair import pair
from surgeon.language.operations.variants import DENSE, HALVES, middle_layers, variant
from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.words import aligned, plural

PAYS = 1.02  # times the dense program's speed: less is within what predictions miss by
TRACK_DEPTH = 4
Metric = Literal["token", "first", "rate"]
METRICS: tuple[Metric, ...] = ("token", "first", "rate")
LP, LADDER, LADDER_LP, FUSED, TRACKS, LOW_RANK, LP_LOW_RANK, LADDER_LOW_RANK = EDITS = (
    "lp",
    "ladder",
    "ladder-over-lp",
    "fused",
    f"tracks:{TRACK_DEPTH}",
    "lowrank",
    "lp+lowrank",
    "ladder+lowrank",
)
SYSTEMS = (HALVES, *EDITS)


@dataclass(frozen=True)
class Allowance:
    """What quality may be given up.

    Attributes:
        depth: the least effective depth; pairs are made until it is reached, of all layers that may change if None.
        keep: the share of each matrix's parameters that low ranks leave; None for no low ranks.
        allowed: programs by name; nothing for all that depth and keep allow.
    """

    depth: float | None = None
    keep: float | None = None
    allowed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.allowed:
            if name not in SYSTEMS:
                raise ValueError(f"there is no program {name!r} to choose; {did_you_mean(name, SYSTEMS)}")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"keep must be more than 0 and at most 1, not {self.keep:g}")


def known_programs(model: Model, budget: Allowance, layers: range | None = None) -> list[Candidate]:
    """The dense program, and the known ones that the budget allows, for any number of ranks.

    Args:
        layers: that may be changed, but for low ranks, which are of all; all but the first and last two by default.

    Raises:
        ValueError: if the depth is above the model's, or nothing is left to choose from.
    """
    shapes = model.shapes
    per_layer = model.family.steps_per_layer
    dense = Program.dense(shapes.layers, per_layer)
    middle = layers or middle_layers(shapes.layers)
    if budget.depth is not None and not 1 <= budget.depth <= shapes.layers:
        raise ValueError(
            f"the effective depth of {shapes.layers} layers is from 1 to {shapes.layers}, not {budget.depth:g}"
        )
    if budget.depth is None:
        pairs = len(middle) // 2
    else:
        pairs = min(len(middle) // 2, int(shapes.layers - budget.depth))
    paired = range(middle.start, middle.start + 2 * pairs)
    lp = pair(dense, paired) if pairs else dense

    def low(program: Program) -> Program:
        with warnings.catch_warnings():  # of matrices that stay whole, once for every program
            warnings.simplefilter("ignore")
            return lowrank(program, range(shapes.layers), shapes.layer_shapes, keep=budget.keep)

    makers: dict[str, Callable[[int], Program]] = {
        HALVES: lambda _: dense,
        LP: lambda _: lp,
        LADDER: lambda ranks: variant(LADDER, dense, middle, ranks),
        LADDER_LP: lambda ranks: variant(LADDER, lp, paired, ranks),
        FUSED: lambda ranks: variant(FUSED, dense, middle, ranks),
        TRACKS: lambda ranks: variant(TRACKS, dense, middle, ranks),
        LOW_RANK: lambda _: low(dense),
        LP_LOW_RANK: lambda _: low(lp),
        LADDER_LOW_RANK: lambda ranks: low(variant(LADDER, dense, middle, ranks)),
    }

    def allowed(name: str) -> bool:
        if (name in (LP, LADDER_LP, LP_LOW_RANK) and not pairs) or (LOW_RANK in name and budget.keep is None):
            return False
        if budget.allowed and name not in budget.allowed:
            return False
        return budget.depth is None or makers[name](2).effective_depth(per_layer) >= budget.depth

    chosen = list(filter(allowed, SYSTEMS))
    if not chosen:
        raise ValueError("the budget leaves no program but the dense one; allow more, or less effective depth")
    found = [Candidate(name, model, cache(makers[name])) for name in chosen]
    found = [replace(one, halves="on") if one.name == HALVES else one for one in found]
    return [Candidate(DENSE, model, lambda _: dense), *found]


@dataclass(frozen=True)
class Choice:
    """What is fastest for one load on some ranks.

    Attributes:
        link: within a node, by its name.
        dense: what it is compared with; None if the dense model does not fit there.
        by_program: times the dense program's speed, of every program that fits.
    """

    ranks: int
    batch: int
    link: str
    dense: Prediction | None
    by_program: Mapping[str, float]

    @property
    def winner(self) -> str:
        """The fastest program; the dense one where no other pays."""
        best = max(self.by_program, key=lambda name: self.by_program[name], default=DENSE)
        if self.by_program.get(best, 0.0) >= PAYS:
            return best
        return DENSE

    @property
    def speedup(self) -> float:
        return self.by_program.get(self.winner, 1.0)


def survey(
    known: Sequence[Candidate],
    hardware: Hardware,
    deployment: Deployment,
    workload: Workload,
    axes: Mapping[str, Sequence[int]],
    metric: Metric = "token",
    advance: Callable[[float], None] = lambda _: None,
) -> list[Choice]:
    """The choices on every link of the hardware (or the deployment's own), for all ranks and batches of the axes."""
    links: list[str | None] = [deployment.link] if deployment.link else [*hardware.links] or [None]
    found = []
    for link in links:
        cells = sweep(known, hardware, replace(deployment, link=link), workload, axes, advance)
        found += list(choices(cells, link or "", metric))
    return found


def choices(cells: Sequence[SweepCell], link: str, metric: Metric) -> Iterator[Choice]:
    """One for each combination of ranks and batch; cells of a program that does not fit are left out."""
    places = dict.fromkeys((cell.deployment.ranks, cell.workload.batch) for cell in cells)
    for ranks, batch in places:
        here = [cell for cell in cells if (cell.deployment.ranks, cell.workload.batch) == (ranks, batch)]
        fitting = {cell.candidate.name: cell.prediction for cell in here if cell.prediction and not cell.refused}
        dense = fitting.pop(DENSE, None)
        if dense:
            speedups = {name: seconds(dense, metric) / seconds(one, metric) for name, one in fitting.items()}
        else:
            speedups = {}
        yield Choice(ranks, batch, link, dense, speedups)


def seconds(prediction: Prediction, metric: Metric) -> float:
    """Seconds of a further token, of the first one, or of each of all texts' tokens."""
    return {"token": prediction.per_token, "first": prediction.first_token, "rate": 1 / prediction.rate}[metric]


@dataclass(frozen=True)
class Extent:
    """Where a program pays.

    Attributes:
        starts: the first batch at which it pays on these ranks and link; None if it is the first there is.
        stops: the first batch from which on it does not pay; None if it pays at the last there is.
        never: whether it pays at none.
        best: the most that it wins, times the dense program's speed.
    """

    program: str
    link: str
    ranks: int
    starts: int | None
    stops: int | None
    never: bool
    best: float

    def __str__(self) -> str:
        if self.never:
            return "never"
        if self.starts is None:
            if self.stops is None:
                return "always"
            return f"below {self.stops}"
        return f"from {self.starts}" + (f", below {self.stops}" if self.stops else "")


def reaches(found: Sequence[Choice]) -> list[Extent]:
    """Of every program, link and number of ranks: between which batches it pays."""
    result = []
    for program in dict.fromkeys(name for choice in found for name in choice.by_program):
        rows: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for choice in found:
            if program in choice.by_program:
                rows.setdefault((choice.link, choice.ranks), []).append((choice.batch, choice.by_program[program]))
        for (link, ranks), row in rows.items():
            paying = [batch for batch, speedup in sorted(row) if speedup >= PAYS]
            starts = paying[0] if paying and paying[0] > min(row)[0] else None
            stops = min((batch for batch, _ in row if paying and batch > paying[-1]), default=None)
            best = max(speedup for _, speedup in row)
            result.append(Extent(program, link, ranks, starts, stops, not paying, best))
    return result


def choice_table(found: Sequence[Choice]) -> pd.DataFrame:
    """A row for every link, number of ranks and batch: what wins, and what every program wins there."""
    rows = []
    for one in found:
        row: dict[str, object] = {"link": one.link, "ranks": one.ranks, "batch": one.batch}
        row |= {"winner": one.winner if one.dense else "", "speedup": one.speedup if one.dense else math.nan}
        rows.append(row | {f"{name}_speedup": speedup for name, speedup in one.by_program.items()})
    return pd.DataFrame(rows)


def describe_reaches(found: Sequence[Extent]) -> str:
    """At which batches each program pays; programs down, ranks across, by link."""
    parts = []
    for link in dict.fromkeys(one.link for one in found):
        here = {(one.program, one.ranks): str(one) for one in found if one.link == link}
        ranks = list(dict.fromkeys(count for _, count in here))
        lines = [["batches", *(plural(count, "rank") for count in ranks)]]
        programs = dict.fromkeys(program for program, _ in here)
        lines += [[program, *(here.get((program, count), "-") for count in ranks)] for program in programs]
        parts += [link or "no link", aligned(lines), ""]
    return "\n".join(parts).rstrip()
