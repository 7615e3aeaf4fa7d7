"""`surgeon scan`: the heatmaps of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.opening import open_measured, warn
from surgeon.cli.options import DataOption, MemoryOption, ModelArgument, OutputOption, TextArguments
from surgeon.language.operations.declare import HEATMAPS, described

if TYPE_CHECKING:
    from surgeon.analysis.cells import Selection
    from surgeon.analysis.scan import Scan
    from surgeon.analysis.subject import Subject

_RANDOM = " and ".join(name for name, heatmap in HEATMAPS.items() if heatmap.seeded)


def _heatmaps_listed() -> str:
    """All heatmaps, those of the paper first, as the help text lists them."""
    first = [name for name, heatmap in HEATMAPS.items() if heatmap.paper]
    others = [described(name, heatmap.note) for name, heatmap in HEATMAPS.items() if not heatmap.paper]
    return ", ".join([f"{', '.join(first)} (the default: these five)", *others])


@dataclass(frozen=True)
class CellArguments:
    """Which cells of which heatmaps, in the user's words; a group of options (see grouped.py)."""

    operation: Annotated[
        list[str] | None,
        typer.Option(
            "--operation",
            help=f"A heatmap to make; may be repeated. {_heatmaps_listed()}, or all.",
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

    def selection(self, model: str) -> Selection:
        """The cells of a model; its configuration is read, and no weights.

        Raises:
            ValueError: if there is no such heatmap, or no such layers.
        """
        from surgeon.analysis.cells import SCANNED, check_operations, select
        from surgeon.checkpoint.load import read_config
        from surgeon.checkpoint.read import Checkpoint, locate
        from surgeon.language.recipe import parse_range

        operations = check_operations(self.operation or SCANNED)
        return select(
            operations,
            read_config(Checkpoint(locate(model))).num_hidden_layers,
            layers=None if self.layers is None else parse_range(self.layers),
            every=self.every,
            max_length=self.max_length,
            permutations=self.permutations,
        )


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
    data: DataOption,
    output: OutputOption,
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
    text: TextArguments,
    effort: EffortArguments,
    seed: Annotated[int, typer.Option("--seed", help=f"Seed of the random orders of {_RANDOM}.")] = 0,
) -> None:
    """Measure what every contiguous stretch of layers tolerates, and draw it as heatmaps.

    Shuffles, prunes, merges and runs in parallel (all together, and two by two) each stretch of layers, and writes
    perplexity and divergence from the original for each, with 95% intervals over windows of text. Layers count from
    0; the columns first and last are both included. A map over a parameter has each layer alone, with every value;
    the table then has a column of that name. Interrupted, the same command goes on where it was; another one
    on the same folder adds its cells.
    """
    from surgeon.analysis.engine.workers import Workers
    from surgeon.analysis.scan import scan as run_scan
    from surgeon.reports.curves import draw_curves
    from surgeon.reports.heatmap import draw_heatmaps

    selection = cells.selection(model)  # what is wrong with it is said before a large model is loaded
    workers, batch = effort.workers, effort.batch
    subject = open_measured(model, data, text, effort.memory, elsewhere=workers > 1)
    if screen:
        _warn_if_few(len(subject.windows.ids))
    result = run_scan(
        subject.model,
        subject.windows,
        output,
        selection,
        model_hash=subject.model_hash,
        seed=seed,
        screened=screen,
        memory=subject.memory,
        batch=batch,
        workers=Workers(workers, subject.folder, batch) if workers > 1 else None,
        record=subject.provenance(seed=seed),
    )
    _say(result, subject, output, screen)
    for draw in (draw_heatmaps, draw_curves):
        for picture in draw(result.table, result.base_perplexity, output, subject.label):
            typer.echo(str(picture))


def _warn_if_few(windows: int) -> None:
    """Say so if there is too little text to give some cells less of it."""
    from surgeon.analysis.screen import rounds

    if len(rounds(windows)) == 1:
        few = f"{windows} windows are too few to screen: every cell gets all of them"
        warn([f"{few}; use a smaller --window or more --tokens"])


def _say(result: Scan, subject: Subject, output: Path, screened: bool) -> None:
    """Print what was measured, a few lines."""
    ran, loop = result.record["sublayers_run"], result.record["sublayers_of_a_loop"]
    typer.echo(f"base perplexity {result.base_perplexity:.4g} over {subject.windows.predicted:,} predicted tokens")
    typer.echo(f"{len(result.table):,} cells in {output / 'cells.csv'}")
    typer.echo(f"sublayers run: {ran['total']:,}; a loop over cells would have run {loop['total']:,}")
    if screened:
        rests_on = result.table["tokens"].mean() / subject.windows.predicted
        typer.echo(f"screened: a cell rests on {rests_on:.0%} of the tokens on average")
