"""`surgeon.scan`: the heatmaps of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from surgeon.analysis.cells import SCANNED, check_operations, select
from surgeon.analysis.scan import scan as run_scan
from surgeon.analysis.screen import rounds
from surgeon.analysis.subject import open_subject
from surgeon.findings.scan import Scan
from surgeon.library.opening import as_list, as_range, check_counts, warn
from surgeon.named import split_values
from surgeon.opened import Model, open_model
from surgeon.quality.data import DEFAULT_TOKENS


def scan(
    model: str | Path | Model,
    data: str | Path | None = None,
    output: str | Path = "runs/scan",
    *,
    operations: str | Sequence[str] | None = None,
    layers: range | str | None = None,
    max_length: int | None = None,
    every: int = 1,
    permutations: int = 1,
    screen: bool = False,
    sampled_acceptance: bool = False,
    tokens: int = DEFAULT_TOKENS,
    window: int | None = None,
    separator: str | None = None,
    memory: int | str | None = None,
    batch: int | None = None,
    workers: int = 1,
    seed: int = 0,
) -> Scan:
    """Measure what every contiguous stretch of layers tolerates; what is in the folder already is gone on with.

    Args:
        model: a folder, a hub name, "demo", or a model that is open.
        data: a text file, a table or a dataset (docs/texts.md), or "demo"; by default that, with a warning.
        output: folder for cells.csv, permutations.csv, scan.json and pictures.
        operations: names of heatmaps, also "lp,prune"; by default the five of the paper, "all" for every one.
        layers: only stretches inside this range; "4:30" is layers 4 to 29.
        max_length: only stretches of at most this many layers.
        every: only stretches that begin at multiples of it, and whose length is one.
        permutations: random orders for each cell of shuffle.
        screen: give a cell only as much text as it takes to place it.
        sampled_acceptance: measure sampled acceptance, too: the mean over tokens of sum_v min(p_v, q_v), for which all
            probabilities of the original are computed again for every cell.
        tokens: of the text, in windows of `window`; documents are apart at `separator`.
        memory: the most that the process may take, in bytes or as text ("2GB").
        batch: windows to run together at most.
        workers: processes that share the stretches.
        seed: of the random orders.

    Raises:
        FileNotFoundError, ValueError: if the model or the text cannot be used, there is no such heatmap or range, or
            the folder holds a scan of something else.
        OSError: if the folder cannot be written to.
    """
    check_counts(batch=batch, workers=workers)
    opened, folder = open_model(model), Path(output)
    # What is wrong with the cells is said before a large model is loaded.
    selection = select(
        check_operations(SCANNED if operations is None else split_values(as_list(operations))),
        opened.num_layers,
        layers=as_range(layers),
        every=every,
        max_length=max_length,
        permutations=permutations,
    )
    subject = open_subject(
        opened, data, tokens=tokens, window=window, separator=separator, memory=memory, elsewhere=workers > 1
    )
    windows = len(subject.windows.ids)
    if screen and len(rounds(windows)) == 1:
        few = f"{windows} windows are too few to screen: every cell gets all of them"
        warn([f"{few}; use a smaller window or more tokens"])
    found = run_scan(
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
