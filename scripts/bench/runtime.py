"""What each program wins on two CPU ranks, over shared memory, gloo and emulated links, beside what was to be expected.

    python scripts/bench/runtime.py [-o FILE.md] [--rounds 3] [--batch 1 8] [--links shm gloo 1ms 0.2ms]
        [--programs dense halves ladder]

A random Llama of 24 layers, 512 wide (75M parameters, vocabulary 4,096), float32. For each way of connecting the ranks
all programs are loaded at once, and every round runs each of them, so that what else the machine does disturbs all
alike. One markdown table for each way; figures are medians over the rounds, "x dense" the median of the rounds' ratios:
of decoding passes, and behind the time to the first token of that. "Halves" is the dense program in two halves that
take turns (surgeon/runtime/model/rank_model.py), which texts alone have of their prompts only.
A link is a delay per collective (1ms) or a bandwidth (10MB/s); +int8 or +int4 sends reductions as integers.

Expected: every decoding pass is run again on clocks, with the seconds that each rank took to compute it, in equal parts
for its sublayers, and a delay d per collective: a dense program costs c + d per step, LP saves whole steps' d, a
ladder's period is max(c, (c + d) / 2), and no less than what the bytes of one keep a link of little bandwidth busy. Of
an emulated link d is known; of shared memory and gloo it is what makes dense's expectation right. Syncs are those of
the program's steps; two more per pass belong to the embedding and the head.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.decoding import (
    LAYERS,
    RANKS,
    add_options,
    compared,
    format_section,
    parse,
    random_model,
    write_tables,
)
from scripts.commands import make_parser
from scripts.markdown import format_table
from surgeon.benchmarks.measure import RankBench, Result, bench_record, bench_table
from surgeon.benchmarks.timing import PassTiming, RankRun
from surgeon.cost.clocks import Burst, Costs, RankClock, Transfer, meet, pass_seconds
from surgeon.cost.deployment import Workload
from surgeon.language.program import Fork, Program, Step
from surgeon.progress import progress
from surgeon.runtime.comm.collectives import Link
from surgeon.runtime.comm.wires import WIRES
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.placement import Group, rank_work
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks

UPPER_BOUND = "upper bound"
HALVES = "halves"
WAYS = ("shm", "gloo", "1ms", "0.2ms")
COLUMNS = [
    "batch",
    "program",
    "depth",
    "syncs",
    "tokens/s",
    "x dense",
    "first",
    "x dense",
    "compute",
    "waiting",
    "per token",
    "expected",
    "off by",
]
ENDS = 2  # the embedding's reduction and the gathering of the head's best tokens hide behind nothing


def computing(one: PassTiming) -> float:
    """Seconds that a rank computes in a pass."""
    return one.seconds - (one.waiting or 0.0)


def expected_decode(
    program: Program, runs: Sequence[RankRun], transfer: Transfer, parts: int = 1
) -> float:
    """Seconds per decoding pass, the mean, if nothing but computation and the link took time.

    Args:
        runs: how long each rank computed; its sublayers take equal parts of that.
        parts: of the batch that take turns.
    """
    by_rank = [[computing(one) for one in run.passes if one.decode] for run in runs]
    return fmean(
        expected_seconds(program, seconds, transfer, parts) for seconds in zip(*by_rank, strict=True)
    )


def expected_seconds(
    program: Program, seconds: Sequence[float], transfer: Transfer, parts: int = 1
) -> float:
    """Seconds of one pass, of which each rank computes so many."""
    ranks = len(seconds)
    costs = _Shared(
        [
            each / parts / sum(len(work.step.sublayers) for work in rank_work(program, rank, ranks))
            for rank, each in enumerate(seconds)
        ],
        transfer,
    )
    clocks = [RankClock() for _ in range(ranks)]
    costs.reduce_all(clocks)
    pass_seconds(program, clocks, *[costs] * parts)
    costs.reduce_all(clocks)
    return max(clock.now for clock in clocks)


@dataclass(frozen=True)
class _Shared(Costs):
    """Sublayers that all take a rank the same time, and collectives that all take the same.

    Attributes:
        seconds: of a sublayer, on each rank.
    """

    seconds: Sequence[float]
    transfer: Transfer

    def items(self, rank: int, step: Step) -> Sequence[Burst]:
        return (Burst(self.seconds[rank] * len(step.sublayers)),)

    def part(self, node: Step | Fork, group: Group) -> Tensor:  # noqa: ARG002 - all are alike
        return torch.zeros(1)

    def finish(self, step: Step, group: Group) -> None:
        """Nothing that is not among the sublayers' seconds."""

    def transfers(self, part: Tensor, group: Group) -> Sequence[Transfer]:  # noqa: ARG002 - all are alike
        return [self.transfer for _ in group]

    def reduce_all(self, clocks: Sequence[RankClock]) -> None:
        """Have all ranks wait for a collective."""
        if len(clocks) > 1:
            meet(clocks, self.transfer)


@dataclass(frozen=True)
class Way:
    """How ranks are connected: collectives, an emulated link, and how reductions are sent."""

    name: str
    collectives: str
    link: Link | None = None
    compression: str | None = None


def programs() -> dict[str, Program]:
    """The programs compared; the last one on ranks that are not connected."""
    return compared(LAYERS) | {HALVES: Program.dense(LAYERS), UPPER_BOUND: Program.dense(LAYERS)}


def parse_way(text: str) -> Way:
    """Shm, gloo, 1ms, 10MB/s; with +int8 or +int4."""
    match = re.fullmatch(r"(?:(shm|gloo)|(\d+(?:\.\d+)?)(ms|MB/s))(?:\+(\w+))?", text)
    if match is None or match[4] not in (None, *WIRES):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not shm, gloo, a delay such as 1ms or a bandwidth such as 10MB/s"
        )
    base, number, unit, compression = match.groups()
    sent = f", sent as {compression}" if compression else ""
    if base:
        return Way(base + sent, base, None, compression)
    link = Link(delay=float(number) / 1e3)
    if unit == "MB/s":
        link = Link(bandwidth=float(number) * 1e6)
    return Way(f"shared memory and a link of {number} {unit}{sent}", "shm", link, compression)


def measure_way(way: Way, folder: Path, options: argparse.Namespace) -> list[Result]:
    """Every program at every batch size."""
    plans = {
        name: make_plan(
            folder,
            RANKS,
            options.prompt + options.new,
            str(program),
            halves="on" if name == HALVES else "off",
        )
        for name, program in programs().items()
        if name in options.programs
    }
    with Ranks(
        RankOptions(RANKS, collectives=way.collectives, link=way.link, compression=way.compression)
    ) as ranks:
        return measure_plans(ranks, plans, way.name, options)


def measure_plans(
    ranks: Ranks, plans: Mapping[str, Plan], name: str, options: argparse.Namespace
) -> list[Result]:
    """The same, given ranks."""
    loads = [Workload(batch, options.prompt, options.new) for batch in options.batch]
    bench = RankBench.load(ranks, plans, {UPPER_BOUND})
    with progress(name, options.rounds * len(loads) * len(plans), "runs") as advance:
        return bench.measure(loads, options.rounds, advance)


def transfers(way: Way, dense: Result) -> list[Transfer]:
    """A collective by round: its delay, and before that the seconds in which its bytes keep the line busy."""
    if way.link is None:
        program = Program.parse(dense.plan.program)
        collectives = program.sync_points(RANKS) + ENDS
        alone = [expected_decode(program, runs, Transfer()) for runs in dense.runs]
        pairs = zip(dense.rounds, alone, strict=True)
        return [Transfer(delay=(one.per_token - seconds) / collectives) for one, seconds in pairs]
    calls = [one.decode_pass.layers for one in dense.rounds if one.decode_pass is not None]
    sizes = (one.bytes / (one.all_reduces + one.all_gathers) for one in calls)
    return [Transfer(line=size / way.link.bandwidth, delay=way.link.delay) for size in sizes]


def expected(result: Result, dense: Result, each: Sequence[Transfer]) -> float:
    """Seconds per token, the median over rounds; without communication, those of dense's slowest rank."""
    if not result.connected:
        return median(
            max(fmean(computing(one) for one in run.passes if one.decode) for run in runs)
            for runs in dense.runs
        )
    program = Program.parse(result.plan.program)
    parts = 2 if result.plan.halves == "on" and result.load.batch > 1 else 1
    return median(
        expected_decode(program, runs, one, parts) for runs, one in zip(result.runs, each, strict=True)
    )


def rows(way: Way, results: Sequence[Result]) -> list[list[object]]:
    """The table's, of results of which the dense one of each load comes first."""
    dense = {result.load: result for result in reversed(results)}
    pairs = zip(results, bench_table(results).itertuples(), strict=True)
    return [row(way, result, dense[result.load], figures) for result, figures in pairs]


def row(way: Way, result: Result, dense: Result, figures: Any) -> list[object]:
    foreseen = 1e3 * expected(result, dense, transfers(way, dense))
    return [
        result.load.batch,
        result.name,
        f"{figures.effective_depth:g}",
        figures.sync_points,
        f"{1e3 * result.load.batch / figures.per_token_ms:.1f}",
        f"{figures.per_token_speedup:.2f}",
        f"{figures.first_token_ms:.1f}",
        f"{figures.first_token_speedup:.2f}",
        f"{figures.decode_compute_ms:.1f}",
        f"{figures.decode_waiting_ms:.1f}",
        f"{figures.per_token_ms:.1f}",
        f"{foreseen:.1f}",
        f"{figures.per_token_ms / foreseen - 1:+.0%}",
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--links", nargs="+", type=parse_way, default=[*map(parse_way, WAYS)])
    parser.add_argument(
        "--programs", nargs="+", choices=[*programs()], default=[*programs()], help="dense among them"
    )
    add_options(parser)
    options = parse(parser)
    texts: list[str] = []
    record: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = random_model(Path(temporary) / "random")
        for way in options.links:
            results = measure_way(way, folder, options)
            table = format_table(COLUMNS, rows(way, results), left=(1,))
            texts.append(format_section(way.name, options, table, RANKS))
            record[way.name] = bench_record(results)
            print(texts[-1], flush=True)
    write_tables(options.output, texts, record)


if __name__ == "__main__":
    main()
