"""Measuring programs against each other on ranks: latencies, rates, and where each forward pass's time goes.

All programs are loaded by the same ranks, and every round runs each of them once, so that whatever else the machine
does disturbs all alike. Texts are random token ids; all texts of a batch are computed together, their prompts in one
pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch

from surgeon.benchmarks.timing import PassTiming, RankRun, load_timed, run_timed
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.ranks import Ranks

WARM_UP_TOKENS = 2
TRACED_TOKENS = 6  # new ones; the last pass is the one to look at


@dataclass(frozen=True)
class Candidate:
    """A program of a checkpoint.

    Attributes:
        connected: whether ranks wait for each other; without, results are wrong and nothing can be faster.
    """

    name: str
    plan: Plan
    connected: bool = True


@dataclass(frozen=True)
class Load:
    """What is computed in one run.

    Attributes:
        batch: texts.
        prompt: tokens of each text.
        new: tokens that are added to each.
        seed: of the token ids.
    """

    batch: int
    prompt: int
    new: int
    seed: int = 0

    def requests(self, vocabulary: int) -> list[Request]:
        """The texts; end tokens do not end them."""
        generator = torch.Generator().manual_seed(self.seed)
        texts = torch.randint(vocabulary, (self.batch, self.prompt), generator=generator).tolist()
        sampling = Sampling(max_new_tokens=self.new, ignore_end=True)
        return [Request(number, tuple(text), sampling) for number, text in enumerate(texts)]


@dataclass(frozen=True)
class Split:
    """Where the time of one forward pass goes on the rank that waits most: means over the passes of a run, seconds.

    Attributes:
        waiting: in collectives; NaN where that cannot be told.
        compute: everything else.
        layers: collectives of the program's steps and forks, of one pass.
        vocabulary: collectives of the embedding and the output head, of one pass.
    """

    rank: int
    waiting: float
    compute: float
    layers: Counts
    vocabulary: Counts


@dataclass(frozen=True)
class Measurement:
    """One run: seconds, and tokens per second.

    Attributes:
        first_token: from being asked to the first new token of every text.
        prefill: the pass with the prompts.
        decode: all other passes.
        per_token: one of these; NaN if there are none.
        rate: new tokens of all texts per second, from being asked to the last one.
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
    """One program at one batch size.

    Attributes:
        rounds: a measurement for each.
        runs: what each rank measured, for each round.
    """

    candidate: Candidate
    load: Load
    rounds: list[Measurement] = field(default_factory=list)
    runs: list[list[RankRun]] = field(default_factory=list)


def load_candidates(ranks: Ranks, candidates: Iterable[Candidate]) -> None:
    """Load every program on the ranks."""
    for candidate in candidates:
        ranks.call(load_timed, candidate.plan, candidate.name, candidate.connected)


def run_once(ranks: Ranks, candidate: Candidate, load: Load, vocabulary: int, events: bool = False) -> list[RankRun]:
    """Run one program once; what each rank measured."""
    plan = candidate.plan
    pass_tokens = max(load.batch * load.prompt, load.batch)
    limits = Limits(max_batch=load.batch, max_tokens=plan.max_tokens, pass_tokens=pass_tokens)
    blocks = load.batch * blocks_for(load.prompt + load.new)
    runs: list[RankRun] = ranks.call(run_timed, load.requests(vocabulary), blocks, limits, candidate.name, events)
    return runs


def measure(
    ranks: Ranks,
    candidates: Sequence[Candidate],
    loads: Sequence[Load],
    rounds: int,
    advance: Callable[[float], None],
) -> list[Result]:
    """Run every loaded program under every load in turn, over and over.

    Args:
        advance: called with 1 after each run.
    """
    vocabulary = shared_vocabulary(candidates)
    results = [Result(candidate, load) for load in loads for candidate in candidates]
    for result in results:
        load = result.load
        run_once(ranks, result.candidate, Load(load.batch, load.prompt, min(WARM_UP_TOKENS, load.new)), vocabulary)
    for _ in range(rounds):
        for result in results:
            runs = run_once(ranks, result.candidate, result.load, vocabulary)
            result.runs.append(runs)
            result.rounds.append(summarise(runs, result.load, result.candidate.connected))
            advance(1)
    return results


def trace(ranks: Ranks, candidates: Iterable[Candidate], load: Load, vocabulary: int) -> dict[str, list[RankRun]]:
    """Every computation and exchange of the pass with the prompts and of one later pass, by program and rank."""
    found = {}
    for candidate in candidates:
        short = Load(load.batch, load.prompt, min(TRACED_TOKENS, load.new), load.seed)
        runs = run_once(ranks, candidate, short, vocabulary, events=True)
        found[candidate.name] = [RankRun(run.began, [run.passes[0], *run.passes[1:][-1:]]) for run in runs]
    return found


def shared_vocabulary(candidates: Iterable[Candidate]) -> int:
    """How many token ids all of the models have."""
    return min(candidate.plan.vocabulary for candidate in candidates)


def summarise(runs: Sequence[RankRun], load: Load, connected: bool) -> Measurement:
    """The figures of one run, given what each rank measured.

    Rank 0 chooses the tokens, so that its times are the ones that count; ranks that are not connected do not wait for
    each other, and the slowest of them counts.
    """
    lead = runs[0] if connected else max(runs, key=lambda run: sum(one.seconds for one in run.passes))
    prefill = [one for one in lead.passes if not one.decode]
    decode = [one for one in lead.passes if one.decode]
    first_token = prefill[-1].ended - lead.began
    decoding = sum(one.seconds for one in decode)
    decode_passes = [[one for one in run.passes if one.decode] for run in runs]
    return Measurement(
        first_token=first_token,
        prefill=sum(one.seconds for one in prefill),
        decode=decoding,
        per_token=decoding / len(decode) if decode else math.nan,
        rate=load.batch * load.new / (first_token + decoding),
        prefill_pass=_split([[one for one in run.passes if not one.decode] for run in runs]),
        decode_pass=_split(decode_passes) if decode else None,
    )


def _split(passes_by_rank: list[list[PassTiming]]) -> Split:
    """The split of passes of one kind on the rank that waits most; where none waits, on the one that computes most."""
    splits = [_rank_split(rank, passes) for rank, passes in enumerate(passes_by_rank)]
    return max(splits, key=lambda split: (0 if math.isnan(split.waiting) else split.waiting, split.compute))


def _rank_split(rank: int, passes: list[PassTiming]) -> Split:
    seconds = fmean(one.seconds for one in passes)
    waits = [one.waiting for one in passes if one.waiting is not None]
    waiting = fmean(waits) if waits else math.nan
    return Split(
        rank=rank,
        waiting=waiting,
        compute=seconds - waiting,
        layers=passes[-1].layers,
        vocabulary=passes[-1].vocabulary,
    )
