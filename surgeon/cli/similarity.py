"""`surgeon similarity`: what a layer's output owes to the layer before it, and how well that predicts damage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.opening import open_measured
from surgeon.cli.options import DataOption, MemoryOption, ModelArgument, OutputOption, TextArguments

if TYPE_CHECKING:
    import pandas as pd

    from surgeon.analysis.proxies import MeasuredScan
    from surgeon.analysis.similarity import Similarity


@grouped
def similarity(
    model: ModelArgument,
    data: DataOption,
    output: OutputOption,
    *,
    text: TextArguments,
    memory: MemoryOption = None,
    scan: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a finished surgeon scan of this model: also correlate every measure with its heatmaps, "
            "and write proxies.csv.",
            show_default=False,
        ),
    ] = None,
    sensitivity: Annotated[
        Path | None,
        typer.Option(
            help="With --scan: folder of a finished surgeon sensitivity of this model; its error bounds are "
            "correlated too.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure how much each layer depends on the one before it, by CKA, block influence and angular distance.

    CKA compares what attention and MLP of a layer add with what they add when the contribution of the layer before is
    taken out of the stream: near 1, the layer hardly needs it. Layer 0 has no layer before it (nan). Biased CKA looks
    too high unless there are many more tokens than features; the debiased one does not.

    Writes similarity.csv (by layer), distances.csv (by stretch; first and last are both included, layers count from
    0), similarity.json, similarity.png and distances.png. Angular distance is the mean over all tokens; the column
    angular_distance_last_token takes the last token of each window only, as it was first defined.
    """
    from surgeon.analysis.proxies import read_pairs, read_scan
    from surgeon.analysis.similarity import similarity as measure_similarity
    from surgeon.reports.similarity import draw_distances, draw_similarity

    if sensitivity is not None and scan is None:
        raise ValueError("--sensitivity is used with --scan only; add --scan and a folder made by surgeon scan")
    subject = open_measured(model, data, text, memory)
    # What is wrong with the folders is said before any work begins.
    measured = None if scan is None else read_scan(scan, subject.model_hash)
    pairs = None if sensitivity is None else read_pairs(sensitivity, subject.model_hash)
    inputs = {"scan": measured and measured.source, "sensitivity": sensitivity and str(sensitivity)}
    record = subject.provenance(**{name: value for name, value in inputs.items() if value})
    found = measure_similarity(subject.model, subject.windows, output, record, subject.memory)
    draw_similarity(found.layers, output / "similarity.png", subject.label)
    draw_distances(found.distances, output / "distances.png", subject.label)
    if measured is not None:
        _correlate(measured, found, pairs, output)
    for name in ("similarity.csv", "distances.csv", "similarity.png", "distances.png"):
        typer.echo(str(output / name))


def _correlate(scan: MeasuredScan, found: Similarity, pairs: pd.DataFrame | None, output: Path) -> None:
    """Write proxies.csv, and print it."""
    from surgeon.analysis.proxies import correlate, write_proxies
    from surgeon.reports.similarity import print_proxies

    table = correlate(scan, found, pairs)
    path = write_proxies(table, output)
    print_proxies(table)
    typer.echo("All proxies, and their rho with the perplexity, are in proxies.csv (stretches")
    typer.echo("overlap, so that its p is too small)")
    typer.echo(str(path))
