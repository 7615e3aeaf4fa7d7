"""`surgeon scan`: the heatmaps of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def scan(
    model: Annotated[str, typer.Argument(help="A model: a checkpoint folder, or a name on the Hugging Face hub.")],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Text to measure on: a UTF-8 text file, a dataset as name[:config[:split]], or demo "
            "(source files of the Python standard library).",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for cells.csv, scan.json and the PNG files; made if missing.")
    ],
    operation: Annotated[
        list[str] | None,
        typer.Option(
            "--operation",
            help="A heatmap to make: shuffle, prune, merge, parallel, 2-parallel; may be repeated. Default: all.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to measure on, from the start of the data.")] = 8192,
    window: Annotated[
        int | None,
        typer.Option("--window", help="Tokens in a window. Default: 512, or the model's positions if it has fewer."),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(
            "--separator",
            help="Text between the documents of the data, such as '<|endoftext|>': they are kept apart, each "
            "begun with the tokenizer's BOS. With a dataset, every row is a document then.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="The most memory the process may take, model included, such as 512MB or 2GB."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            min=1,
            help="Windows to run together at most. Default: what runs fastest, about 2,048 tokens on a CPU.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random orders of shuffle.")] = 0,
) -> None:
    """Measure what every contiguous stretch of layers tolerates, and draw it as heatmaps.

    Shuffles, prunes, merges and runs in parallel (all together, and two by two) each stretch of layers, and writes
    perplexity and divergence from the original for each. Layers count from 0; the columns first and last are both
    included. Interrupted, the same command goes on where it was.
    """
    from surgeon.analysis.cells import SCANNED, check_operations
    from surgeon.analysis.scan import scan as run_scan
    from surgeon.analysis.subject import open_subject
    from surgeon.memory import parse_size
    from surgeon.report.heatmap import draw_heatmaps

    operations = check_operations(operation or list(SCANNED))
    limit = None if memory is None else parse_size(memory)
    subject = open_subject(model, data, tokens, window, separator)
    for note in subject.windows.notes:
        typer.echo(f"warning: {note}", err=True)
    result = run_scan(
        subject.model,
        subject.windows,
        output,
        operations,
        weights_hash=subject.weights_hash,
        seed=seed,
        memory=limit,
        batch=batch,
        record=subject.provenance(seed=seed),
    )
    pictures = draw_heatmaps(result.table, result.base_perplexity, output, subject.label)
    ran, loop = result.record["sublayers_run"], result.record["sublayers_of_a_loop"]
    typer.echo(f"base perplexity {result.base_perplexity:.4g} over {subject.windows.predicted:,} predicted tokens")
    typer.echo(f"{len(result.table):,} cells in {output / 'cells.csv'}")
    typer.echo(f"sublayers run: {ran['total']:,}; a loop over cells would have run {loop['total']:,}")
    for picture in pictures:
        typer.echo(str(picture))
