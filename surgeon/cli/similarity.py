"""`surgeon similarity`: what a layer's output owes to the layer before it, and how well that predicts damage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import DefaultDataOption, DefaultOutputOption, MemoryOption, ModelArgument, TextArguments


@grouped
def similarity(
    model: ModelArgument,
    data: DefaultDataOption = None,
    output: DefaultOutputOption = "runs/similarity",
    *,
    text: TextArguments,
    memory: MemoryOption = None,
    scan: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a finished surgeon scan of this model: also correlate every measure with its heatmaps, "
            "and write proxies.csv."
        ),
    ] = None,
    sensitivity: Annotated[
        Path | None,
        typer.Option(
            help="With --scan: folder of a finished surgeon sensitivity of this model; its error bounds are "
            "correlated too."
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
    from surgeon.library.similarity import similarity as measure_similarity

    found = measure_similarity(model, data, output, scan=scan, sensitivity=sensitivity, **vars(text), memory=memory)
    if len(found.proxies):
        typer.echo(f"{found}\n")
        typer.echo("All proxies, and their rho with the perplexity, are in proxies.csv (stretches")
        typer.echo("overlap, so that its p is too small)")
    for path in found.files:
        typer.echo(str(path))
