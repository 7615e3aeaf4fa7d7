"""`surgeon scan`, `surgeon.scan`: the heatmaps of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

from surgeon.commands.command import command, option, several
from surgeon.commands.options import DefaultData, MeasuringFlags, ModelName, Output, SampledAcceptance
from surgeon.language.operations.base import HEATMAPS, describe_name
from surgeon.named import split_values
from surgeon.words import plural

if TYPE_CHECKING:
    from surgeon.findings.scan import Scan

_RANDOM = " and ".join(name for name, heatmap in HEATMAPS.items() if heatmap.is_seeded)
_PAPER = ", ".join(name for name, heatmap in HEATMAPS.items() if heatmap.paper)
_OTHERS = ", ".join(
    describe_name(name, heatmap.note) for name, heatmap in HEATMAPS.items() if not heatmap.paper
)


@command()
def scan(
    model: ModelName,
    data: DefaultData = None,
    output: Output = "runs/scan",
    *,
    operations: Annotated[
        str | Sequence[str] | None,
        several(
            f"A heatmap to make. {_PAPER} (the default: these five), {_OTHERS}, or all; an operation's name stands for "
            "all maps that it has.",
            "--operation",
        ),
    ] = None,
    layers: Annotated[
        range | str | None,
        option("Only stretches inside this range; 4:30 is layers 4 to 29. Default: all layers."),
    ] = None,
    max_length: Annotated[int | None, option("Only stretches of at most this many layers.")] = None,
    every: Annotated[
        int,
        option(
            "A grid: only stretches that begin at multiples of N, counted from the start of --layers, and whose length "
            "is a multiple of N.",
            metavar="N",
        ),
    ] = 1,
    permutations: Annotated[
        int,
        option(
            f"Random orders for each cell of {_RANDOM}, which is the mean over them (of log perplexity); "
            "permutations.csv has each."
        ),
    ] = 1,
    screen: Annotated[
        bool,
        option(
            "Faster: give a cell only as much text as it takes to place it. Cells that are surely beyond ten times the "
            "base perplexity, and cells whose damage is known well, stop early. The column tokens says on how many "
            "each rests; their perplexity is that of the base on all the text, times the ratio to the base on their "
            "part."
        ),
    ] = False,
    sampled_acceptance: SampledAcceptance = False,
    batch: Annotated[
        int | None,
        option(
            "Windows to run together at most. Default: what runs fastest, about 2,048 tokens on a CPU.",
            least=1,
        ),
    ] = None,
    workers: Annotated[
        int,
        option(
            "Processes that share the stretches, each with a GPU of its own, or a share of the cores and of --memory.",
            metavar="N",
            least=1,
        ),
    ] = 1,
    seed: Annotated[int, option(f"Seed of the random orders of {_RANDOM}.")] = 0,
    **text: Unpack[MeasuringFlags],
) -> Scan:
    """Measure what every contiguous stretch of layers tolerates, and draw it as heatmaps.

    Shuffles, prunes, merges and runs in parallel (all together, and two by two) each stretch of layers, and writes
    perplexity and divergence from the original, with 95% intervals over windows of text, and the share of tokens that
    it would draft rightly (greedy_acceptance). Layers count from 0; the columns first and last are both included. A
    map over a parameter has each layer alone, with every value in a column of that name. Interrupted, the same command
    goes on where it was; another one on the same folder adds its cells.

    Raises:
        FileNotFoundError, ValueError: if model, text, maps or layers cannot be used, or the folder holds another scan.
        OSError: if it cannot be written to.
    """
    from surgeon.analysis.scan import SCANNED, check_operations, rounds, select
    from surgeon.analysis.scan import scan as measure
    from surgeon.analysis.subject import open_subject
    from surgeon.commands.command import as_list, as_range, warn
    from surgeon.opened import open_model

    opened = open_model(model)
    folder = Path(output)
    # What is wrong with the cells is said before a large model is loaded.
    selection = select(
        check_operations(SCANNED if operations is None else split_values(as_list(operations))),
        opened.num_layers,
        layers=as_range(layers),
        every=every,
        max_length=max_length,
        permutations=permutations,
    )
    subject = open_subject(opened, data, **text, elsewhere=workers > 1)
    windows = len(subject.windows.ids)
    if screen and len(rounds(windows)) == 1:
        few = f"the text has {plural(windows, 'window')}, too few to screen: every cell gets all of them"
        warn([f"{few}; use a smaller window or more tokens"])
    found = measure(
        subject,
        folder,
        selection,
        seed=seed,
        screened=screen,
        sampled=sampled_acceptance,
        batch=batch,
        workers=workers,
    )
    return replace(found, files=(folder / "cells.csv", *found.draw(folder)))
