"""Scans of tiny models, as the tests of scans run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import surgeon
from surgeon.analysis.engine.measure import measure
from surgeon.analysis.scan import SCANNED, Cell, scan, select, selected_cells
from surgeon.findings.scan import Scan
from surgeon.language.program import Program
from surgeon.language.sublayer import LayerShapes
from surgeon.quality.data import Windows
from tests.analysis.subjects import subject_of
from tests.tiny_models import tiny_model

LAYERS = 4


def run(
    folder: Path,
    windows: Windows,
    model: Any = None,
    operations: list[str] | None = None,
    **options: Any,
) -> Scan:
    """A scan; options that say which cells are taken out for `select`."""
    wanted = {
        name: options.pop(name)
        for name in ("layers", "every", "max_length", "permutations")
        if name in options
    }
    about = {name: options.pop(name) for name in ("model_hash", "memory") if name in options}
    subject = subject_of(model or tiny_model("llama", LAYERS), windows, **about)
    return scan(subject, folder, select(operations or SCANNED, LAYERS, **wanted), **options)


def plain_nll(model: Any, ids: torch.Tensor, program: Program) -> list[float]:
    """Mean negative log-likelihood of each window, from the full logits of an edited model."""
    surgeon.edit(model, program)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    surgeon.restore(model)
    nll = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return [float(value) for value in nll.double().mean(-1)]


class Stopped(Exception):
    pass


def stopping(after: int) -> Any:
    """A `measure` that is killed after some numbers, over all the times it is called."""
    count = 0

    def stop(*arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal count
        for measured in measure(*arguments, **options):
            if count == after:
                raise Stopped
            count += 1
            yield measured

    return stop


def scan_cells(
    operations: Sequence[str],
    num_layers: int,
    seed: int,
    steps_per_layer: int = 2,
    shapes: LayerShapes | None = None,
) -> list[Cell]:
    """All cells of these heatmaps, in the order of the table: by operation, first layer, last layer or value."""
    return selected_cells([select(operations, num_layers)], num_layers, seed, steps_per_layer, shapes)
