"""`surgeon bench`: what programs cost on ranks, against each other."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import (
    DATA_HELP,
    CompressOption,
    DecodingOption,
    DtypeOption,
    KvOption,
    LinkBandwidthOption,
    LinkDelayOption,
    LowRankOption,
    ProgramOption,
    RanksDeviceOption,
    RanksOption,
    VariantLayersOption,
    parse_batches,
)
from surgeon.language.operations.declare import VARIANTS, described

if TYPE_CHECKING:
    from surgeon.benchmarks.compression_cost import CompressionCost
    from surgeon.benchmarks.measure import RankBench, Result
    from surgeon.cost.candidates import Candidate
    from surgeon.cost.workload import Workload
    from surgeon.runtime.comm.quantised import Compression
    from surgeon.runtime.plan.specification import Plan
    from surgeon.runtime.worker.ranks import RankOptions

COMPARED_TOKENS = 1024  # predicted with exact and with compressed reductions
RANDOM = "random tokens"
_VARIANTS_LISTED = ", ".join(described(name, variant.note) for name, variant in VARIANTS.items())
DivergenceOption = Annotated[
    str | None,
    typer.Option(
        help="With --compress: what to measure its divergence from exact reductions on. Default: random tokens. "
        + DATA_HELP,
        show_default=False,
    ),
]


@dataclass(frozen=True)
class ProgramArguments:
    """Which programs of a model are measured, in the user's words; a group of options (see grouped.py)."""

    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure this too, in turns, and compare; may be repeated. A checkpoint, a recipe, a program such as "
            f'"A0 F0 [A1 A2] [F1 F2]", or a variant of the model: dense, {_VARIANTS_LISTED}, upper-bound (without any '
            "communication: wrong results, and the best time there can be).",
            show_default=False,
        ),
    ] = None
    layers: VariantLayersOption = None
    program: ProgramOption = None

    def candidates(self, model: str) -> list[Candidate]:
        """All that is measured, the model's own program or --program first.

        Raises:
            FileNotFoundError, ValueError: as `open_candidates`; and if the layers are no range.
        """
        from surgeon.cost.candidates import open_candidates
        from surgeon.language.operations.base import parse_range

        stretch = None if self.layers is None else parse_range(self.layers)
        return open_candidates(model, self.compare or [], self.program, stretch, weights=True)


@dataclass(frozen=True)
class LoadArguments:
    """What every program is given to do, in the user's words; a group of options (see grouped.py)."""

    batch: Annotated[str, typer.Option(help="How many texts are computed together; several as 1,8.")] = "1"
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt; they are random.")] = 64
    new: Annotated[int, typer.Option(min=1, help="Tokens to add to each.")] = 32
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 5
    seed: Annotated[int, typer.Option(help="Of the random tokens.")] = 0

    @property
    def length(self) -> int:
        """Tokens of prompt and output together."""
        return self.prompt + self.new

    def loads(self) -> list[Workload]:
        """A load for each batch size.

        Raises:
            ValueError: if --batch is no list of sizes.
        """
        from surgeon.cost.workload import Workload

        return [Workload(size, self.prompt, self.new, self.seed) for size in parse_batches(self.batch)]

    def __str__(self) -> str:
        rounds = f"{self.rounds} {'round' if self.rounds == 1 else 'rounds'}"
        return f"prompt {self.prompt}, {self.new} new, {rounds}"


@dataclass(frozen=True)
class RanksArguments:
    """The ranks that everything runs on, in the user's words; a group of options (see grouped.py)."""

    device: RanksDeviceOption = "auto"
    dtype: DtypeOption = "auto"
    decoding: DecodingOption = "auto"
    low_rank: LowRankOption = "auto"
    kv: KvOption = "auto"
    collectives: Annotated[
        str, typer.Option(help="shm, gloo, nccl, auto: the fastest that fits, or none: see upper-bound.")
    ] = "auto"
    link_delay: LinkDelayOption = None
    link_bandwidth: LinkBandwidthOption = None
    compress: CompressOption = None

    def options(self, tp: int) -> RankOptions:
        """All of them.

        Raises:
            ValueError: if these options do not fit each other or this machine.
        """
        from surgeon.runtime.comm.link import parse_link
        from surgeon.runtime.worker.ranks import RankOptions, choose_device

        link, compression = parse_link(self.link_delay, self.link_bandwidth), cast("Compression | None", self.compress)
        return RankOptions(tp, choose_device(self.device, tp), self.collectives, link, compression)


@dataclass(frozen=True)
class BenchFiles:
    """What is written; a group of options (see grouped.py)."""

    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a timeline of every program's prefill and one decoding pass, for chrome://tracing or Perfetto.",
            show_default=False,
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for bench.csv, bench.json and bench.png.", show_default=False),
    ] = None

    def check(self, device: str) -> None:
        """Say what is wrong with them before anything is measured.

        Raises:
            ValueError: if there can be no trace, or not there.
        """
        from surgeon.processes.torchrun import read_environment

        trace = self.trace
        if trace is not None and device != "cpu":
            raise ValueError("--trace shows what processes do, and GPUs go on while theirs wait; use --device cpu")
        if trace is not None and read_environment() is not None:
            raise ValueError(
                "--trace puts all ranks on one clock, and machines have one each; leave it out under torchrun"
            )
        if self.output is not None:
            self.output.mkdir(parents=True, exist_ok=True)
        if trace is not None and (trace.is_dir() or not trace.absolute().parent.is_dir()):
            raise ValueError(f"--trace {trace} must be a file in a folder that exists")


@grouped
def bench(
    model: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint folder, a hub name, demo, or a recipe (.yaml).")
    ],
    *,
    programs: ProgramArguments,
    tp: RanksOption = 2,
    load: LoadArguments,
    on: RanksArguments,
    data: DivergenceOption = None,
    files: BenchFiles,
) -> None:
    """Measure how fast programs run on ranks, and where the time of a pass goes.

    Everything is loaded by the same ranks and measured in turns; a ratio is the median over the rounds of the one
    taken in each. First token: from being asked until every text has one. Per token: a decoding pass. Tokens/s: new
    tokens of all texts, from being asked to the last. Waiting: time in collectives; "32+2" are 32 of the program's
    steps and 2 of embedding and head. Bytes are those of the program's steps, of one rank.

    Caches have all the memory they need here, so that --kv auto is full; --kv lowrank is for the programs that have
    factors of k and v, beside others that have none.

    With --compress the same weights also predict some tokens with exact and with compressed reductions: divergence is
    KL(exact || compressed) over the full vocabulary.
    """
    from surgeon.benchmarks.measure import RankBench
    from surgeon.benchmarks.plans import Needs, plan_candidates
    from surgeon.progress import progress
    from surgeon.runtime.worker.ranks import Ranks

    loads, options = load.loads(), on.options(tp)
    needs = Needs(tp, load.length, options.device, on.dtype, on.decoding, on.low_rank, on.kv)
    candidates = programs.candidates(model)
    plans, unconnected = plan_candidates(candidates, needs), {one.name for one in candidates if not one.connected}
    files.check(options.device)
    sent = {} if tp == 1 else {name: plan for name, plan in plans.items() if name not in unconnected}
    texts = _texts(sent, options.compression, data, load)
    with Ranks(options) as ranks:
        measured = RankBench.load(ranks, plans, unconnected)
        with progress("bench", load.rounds * len(loads) * len(plans), "runs") as advance:
            results = measured.measure(loads, load.rounds, advance)
        if files.trace is not None:
            _write_trace(files.trace, measured, loads[0], options)
        costs = _compression_costs(measured, texts, options.compression)
    place = f"{tp} {'rank' if tp == 1 else 'ranks'} ({options})"
    heading = f"{place}, {load}"
    settings: dict[str, Any] = {"seed": load.seed, "place": place, "rounds": load.rounds}
    settings |= _say(heading, results, costs, data or RANDOM)
    if files.output is not None:
        _write(files.output, model, results, settings, heading)


def _say(heading: str, results: list[Result], costs: dict[str, CompressionCost], text: str) -> dict[str, Any]:
    """Print what was measured; returns what the record says of compression."""
    from surgeon.reports.bench import bench_table, describe_bench
    from surgeon.reports.compression import compression_record, describe_compression

    typer.echo(f"{heading}\n\n{describe_bench(bench_table(results))}")
    if not costs:
        return {}
    typer.echo(f"\n{describe_compression(costs, text)}")
    return {"compression": compression_record(costs, text)}


def _texts(
    plans: Mapping[str, Plan], compression: str | None, data: str | None, load: LoadArguments
) -> dict[str, list[list[int]]]:
    """What each program that sends anything is to predict; empty without compression."""
    from surgeon.benchmarks.compression_cost import windows_of

    if compression is None:
        if data is not None:
            raise ValueError(f"--data {data} is for measuring what --compress changes; give --compress, too")
        return {}
    windows = windows_of(plans.values(), data, load.length, COMPARED_TOKENS, load.seed)
    return dict(zip(plans, windows, strict=True))


def _compression_costs(
    bench: RankBench, texts: dict[str, list[list[int]]], kind: Compression | None
) -> dict[str, CompressionCost]:
    from surgeon.benchmarks.compression_cost import measure_compression

    if kind is None:
        return {}
    return {name: measure_compression(bench.ranks, bench.plans[name], text, kind, name) for name, text in texts.items()}


def _write_trace(path: Path, bench: RankBench, load: Workload, options: RankOptions) -> None:
    import json

    from surgeon.benchmarks.trace import Wires, chrome_trace
    from surgeon.processes.files import write_text

    write_text(
        path, json.dumps(chrome_trace(bench.trace(load), Wires(options.collectives == "shm", options.link))) + "\n"
    )
    print(f"{path}: open it in chrome://tracing or https://ui.perfetto.dev", file=sys.stderr)


def _write(folder: Path, model: str, results: list[Result], settings: dict[str, Any], heading: str) -> None:
    from surgeon.checkpoint.read import Checkpoint
    from surgeon.processes.files import write_json, write_table
    from surgeon.provenance import provenance
    from surgeon.reports.bench import bench_record, bench_table, draw_bench

    table = bench_table(results)
    model_hash = Checkpoint(results[0].plan.folder).model_hash()
    record = provenance(model, model_hash, **settings, results=bench_record(results))
    write_table(folder / "bench.csv", table)
    write_json(folder / "bench.json", record)
    draw_bench(table, folder / "bench.png", heading)
    print(f"{folder}: bench.csv, bench.json, bench.png", file=sys.stderr)
