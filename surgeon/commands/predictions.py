"""Predictions for programs on hardware that is described, and where drafts pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypedDict, Unpack

import pandas as pd

from surgeon.commands.on_ranks import draft_program
from surgeon.commands.opening import as_list, as_range
from surgeon.cost.candidates import Candidate, open_candidates
from surgeon.cost.deployment import Deployment
from surgeon.cost.drafts import check_chances, draft_cells
from surgeon.cost.hardware import Hardware
from surgeon.cost.hardware_file import load_hardware, write_hardware
from surgeon.cost.sweep import SweepCell, parse_sweep
from surgeon.cost.sweep import sweep as _sweep
from surgeon.cost.workload import Workload
from surgeon.errors import did_you_mean
from surgeon.findings.prediction import AXES, DRAFT_COLUMNS, DraftRun, words_of
from surgeon.language.program import Program
from surgeon.named import on_disk
from surgeon.opened import EditedModel, Model
from surgeon.processes.files import make_folder
from surgeon.progress import progress
from surgeon.provenance import provenance
from surgeon.runtime.plan.drafts import named_draft


class Asked(TypedDict, total=False):
    """What of the model, and where: what all functions here take.

    Keys:
        layers: that variants change; "4:30" is layers 4 to 29. All but the first and last two by default.
        prompt, new: tokens of each prompt, and to add to each; by default 1024 and 512, or a half and a quarter of the
            model's positions.
        ranks: tensor-parallel ranks that share the model, or all of how it is spread over the hardware; one by default.
        sweep: all combinations of these, as "ranks=1..64,batch=1..256" (doubling), or as values by axis.
        output: folder for a table, its record and a picture.
    """

    layers: range | str | None
    prompt: int | None
    new: int | None
    ranks: int | Deployment
    sweep: str | Sequence[str] | Mapping[str, Sequence[int]] | None
    output: str | Path | None


@dataclass(frozen=True)
class PredictionInputs:
    """The same, read; some may be refused in a sweep only."""

    candidates: Sequence[Candidate]
    hardware: Hardware
    deployment: Deployment
    workload: Workload
    axes: dict[str, list[int]]
    folder: Path | None
    swept: bool

    @classmethod
    def of(
        cls, candidates: Sequence[Candidate], hardware: str | Path | Hardware, asked: Asked, batch: int | Sequence[int]
    ) -> PredictionInputs:
        machine = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
        ranks = asked.get("ranks", 1)
        sweep = asked.get("sweep")
        output = asked.get("output")
        deployment = ranks if isinstance(ranks, Deployment) else Deployment(ranks)
        dtype = deployment.dtype or machine.dtype(candidates[0].model.shapes.dtype)  # as its weights have it
        positions = min(candidate.model.positions for candidate in candidates)
        workload = Workload.within(positions, 1, asked.get("prompt"), asked.get("new"))
        axes = {**_axes({"batch": batch}), **_axes(sweep)}
        folder = None
        if output is not None:
            folder = Path(output)
            make_folder(folder)
        return cls(candidates, machine, replace(deployment, dtype=dtype), workload, axes, folder, sweep is not None)

    def cells(self) -> list[SweepCell]:
        number = len(self.candidates) * prod(map(len, self.axes.values()))
        with progress("predict", number, "predictions") as advance:
            return _sweep(self.candidates, self.hardware, self.deployment, self.workload, self.axes, advance)


def heading_of(hardware: Hardware, cells: Sequence[SweepCell]) -> str:
    """Head predictions with what they have in common."""
    deployments = [cell.deployment for cell in cells]
    loads = [cell.workload for cell in cells]
    common = deployments[0]
    ranks = {one.ranks for one in deployments}
    most = max(ranks)
    words = [words_of("ranks", most)] if len(ranks) == 1 else []
    if most > 1:
        words.append(common.link or next(iter(hardware.links), "no link"))
    if most > (common.node or hardware.devices) and hardware.networks:
        words.append(common.network or next(iter(hardware.networks)))
    words += [str(common.dtype), *([common.compress] if common.compress else [])]
    for axis in ("prompt", "new"):
        values = {getattr(one, axis) for one in loads}
        words += [words_of(axis, values.pop())] if len(values) == 1 else []
    return f"{cells[0].candidate.model.label} on {hardware.name}: {', '.join(words)}"


def record_of(name: str, hardware: Hardware, cells: Sequence[SweepCell], said: dict[str, Any]) -> dict[str, Any]:
    """Record what is to be known of predictions beside their table."""
    programs = {
        cell.candidate.name: {"program": cell.prediction.plan.program, "model": cell.candidate.model.label}
        for cell in reversed(cells)
        if cell.prediction is not None
    }
    settings = said | {
        "deployment": asdict(cells[0].deployment) | {"connected": True},
        "programs": programs,
        "hardware": hardware.name,
        "hardware_file": write_hardware(hardware),
    }
    return provenance(name, "", **settings)


def predict_drafts(
    model: str | Path | Model | EditedModel,
    hardware: str | Path | Hardware,
    draft: str | Path | Program,
    *,
    acceptance: float | Sequence[float] = 0.8,
    program: Program | str | None = None,
    batch: int | Sequence[int] = 1,
    **asked: Unpack[Asked],
) -> DraftRun:
    """Predict where it pays that an edited program drafts and the model verifies, whose text it stays.

    Args:
        draft: a recipe, a program, or a variant of the model by name.
        acceptance: the chance of a drafted token to be right, given that those before it are; or several.
        model, hardware, program, batch, asked: as `predict` takes them.

    Raises:
        FileNotFoundError: as `predict`.
        ValueError: as `predict`; and if the draft is of another model, an acceptance is no chance, or the draft cannot
            run beside the model; in a sweep the latter is told below the table.
    """
    (first,) = open_candidates(model, program=program)
    drafts = named_draft(str(draft_program(first.model, draft)))
    _, drafting = open_candidates(first.model, [drafts], layers=as_range(asked.get("layers")))
    if (there := on_disk(str(draft))) is not None:
        drafting = replace(drafting, name=there.stem)
    chances = check_chances([acceptance] if isinstance(acceptance, int | float) else acceptance)
    question = PredictionInputs.of([first, drafting], hardware, asked, batch)
    cells = question.cells()
    machine = question.hardware
    folder = question.folder
    rows = list[dict[str, float]]()
    refused = list[str]()
    for plain, alone in zip(cells[::2], cells[1::2], strict=True):
        try:
            rows += draft_cells(plain, alone, machine, chances)
        except ValueError as error:
            if not question.swept:
                raise
            refused.append(f"{words_of('ranks', plain.deployment.ranks)}, batch {plain.workload.batch}: {error}")
    heading = f"{heading_of(machine, cells)}; drafts of {drafting.name}"
    said: dict[str, Any] = {"heading": heading, "refused": list(dict.fromkeys(refused))}
    name = model.name if isinstance(model, Model | EditedModel) else str(model)
    run = DraftRun(pd.DataFrame(rows, columns=list(DRAFT_COLUMNS)), record=said | {"model": name})
    if folder is None:
        return run
    return replace(run, record=record_of(name, machine, cells, said)).save(folder)


def _axes(sweep: str | Sequence[str] | Mapping[str, int | Sequence[int]] | None) -> dict[str, list[int]]:
    if not sweep:
        return {}
    if not isinstance(sweep, Mapping):
        return parse_sweep(",".join(as_list(sweep)))
    axes = {name: [values] if isinstance(values, int) else [*values] for name, values in sweep.items()}
    for name, values in axes.items():
        if name not in AXES:
            raise ValueError(f"there is no {name!r} to sweep; {did_you_mean(name, AXES)}")
        if not values:
            raise ValueError(f"there are no values of {name} to predict for; give at least one")
    return axes
