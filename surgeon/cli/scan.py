"""`surgeon scan`: the heatmaps of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import (
    DefaultDataOption,
    DefaultOutputOption,
    MemoryOption,
    ModelArgument,
    SampledOption,
    TextArguments,
    several,
)
from surgeon.language.operations.declare import HEATMAPS, described

_RANDOM = " and ".join(name for name, heatmap in HEATMAPS.items() if heatmap.seeded)
_PAPER = ", ".join(name for name, heatmap in HEATMAPS.items() if heatmap.paper)
_OTHERS = ", ".join(described(name, heatmap.note) for name, heatmap in HEATMAPS.items() if not heatmap.paper)


@dataclass(frozen=True)
class CellArguments:
    """Which cells of which heatmaps, in the user's words; a group of options (see grouped.py)."""

    operation: Annotated[
        list[str] | None,
        several(
            "--operation",
            help=f"A heatmap to make. {_PAPER} (the default: these five), {_OTHERS}, or "
            "all; an operation's name stands for all maps that it has.",
        ),
    ] = None
    layers: Annotated[
        str | None,
        typer.Option("--layers", help="Only stretches inside this range; 4:30 is layers 4 to 29. Default: all layers."),
    ] = None
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Only stretches of at most this many layers.")
    ] = None
    every: Annotated[
        int,
        typer.Option(
            "--every",
            help="A grid: only stretches that begin at multiples of N, counted from the start of --layers, and whose "
            "length is a multiple of N.",
            metavar="N",
        ),
    ] = 1
    permutations: Annotated[
        int,
        typer.Option(
            "--permutations",
            help=f"Random orders for each cell of {_RANDOM}, which is the mean over them (of log perplexity); "
            "permutations.csv has each.",
        ),
    ] = 1


@dataclass(frozen=True)
class EffortArguments:
    """How much a scan computes at a time, and where; a group of options (see grouped.py)."""

    memory: MemoryOption = None
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            min=1,
            help="Windows to run together at most. Default: what runs fastest, about 2,048 tokens on a CPU.",
        ),
    ] = None
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            metavar="N",
            help="Processes that share the stretches, each with a GPU of its own, or a share of the cores and of "
            "--memory.",
        ),
    ] = 1


@grouped
def scan(
    model: ModelArgument,
    data: DefaultDataOption = None,
    output: DefaultOutputOption = "runs/scan",
    *,
    cells: CellArguments,
    screen: Annotated[
        bool,
        typer.Option(
            "--screen",
            help="Faster: give a cell only as much text as it takes to place it. Cells that are surely beyond ten "
            "times the base perplexity, and cells whose damage is known well, stop early. The column tokens says on "
            "how many each rests; their perplexity is that of the base on all the text, times the ratio to the base "
            "on their part.",
        ),
    ] = False,
    sampled_acceptance: SampledOption = False,
    text: TextArguments,
    effort: EffortArguments,
    seed: Annotated[int, typer.Option("--seed", help=f"Seed of the random orders of {_RANDOM}.")] = 0,
) -> None:
    """Measure what every contiguous stretch of layers tolerates, and draw it as heatmaps.

    Shuffles, prunes, merges and runs in parallel (all together, and two by two) each stretch of layers, and writes
    perplexity and divergence from the original for each, with 95% intervals over windows of text, and how often
    tokens that it drafts would be accepted (greedy_acceptance). Layers count from
    0; the columns first and last are both included. A map over a parameter has each layer alone, with every value;
    the table then has a column of that name. Interrupted, the same command goes on where it was; another one
    on the same folder adds its cells.
    """
    from surgeon.library.scan import scan as run_scan

    found = run_scan(
        model,
        data,
        output,
        operations=cells.operation,
        layers=cells.layers,
        max_length=cells.max_length,
        every=cells.every,
        permutations=cells.permutations,
        screen=screen,
        sampled_acceptance=sampled_acceptance,
        **vars(text),
        **vars(effort),
        seed=seed,
    )
    ran, loop, predicted = (found.record[key] for key in ("sublayers_run", "sublayers_of_a_loop", "tokens_predicted"))
    typer.echo(f"base perplexity {found.base_perplexity:.4g} over {predicted:,} predicted tokens")
    cells_file, *pictures = found.files
    typer.echo(f"{len(found.cells):,} cells in {cells_file}")
    typer.echo(f"sublayers run: {ran['total']:,}; a loop over cells would have run {loop['total']:,}")
    if screen:
        typer.echo(f"screened: a cell rests on {found.cells['tokens'].mean() / predicted:.0%} of the tokens on average")
    for picture in pictures:
        typer.echo(str(picture))
