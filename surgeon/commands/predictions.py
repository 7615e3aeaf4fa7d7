"""Predictions for programs on described hardware, and of drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from surgeon.commands.opening import as_list, as_several
from surgeon.cost.candidates import SweepCell, draft_cells, parse_sweep
from surgeon.cost.hardware import Hardware, write_hardware
from surgeon.errors import did_you_mean
from surgeon.findings.prediction import AXES, DRAFT_COLUMNS, words_of
from surgeon.provenance import provenance


def heading_of(hardware: Hardware, cells: Sequence[SweepCell]) -> str:
    """Head predictions with what they have in common."""
    deployments = [cell.deployment for cell in cells]
    loads = [cell.workload for cell in cells]
    common = deployments[0]
    ranks = {one.ranks for one in deployments}
    most = max(ranks)
    words = []
    if len(ranks) == 1:
        words.append(words_of("ranks", most))
    if most > 1:
        words.append(common.link or next(iter(hardware.links), "no link"))
    if most > (common.node or hardware.devices) and hardware.networks:
        words.append(common.network or next(iter(hardware.networks)))
    words += filter(None, [str(common.dtype), common.compress])
    for axis in ("prompt", "new"):
        values = {getattr(one, axis) for one in loads}
        if len(values) == 1:
            words.append(words_of(axis, values.pop()))
    return f"{cells[0].candidate.model.label} on {hardware.name}: {', '.join(words)}"


def record_of(
    name: str, hardware: Hardware, cells: Sequence[SweepCell], said: dict[str, Any]
) -> dict[str, Any]:
    """The record beside the table of predictions."""
    programs = {
        cell.candidate.name: {
            "program": cell.prediction.plan.program,
            "model": cell.candidate.model.label,
        }
        for cell in reversed(cells)
        if cell.prediction is not None
    }
    settings = said | {
        "deployment": asdict(cells[0].deployment) | {"connected": True},
        "programs": programs,
        "hardware": hardware.name,
        "hardware_file": write_hardware(hardware),
    }
    return provenance(name, "", **settings, **cells[0].candidate.model.gguf)


def draft_table(
    cells: Sequence[SweepCell], hardware: Hardware, chances: Sequence[float], swept: bool
) -> tuple[pd.DataFrame, list[str]]:
    """Predict where the second of two candidates drafts for the first, by its tokens' chances to be right.

    Returns:
        The rows, and in a sweep, why the draft cannot run beside the model.
    """
    rows = list[dict[str, float]]()
    refused = list[str]()
    for plain, alone in zip(cells[::2], cells[1::2], strict=True):
        try:
            rows += draft_cells(plain, alone, hardware, chances)
        except ValueError as error:
            if not swept:
                raise
            refused.append(
                f"{words_of('ranks', plain.deployment.ranks)}, batch {plain.workload.batch}: {error}"
            )
    return pd.DataFrame(rows, columns=list(DRAFT_COLUMNS)), list(dict.fromkeys(refused))


def read_axes(
    sweep: str | Sequence[str] | Mapping[str, int | Sequence[int]] | None,
) -> dict[str, list[int]]:
    """Read the values of each axis to predict for, as of `predict`."""
    if not sweep:
        return {}
    if not isinstance(sweep, Mapping):
        return parse_sweep(",".join(as_list(sweep)))
    axes = {name: [*as_several(values)] for name, values in sweep.items()}
    for name, values in axes.items():
        if name not in AXES:
            raise ValueError(f"there is no {name!r} to sweep; {did_you_mean(name, AXES)}")
        if not values:
            raise ValueError(f"there are no values of {name} to predict for; give at least one")
    return axes
