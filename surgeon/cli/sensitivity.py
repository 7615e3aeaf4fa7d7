"""`surgeon sensitivity`: what running two neighbouring layers in parallel should cost, and what it does."""

from __future__ import annotations

from typing import Annotated

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.opening import open_measured, warn
from surgeon.cli.options import DataOption, MemoryOption, ModelArgument, OutputOption, TextArguments


@grouped
def sensitivity(
    model: ModelArgument,
    data: DataOption,
    output: OutputOption,
    *,
    text: TextArguments,
    memory: MemoryOption = None,
    windows_for_jacobians: Annotated[
        int, typer.Option(min=1, help="Windows to compute Jacobians on, spread over the data.")
    ] = 4,
    iterations: Annotated[
        int,
        typer.Option(
            min=1, help="The most iterations for a Jacobian's norm; it ends when one changes it by under 0.1%."
        ),
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
    from surgeon.analysis.jacobian import PowerIteration
    from surgeon.analysis.sensitivity import sensitivity as measure_sensitivity
    from surgeon.reports.sensitivity import draw_sensitivity, print_sensitivity

    subject = open_measured(model, data, text, memory)
    found = measure_sensitivity(
        subject.model,
        subject.windows,
        output,
        model_hash=subject.model_hash,
        power=PowerIteration(iterations=iterations, seed=seed),
        jacobian_windows=windows_for_jacobians,
        memory=subject.memory,
        record=subject.provenance(seed=seed),
    )
    draw_sensitivity(found.table, output / "sensitivity.png", subject.label)
    print_sensitivity(found.correlations, found.table, found.record["errors_within_bound"], found.record["errors"])
    slow = [f"{row.first}-{row.last}" for row in found.table.itertuples() if not row.converged]
    if slow:
        warn([f"{iterations} iterations were too few for pairs {', '.join(slow)}"])
    for name in ("sensitivity.csv", "sensitivity.png"):
        typer.echo(str(output / name))
