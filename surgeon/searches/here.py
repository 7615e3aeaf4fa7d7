"""Time on this machine, `@here`: predicted by a calibration before the search, and measured for the few best.

The machine is calibrated once at the model's shapes, as by `surgeon calibrate`, and programs are priced by that
hardware file. At the end the best programs are measured in turns with the unedited model, as by `surgeon bench`.
Nothing else should run meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from surgeon.benchmarks.measure import MeasuredDrafts, Needs, RankBench, measure_drafts
from surgeon.cost.deployment import Workload
from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.progress import progress
from surgeon.quality.data import Windows
from surgeon.runtime.batching.request import Sampling
from surgeon.runtime.comm.collectives import parse_link
from surgeon.runtime.worker.rank import RankOptions, choose_device
from surgeon.runtime.worker.ranks import Ranks
from surgeon.searches.mixture import Trial
from surgeon.searches.quantities import HERE, Limit, show_seconds
from surgeon.searches.question import PricedQuestion, Question
from surgeon.searches.winners import RUNNERS_UP
from surgeon.searches.workers import say_aside

ROUNDS = 5


@dataclass(frozen=True)
class TimeHere:
    """A program's measured time here.

    Attributes:
        seconds: per token, the median over the rounds.
        low, high: the least and the most of any round.
        speedup: times as fast as the unedited model, the median of the one in each round.
    """

    seconds: float
    low: float
    high: float
    speedup: float

    @classmethod
    def of(cls, own: Sequence[float], dense: Sequence[float]) -> TimeHere:
        speedup = median(first / second for first, second in zip(dense, own, strict=True))
        return cls(median(own), min(own), max(own), speedup)

    def __str__(self) -> str:
        times = f"{show_seconds(self.low)} to {show_seconds(self.high)}"
        return f"{show_seconds(self.seconds)} per token ({times} over the rounds), speedup {self.speedup:.3g}x"


def measured_here(
    model: str | Path,
    dense: Program,
    programs: Sequence[Program],
    ranks: RankOptions,
    workload: Workload,
) -> dict[Program, TimeHere]:
    """Measure the unedited model and other programs here, in turns.

    Args:
        model: a checkpoint folder or a hub name; of programs with ranks, plain factors run, which are as fast.
        workload: of at least 2 new tokens.
    """
    if workload.new < 2:
        raise ValueError(
            f"time per token is that of tokens after the first one; ask for 2 or more, not {workload.new}"
        )
    every = list(dict.fromkeys([dense, *programs]))
    needs = Needs(ranks.ranks, workload.length, ranks.device)
    plans = {str(each): needs.plan(model, each) for each in every}
    with Ranks(ranks) as running:
        bench = RankBench.load(running, plans)
        with progress("measure here", ROUNDS * len(every), "runs") as advance:
            results = bench.measure([workload], ROUNDS, advance)
    times = [[each.per_token for each in result.rounds] for result in results]
    return {program: TimeHere.of(own, times[0]) for program, own in zip(every, times, strict=True)}


def ranks_here(settings: Question) -> RankOptions:
    """Choose the ranks to measure the best programs on."""
    link = parse_link(settings.link_delay, None)
    return RankOptions(settings.ranks, choose_device("auto", settings.ranks), link=link)


def drafts_here(model: Model, draft: Program, windows: Windows, settings: Question) -> MeasuredDrafts:
    """Measure drafts of a program here, in turns with decoding without them."""
    load = settings.workload(model.positions)
    text = windows.ids.flatten()
    starts = [
        number * load.prompt % max(1, len(text) - load.prompt)
        for number in range((ROUNDS + 1) * load.batch)
    ]
    prompts = [text[start : start + load.prompt].tolist() for start in starts]
    rounds = [prompts[first : first + load.batch] for first in range(0, len(prompts), load.batch)]
    temperature = 1.0 if settings.sampled_acceptance else 0.0
    sampling = Sampling(temperature=temperature, max_new_tokens=load.new, ignore_end=True)
    with progress("measure drafts here", 2 * len(rounds), "runs") as advance:
        return measure_drafts(model, draft, ranks_here(settings), rounds, sampling, advance)


def fast_enough_here(
    question: PricedQuestion, ranked: Sequence[Trial], model: str | Path
) -> Sequence[Trial]:
    """Keep those of the first few trials that this machine runs within its limits, if it has limits."""
    settings = question.settings
    limits = settings.limits
    dense = question.mixture.model.program
    if not any(limit.aspect.on == HERE for limit in limits):
        return ranked
    programs = [trial.program for trial in ranked[: RUNNERS_UP + 1]]
    load = settings.workload(question.mixture.model.positions)
    times = measured_here(model, dense, programs, ranks_here(settings), load)
    fast = []
    for trial, program in zip(ranked, programs, strict=False):
        missed = missed_here(limits, program, dense, times)
        say_aside(f"trial {trial.number}: {missed or f'measured {times[program]}'}")
        fast += [] if missed else [trial]
    if not fast:
        budget = ",".join(map(str, limits))
        raise ValueError(
            f"none of the best {len(programs)} programs keeps {budget} when it is measured here; ask for "
            "less, or leave more room to the prediction"
        )
    return fast


def missed_here(
    limits: Sequence[Limit], program: Program, dense: Program, times: Mapping[Program, TimeHere]
) -> str:
    """Name the limits on time here that a program is measured to miss."""
    own = times[program]
    original = times[dense]
    missed = []
    for limit in limits:
        if limit.aspect.on == HERE:
            cost = own.seconds if limit.aspect.name == "latency" else 1 / own.speedup
            if cost > limit.most(original.seconds if limit.aspect.name == "latency" else 1.0):
                missed.append(f"{limit} is missed: measured {own}")
    return "; ".join(missed)
