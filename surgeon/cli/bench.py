"""`surgeon bench`: what programs cost on ranks, against each other."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import (
    DATA_HELP,
    BatchesOption,
    NewTokensOption,
    RanksOption,
    RoundsOption,
    RunArguments,
    VariantLayersOption,
    parse_counts,
    several,
)
from surgeon.language.operations.declare import VARIANTS, described

_VARIANTS_LISTED = ", ".join(described(name, variant.note) for name, variant in VARIANTS.items())
DivergenceOption = Annotated[
    str | None,
    typer.Option(
        help="With --compress: what to measure its divergence from exact reductions on. Default: random tokens. "
        + DATA_HELP
    ),
]


@dataclass(frozen=True)
class ProgramArguments:
    """Which programs of a model are measured, in the user's words; a group of options (see grouped.py)."""

    compare: Annotated[
        list[str] | None,
        several(
            "--compare",
            help="Measure this too, in turns, and compare. A checkpoint, a recipe, a program such as "
            f'"A0 F0 [A1 A2] [F1 F2]", or a variant of the model: dense, {_VARIANTS_LISTED}, halves (itself, '
            "computed in two halves, one while the other's reductions are on their way), upper-bound (without any "
            "communication: wrong results, and the best time there can be).",
        ),
    ] = None
    layers: VariantLayersOption = None


@dataclass(frozen=True)
class LoadArguments:
    """What every program is given to do, in the user's words; a group of options (see grouped.py)."""

    batch: BatchesOption = None
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt; they are random.")] = 64
    new: NewTokensOption = 32
    rounds: RoundsOption = 5
    seed: Annotated[int, typer.Option(help="Of the random tokens.")] = 0


@dataclass(frozen=True)
class BenchRun(RunArguments):
    """The ranks that everything runs on, in the user's words; a group of options (see grouped.py)."""

    tp: RanksOption = 2
    collectives: Annotated[
        str, typer.Option(help="shm, gloo, nccl, auto: the fastest that fits, or none: see upper-bound.")
    ] = "auto"


@dataclass(frozen=True)
class BenchFiles:
    """What is written; a group of options (see grouped.py)."""

    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a timeline of every program's prefill and one decoding pass, for chrome://tracing or Perfetto; "
            "on GPUs what torch.profiler sees of the first passes, a file for each rank (NAME.rank0.json, ...)."
        ),
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for bench.csv, bench.json and bench.png.")
    ] = None


@grouped
def bench(
    model: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint folder, a hub name, demo, or a recipe (.yaml).")
    ],
    *,
    programs: ProgramArguments,
    load: LoadArguments,
    run: BenchRun,
    data: DivergenceOption = None,
    files: BenchFiles,
) -> None:
    """Measure how fast programs run on ranks, and where the time of a pass goes.

    Everything is loaded by the same ranks and measured in turns; a ratio is the median over the rounds of the one
    taken in each. First token: from being asked until every text has one. Per token: a decoding pass. Tokens/s: new
    tokens of all texts, from being asked to the last. Waiting: time in collectives; "32+2" are 32 of the program's
    steps and 2 of embedding and head. Bytes are those of the program's steps, of one rank. On GPUs waiting is told by
    CUDA events in one more run, and beside it when all of a pass was launched.

    Caches have all the memory they need here, so that --kv auto is full; --kv lowrank is for the programs that have
    factors of k and v, beside others that have none.

    With --compress the same weights also predict some tokens with exact and with compressed reductions: divergence is
    KL(exact || compressed) over the full vocabulary.
    """
    from surgeon.library.bench import bench as measure

    batch = parse_counts("--batch", load.batch, [1])
    given: dict[str, Any] = vars(load) | {"batch": batch} | run.options() | vars(files)
    found = measure(model, compare=programs.compare or (), layers=programs.layers, data=data, **given)
    typer.echo(str(found))
    for timeline in found.traces:
        print(f"{timeline}: open it in chrome://tracing or https://ui.perfetto.dev", file=sys.stderr)
    if files.output is not None:
        print(f"{files.output}: bench.csv, bench.json, bench.png", file=sys.stderr)
