"""Measuring programs against each other on ranks: latencies, rates, and the split of each forward pass's time.

All programs are loaded by the same ranks, and every round runs each of them once, so that disturbances hit all alike.
Texts are random token ids; all texts of a batch are computed together, their prompts in one pass, or in chunks.

Decoding with drafts of another program over the same weights is measured beside decoding without, in turns. Every run
starts cold: the best number of drafted tokens is found while texts are written, as in `surgeon generate`.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pandas as pd
import torch

from surgeon.analysis.factors.factor_plan import plan_factors
from surgeon.benchmarks.timing import (
    Load,
    PassTiming,
    RankRun,
    load_timed,
    run_timed,
    trace_files,
    write_profile,
)
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.cost.candidates import Candidate
from surgeon.cost.deployment import Workload
from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.processes.files import finite
from surgeon.quality.data import load_windows
from surgeon.quality.summary import Values, known_interval, mean_divergence
from surgeon.runtime.batching.ahead import MOST_AHEAD
from surgeon.runtime.batching.blocks import PASS_TOKENS, blocks_for
from surgeon.runtime.batching.request import Request, Sampling, UndefinedLogits
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.comm.collectives import Collectives, Compressed, Counts
from surgeon.runtime.model.engine import Figures, RankEngine, ways_through
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_draft
from surgeon.runtime.plan.memory import imbalance
from surgeon.runtime.plan.specification import HalvesMode, Plan, Ways, require_low_rank
from surgeon.runtime.worker.rank import Rank, RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import ENGINE, complete, load

WARM_UP_TOKENS = 2
PROFILED_TOKENS = 6  # new ones
SPLIT_TOKENS = 32  # likewise: a profile of hundreds of passes takes minutes to read


@dataclass(frozen=True)
class Needs:
    """Needs that all programs under measurement have in common; a `kv` of "lowrank" is for those that can."""

    ranks: int
    tokens: int
    device: str
    ways: Ways = field(default_factory=Ways)

    def plan(
        self, model: str | Path | Model, program: Program | str | None = None, halves: HalvesMode = "off"
    ) -> Plan:
        lowrank = self.ways.get("kv") == "lowrank"
        ways: Ways = {**self.ways, "kv": "auto"} if lowrank else self.ways
        plan = make_plan(model, self.ranks, self.tokens, program, self.device, halves=halves, **ways)
        if lowrank and plan.can_be_low_rank:
            return replace(plan, kv="lowrank")
        return plan


def plan_candidates(candidates: Iterable[Candidate], needs: Needs) -> dict[str, Plan]:
    """The candidates' plans, by name."""
    plans = {}
    for one in candidates:
        program = one.program(needs.ranks)
        try:
            plans[one.name] = needs.plan(one.model, program, one.halves)
        except ValueError as error:
            raise ValueError(f"{one.name}: {error}") from error
        if one.recipe is not None and not plan_factors(one.recipe, one.model).is_of_weights:
            warnings.warn(
                f"{one.recipe.source}: ranks run factors, heads and neurons by the weights alone, not those that the "
                "recipe chooses: as fast, but not as good; export it and measure the checkpoint to run its own",
                stacklevel=2,
            )
    if needs.ways.get("kv") == "lowrank":
        require_low_rank(*plans.values())
    return plans


@dataclass(frozen=True)
class Split:
    """The split of one forward pass's time on the rank that waits most: means over the passes of a run, seconds.

    Attributes:
        waiting: in collectives; NaN where that is not known.
        hidden: of collectives beside computing; NaN where that is not known.
        compute: everything else.
        layers, vocabulary: collectives of steps and forks, and of the embedding and the output head, of one pass.
    """

    rank: int
    waiting: float
    compute: float
    layers: Counts
    vocabulary: Counts
    hidden: float = math.nan


@dataclass(frozen=True)
class Measurement:
    """One run: seconds, and tokens per second.

    Attributes:
        first_token: from the request to the first new token of every text.
        prefill: the pass with the prompts.
        decode: all other passes.
        per_token: one of these; NaN if there are none.
        rate: new tokens of all texts per second, from the request to the last one.
    """

    first_token: float
    prefill: float
    decode: float
    per_token: float
    rate: float
    prefill_pass: Split
    decode_pass: Split | None


@dataclass(frozen=True)
class Result:
    """One program under one load: a measurement and the runs of all ranks for each round.

    Attributes:
        connected: whether its ranks wait for each other; without, their results are wrong.
        imbalance: the weights that the busiest rank reads, times an even share.
    """

    name: str
    plan: Plan
    load: Workload
    connected: bool = True
    rounds: list[Measurement] = field(default_factory=list)
    runs: list[list[RankRun]] = field(default_factory=list)
    imbalance: float = 1.0


@dataclass(frozen=True)
class RankBench:
    """Programs that ranks hold, by name, to be measured against each other.

    Attributes:
        unconnected: names of those whose ranks do not wait for each other.
        pass_tokens: of prompts in one pass at most; None for all of them.
    """

    ranks: Ranks
    plans: Mapping[str, Plan]
    unconnected: Collection[str] = ()
    pass_tokens: int | None = None

    @classmethod
    def load(
        cls, ranks: Ranks, plans: Mapping[str, Plan], unconnected: Collection[str] = ()
    ) -> RankBench:
        for name, plan in plans.items():
            ranks.call(load_timed, plan, name, name not in unconnected)
        return cls(ranks, plans, unconnected)

    def run(self, name: str, load: Workload, profiled: bool = False) -> list[RankRun]:
        """Run one program once; returns the run of each rank."""
        runs: list[RankRun] = self.ranks.call(run_timed, *self._prepare_load(name, load), name, profiled)
        return runs

    def _prepare_load(self, name: str, load: Workload) -> Load:
        # Token ids that all of the models have.
        vocabulary = min(plan.vocabulary for plan in self.plans.values())
        together = min(load.batch * load.prompt, self.pass_tokens or sys.maxsize)
        plan = self.plans[name]
        limits = Limits(load.batch, plan.max_tokens, pass_tokens=together, long_texts=plan.long_texts)
        return load.requests(vocabulary), load.batch * blocks_for(load.length), limits

    def measure(
        self, loads: Sequence[Workload], rounds: int, advance: Callable[[float], None]
    ) -> list[Result]:
        """Run every program under every load in turn, over and over; `advance` is called after each run."""
        results = [
            Result(name, plan, load, name not in self.unconnected, imbalance=imbalance(plan))
            for load, (name, plan) in product(loads, self.plans.items())
        ]
        for result in results:
            self.run(result.name, replace(result.load, new=min(WARM_UP_TOKENS, result.load.new)))
        for _ in range(rounds):
            for result in results:
                result.runs.append(self.run(result.name, result.load))
                result.rounds.append(summarise(result.runs[-1], result.load, result.connected))
                advance(1)
        for result in results:
            result.rounds[:] = self.split(result.name, result.load, result.rounds)
        return results

    def split(self, name: str, load: Workload, rounds: Sequence[Measurement]) -> list[Measurement]:
        """Measurements with the split of passes on GPUs, too, by one more run with a profiler, of a few passes."""
        if self.ranks.options.device != "cuda":
            return list(rounds)
        short = replace(load, new=min(SPLIT_TOKENS, load.new))
        found = summarise(self.run(name, short, profiled=True), short, name not in self.unconnected)
        return [
            replace(one, prefill_pass=found.prefill_pass, decode_pass=found.decode_pass)
            for one in rounds
        ]

    def profile(self, load: Workload, path: Path) -> tuple[Path, ...]:
        """Have every rank write a Chrome trace of all programs, by `torch.profiler`; returns their files."""
        short = replace(load, new=min(PROFILED_TOKENS, load.new))
        loads = {name: self._prepare_load(name, short) for name in self.plans}
        self.ranks.call(write_profile, loads, str(path.absolute()))
        return trace_files(path, self.ranks.options.ranks)


def summarise(runs: Sequence[RankRun], load: Workload, connected: bool) -> Measurement:
    """The figures of one run.

    Rank 0 chooses the tokens, so that its times count; of ranks that are not connected the slowest counts.
    """
    if connected:
        lead = runs[0]
    else:
        lead = max(runs, key=lambda run: sum(one.seconds for one in run.passes))
    prefill = [one for one in lead.passes if not one.decode]
    decode = [one for one in lead.passes if one.decode]
    first_token = prefill[-1].ended - lead.began
    decoding = sum(one.seconds for one in decode)
    by_kind = [
        [[one for one in run.passes if one.decode == kind] for run in runs] for kind in (False, True)
    ]
    return Measurement(
        first_token=first_token,
        prefill=sum(one.seconds for one in prefill),
        decode=decoding,
        per_token=decoding / len(decode) if decode else math.nan,
        rate=load.batch * load.new / (first_token + decoding),
        prefill_pass=_split(by_kind[0]),
        decode_pass=_split(by_kind[1]) if decode else None,
    )


def _split(passes_by_rank: list[list[PassTiming]]) -> Split:
    splits = []
    for rank, passes in enumerate(passes_by_rank):
        waiting, hidden = (
            fmean(math.nan if seconds is None else seconds for seconds in of_all)
            for of_all in zip(*((one.waiting, one.hidden) for one in passes), strict=True)
        )
        compute = fmean(one.seconds for one in passes) - waiting
        splits.append(Split(rank, waiting, compute, passes[-1].layers, passes[-1].vocabulary, hidden))
    return max(
        splits, key=lambda split: (0 if math.isnan(split.waiting) else split.waiting, split.compute)
    )


MS = 1e3


def bench_table(
    results: Sequence[Result], divergence: Mapping[str, Values] | None = None
) -> pd.DataFrame:
    """One row per program and batch: medians over the rounds, of ratios too (each against the first, of its round)."""
    first = {result.load: result for result in reversed(results)}
    rows = []
    for result in results:
        plan = result.plan
        program = Program.parse(plan.program)
        row: dict[str, object] = {
            "program": result.name,
            "batch": result.load.batch,
            "effective_depth": program.effective_depth(plan.family.steps_per_layer),
            "sync_points": program.sync_points(plan.ranks) if result.connected else 0,
            "imbalance": result.imbalance,
        }
        for name in ("first_token", "prefill", "decode", "per_token"):
            row[f"{name}_ms"] = median(getattr(one, name) * MS for one in result.rounds)
        row["tokens_per_second"] = median(one.rate for one in result.rounds)
        row |= _split_columns("prefill", [one.prefill_pass for one in result.rounds])
        row |= _split_columns(
            "decode", [one.decode_pass for one in result.rounds if one.decode_pass is not None]
        )
        pairs = list(zip(first[result.load].rounds, result.rounds, strict=True))
        speedups = {
            "first_token_speedup": [base.first_token / own.first_token for base, own in pairs],
            "per_token_speedup": [base.per_token / own.per_token for base, own in pairs],
            "tokens_per_second_speedup": [own.rate / base.rate for base, own in pairs],
        }
        for name, ratios in speedups.items():
            row |= {name: median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
        if divergence and result.name in divergence:
            values = divergence[result.name]
            low, high = known_interval(values, 0.0)
            row |= {
                "divergence": mean_divergence(values),
                "divergence_low": low,
                "divergence_high": high,
            }
        rows.append(row)
    return pd.DataFrame(rows)


def _split_columns(phase: str, splits: Sequence[Split]) -> dict[str, object]:
    if not splits:
        return {}
    vocabulary = splits[-1].vocabulary
    columns = {
        "compute_ms": median(split.compute for split in splits) * MS,
        "waiting_ms": median(split.waiting for split in splits) * MS,
        "hidden_ms": median(split.hidden for split in splits) * MS,
        **asdict(splits[-1].layers),
        "vocabulary_collectives": vocabulary.all_reduces + vocabulary.all_gathers,
        "vocabulary_bytes": vocabulary.bytes,
    }
    return {f"{phase}_{name}": value for name, value in columns.items()}


def bench_record(results: Sequence[Result]) -> list[dict[str, object]]:
    """Every round of every program and batch, as JSON values: seconds, tokens per second, counts."""
    return [
        {
            "program": result.name,
            "text": result.plan.program,
            "checkpoint": str(result.plan.folder),
            "dtype": result.plan.dtype,
            "connected": result.connected,
            **asdict(result.load),
            "rounds": [finite(asdict(one)) for one in result.rounds],
        }
        for result in results
    ]


FEWEST_WINDOWS = 8  # below, an interval says little
ROWS = 64  # tokens whose predictions are compared at a time, in float64


def windows_to_compare(
    plan: Plan, data: str | None, length: int, tokens: int, seed: int
) -> list[list[int]]:
    """Windows of the tokenizer's tokens of a text, or of random tokens."""
    if data is None:
        generator = torch.Generator().manual_seed(seed)
        shape = (max(FEWEST_WINDOWS, -(-tokens // length)), length)
        windows: list[list[int]] = torch.randint(plan.vocabulary, shape, generator=generator).tolist()
        return windows
    found = load_windows(open_tokenizer(plan.folder), data, length, tokens)
    for note in found.notes:
        warnings.warn(note, stacklevel=2)
    return list(found.ids.tolist())


def divergence_of_compressed(
    ranks: Ranks, windows: list[list[int]], kind: str, name: str = ENGINE
) -> Values:
    """Run windows of a text on ranks' engine twice, with exact and with compressed reductions.

    Returns:
        KL(exact || compressed) over the full vocabulary in nats, the mean over each window's predictions, (windows,).
    """
    found: list[list[float]] = ranks.call(_compare_on_rank, name, windows, kind)
    return np.array(found[0])


@torch.inference_mode()
def _compare_on_rank(rank: Rank, name: str, windows: list[list[int]], kind: str) -> list[float]:
    """Run every window both ways on a rank, with the weights of its engine."""
    engine: RankEngine = rank.engines[name]
    collectives = engine.model.peers.collectives.exact
    exact = _with_wire(engine, collectives)
    compressed = _with_wire(engine, Compressed(collectives, kind))
    found = []
    for window in windows:
        first = exact.text_logits(window)
        second = compressed.text_logits(window)
        total = 0.0
        # Nothing comes behind the last token's prediction.
        for rows in torch.arange(len(window) - 1).split(ROWS):
            log_p = first[rows].double().log_softmax(-1)
            total += float((log_p.exp() * (log_p - second[rows].double().log_softmax(-1))).sum())
        if np.isnan(total):
            raise UndefinedLogits(
                f"the logits of {name} are not finite (NaN or infinity); are the weights damaged?"
            )
        found.append(total / (len(window) - 1))
    return found


def _with_wire(engine: RankEngine, collectives: Collectives) -> RankEngine:
    other = copy.copy(engine)
    other.model = copy.copy(engine.model)
    other.model.program = copy.copy(engine.model.program)
    peers = copy.copy(engine.model.peers)
    peers.collectives = collectives
    other.model.peers = peers
    other.model.program.peers = peers
    other.figures = Figures()
    other.ways = ways_through(other.model)
    return other


Prompts = Sequence[Sequence[int]]
PLAIN = "plain"
DRAFTED = "drafted"


@dataclass(frozen=True)
class DecodedTexts:
    """Some texts, decoded together in one way.

    Attributes:
        tokens: of each text, the new ones.
        new, seconds, passes: behind the prompts' passes; seconds are those of drafts, too.
        drafted, accepted: tokens.
    """

    tokens: list[list[int]]
    new: int
    seconds: float
    passes: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """New tokens per second, of all texts."""
        return self.new / self.seconds


def decode_together(
    started: Ranks,
    name: str,
    prompts: Prompts,
    sampling: Sampling,
    drafts: bool = False,
    looked_up: bool = False,
    ahead: int = 0,
) -> DecodedTexts:
    """Continue prompts by as many tokens as `sampling` says, all of them.

    Args:
        started: ranks that have loaded a plan of this name.
        drafts, looked_up: whether tokens are drafted, and of the text itself, in the place of a program.
        ahead: how many at a time; 0: as many as pay.
    """
    requests = [
        Request(number, tuple(prompt), replace(sampling, place=(number, 0)))
        for number, prompt in enumerate(prompts)
    ]
    batch = len(prompts)
    longest = max(map(len, prompts)) + sampling.max_new_tokens
    limits = Limits(batch, longest, pass_tokens=max(PASS_TOKENS["cpu"], batch * (1 + MOST_AHEAD)))
    if drafts:
        limits = replace(
            limits, draft_tokens=ahead or MOST_AHEAD, as_pays=not ahead, looked_up=looked_up
        )
    outputs, figures = started.call(complete, requests, batch * blocks_for(longest), limits, name)[0]
    tokens = [[each.token for each in outputs if each.request == number] for number in range(batch)]
    last = [each for each in outputs if each.finish_reason is not None]
    seconds = figures.decode.seconds + figures.drafting.seconds
    told = sum(each.drafted for each in last), sum(each.accepted for each in last)
    return DecodedTexts(tokens, figures.decode.new, seconds, figures.decode.passes, *told)


@dataclass(frozen=True)
class MeasuredDrafts:
    """A draft beside no draft.

    Attributes:
        speedup, low, high: of tokens per second: the median, the least and the most of the rounds.
        accepted: the share of drafted tokens; NaN where none was drafted.
        tokens_per_pass: of a text and a pass of the model.
    """

    speedup: float
    low: float
    high: float
    accepted: float
    tokens_per_pass: float

    @classmethod
    def of(cls, plain: Sequence[DecodedTexts], drafted: Sequence[DecodedTexts]) -> MeasuredDrafts:
        ratios = [own.rate / one.rate for own, one in zip(drafted, plain, strict=True)]
        tried, right, new = (
            sum(getattr(one, name) for one in drafted) for name in ("drafted", "accepted", "new")
        )
        accepted = float("nan")
        if tried:
            accepted = right / tried
        return cls(median(ratios), min(ratios), max(ratios), accepted, new / (new - right))

    def __str__(self) -> str:
        accepted = "nothing drafted"
        if self.accepted >= 0:
            accepted = f"{self.accepted:.0%} of drafted tokens accepted"
        return f"{self.speedup:.3g}x ({self.low:.3g}x to {self.high:.3g}x over the rounds), {accepted}"


def measure_drafts(
    model: str | Path | Model,
    draft: Program,
    options: RankOptions,
    prompts: Sequence[Prompts],
    sampling: Sampling,
    advance: Callable[[float], Any] = lambda _: None,
) -> MeasuredDrafts:
    """Measure decoding with a draft and without, in turns; the first round of prompts warms up."""
    if len(prompts) < 2:
        raise ValueError(
            f"drafts are measured in two rounds at least, one of them to warm up, not in {len(prompts)}"
        )
    longest = max(len(prompt) for texts in prompts for prompt in texts) + sampling.max_new_tokens
    plan = make_plan(model, options.ranks, longest)
    found: dict[str, list[DecodedTexts]] = {PLAIN: [], DRAFTED: []}
    with Ranks(options) as started:
        started.call(load, plan, PLAIN)
        started.call(load, with_draft(plan, model, draft), DRAFTED)
        for texts in prompts:
            for name, runs in found.items():
                runs.append(decode_together(started, name, texts, sampling, drafts=name == DRAFTED))
                advance(1)
    return MeasuredDrafts.of(found[PLAIN][1:], found[DRAFTED][1:])
