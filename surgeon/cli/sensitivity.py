"""`surgeon sensitivity`: what running two neighbouring layers in parallel should cost, and what it does."""

from __future__ import annotations

from typing import Annotated

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import DefaultDataOption, DefaultOutputOption, MemoryOption, ModelArgument, TextArguments


@grouped
def sensitivity(
    model: ModelArgument,
    data: DefaultDataOption = None,
    output: DefaultOutputOption = "runs/sensitivity",
    *,
    text: TextArguments,
    memory: MemoryOption = None,
    windows_for_jacobians: Annotated[
        int, typer.Option(min=1, help="Windows to compute Jacobians on, spread over the data.")
    ] = 4,
    iterations: Annotated[
        int,
        typer.Option(min=1, help="The most iterations for a Jacobian's norm; those that bound it to 1% are enough."),
    ] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the vectors that the iterations start from.")] = 0,
) -> None:
    """Bound the error of each pair of neighbouring layers in parallel (LP), and measure it.

    For every pair: the terms of the bound in appendix A of the Layer Parallelism paper (norms of updates, operator
    norms of Jacobians), the error itself, and the damage to predictions with just that pair in parallel. Prints how
    well the one orders the other.

    Writes sensitivity.csv (first and last are the pair's layers, counted from 0), sensitivity.json and
    sensitivity.png. Interrupted, the same command goes on where it was.
    """
    from surgeon.library.sensitivity import sensitivity as measure_sensitivity

    found = measure_sensitivity(
        model,
        data,
        output,
        windows_for_jacobians=windows_for_jacobians,
        iterations=iterations,
        seed=seed,
        **vars(text),
        memory=memory,
    )
    typer.echo(str(found))
    for path in found.files:
        typer.echo(str(path))
