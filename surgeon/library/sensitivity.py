"""`surgeon.sensitivity`: what running two neighbouring layers in parallel should cost, and what it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from surgeon.analysis.jacobian import Lanczos
from surgeon.analysis.sensitivity import sensitivity as measure_sensitivity
from surgeon.analysis.subject import open_subject
from surgeon.findings.sensitivity import Sensitivity
from surgeon.library.opening import check_counts, warn
from surgeon.opened import Model
from surgeon.quality.data import DEFAULT_TOKENS


def sensitivity(
    model: str | Path | Model,
    data: str | Path | None = None,
    output: str | Path = "runs/sensitivity",
    *,
    windows_for_jacobians: int = 4,
    iterations: int = 100,
    seed: int = 0,
    tokens: int = DEFAULT_TOKENS,
    window: int | None = None,
    separator: str | None = None,
    memory: int | str | None = None,
) -> Sensitivity:
    """Bound the error of each pair of neighbouring layers in parallel (Layer Parallelism, appendix A), and measure it.

    Args:
        model: a folder, a hub name, "demo", or a model that is open.
        data: a text file, a table or a dataset (docs/texts.md), or "demo"; by default that, with a warning.
        output: folder for sensitivity.csv, sensitivity.json and a picture; what is there already is gone on with.
        windows_for_jacobians: windows to compute Jacobians on, spread over the data.
        iterations: the most for a Jacobian's norm; those that bound it to 1% are enough.
        seed: of the vectors that the iterations start from.
        tokens: of the text, in windows of `window`; documents are apart at `separator`.
        memory: the most that the process may take, in bytes or as text ("2GB").

    Raises:
        FileNotFoundError, ValueError: if the model or the text cannot be used, or the folder holds something else.
        OSError: if the folder cannot be written to.
    """
    check_counts(windows_for_jacobians=windows_for_jacobians, iterations=iterations)
    folder = Path(output)
    subject = open_subject(model, data, tokens=tokens, window=window, separator=separator, memory=memory)
    lanczos = Lanczos(iterations=iterations, seed=seed)
    found = measure_sensitivity(subject, folder, lanczos=lanczos, jacobian_windows=windows_for_jacobians)
    slow = [f"{row.first}-{row.last}" for row in found.pairs.itertuples() if not row.converged]
    if slow:
        warn([f"{iterations} iterations were too few for pairs {', '.join(slow)}"])
    return replace(found, files=(folder / "sensitivity.csv", *found.draw(folder)))
