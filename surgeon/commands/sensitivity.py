"""`surgeon sensitivity`, `surgeon.sensitivity`: damage of running two neighbouring layers in parallel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

from surgeon.commands.command import command, option
from surgeon.commands.options import DefaultData, MeasuringFlags, ModelName, Output

if TYPE_CHECKING:
    from surgeon.findings.sensitivity import Sensitivity


@command()
def sensitivity(
    model: ModelName,
    data: DefaultData = None,
    output: Output = "runs/sensitivity",
    *,
    windows_for_jacobians: Annotated[
        int, option("Windows to compute Jacobians on, spread over the data.", least=1)
    ] = 4,
    iterations: Annotated[
        int,
        option(
            "The most iterations for a Jacobian's norm; those that bound it to 1% are enough.", least=1
        ),
    ] = 100,
    seed: Annotated[int, option("Seed of the vectors that the iterations start from.")] = 0,
    **text: Unpack[MeasuringFlags],
) -> Sensitivity:
    """Bound the error of each pair of neighbouring layers in parallel (LP), and measure it.

    For every pair: the terms of the bound in appendix A of the Layer Parallelism paper (norms of updates, operator
    norms of Jacobians), the error itself, and the damage to predictions with just that pair in parallel. Prints how
    well the one orders the other.

    Writes sensitivity.csv (first and last are the pair's layers, counted from 0), sensitivity.json and
    sensitivity.png. Interrupted, the same command goes on where it was.

    Raises:
        FileNotFoundError, ValueError: if model or text cannot be used, or the folder holds something else.
        OSError: if it cannot be written to.
    """
    from surgeon.analysis.sensitivity import Lanczos
    from surgeon.analysis.sensitivity import sensitivity as measure
    from surgeon.analysis.subject import open_subject
    from surgeon.commands.command import warn

    folder = Path(output)
    subject = open_subject(model, data, **text)
    lanczos = Lanczos(iterations=iterations, seed=seed)
    found = measure(subject, folder, lanczos=lanczos, jacobian_windows=windows_for_jacobians)
    slow = [f"{row.first}-{row.last}" for row in found.pairs.itertuples() if not row.converged]
    if slow:
        warn([f"{iterations} iterations were too few for pairs {', '.join(slow)}"])
    return replace(found, files=(folder / "sensitivity.csv", *found.draw(folder)))
