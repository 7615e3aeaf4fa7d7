"""surgeon.json: what was exported from what, how it was proven, and what every file holds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from surgeon.checkpoint.belongings import REPORT_FILE
from surgeon.checkpoint.inherit import inherit
from surgeon.checkpoint.training import Training, layers_by_recipe, layers_of_the_original
from surgeon.checkpoint.verify import FileRecord
from surgeon.exports.plan import ExportPlan
from surgeon.exports.prove import Proof
from surgeon.opened import Model
from surgeon.processes.files import write_json
from surgeon.provenance import versions
from surgeon.version import __version__


def edit_record(plan: ExportPlan, recipe: str | None, training: Training | None) -> dict[str, Any]:
    """What surgeon.json says of what was done to the model.

    Args:
        training: of a trained model, whose recipe and program, over the layers of the original that it once was, count.

    Raises:
        NotProven: if that model runs another program.
    """
    program = plan.program if training is None else training.recipe_program
    record = {
        "form": plan.layout.form.name,
        "reason": plan.layout.reason,
        "program": str(program),
        "effective_depth": program.effective_depth(plan.original.family.steps_per_layer),
        "sync_points_on_two_ranks": program.sync_points(2),
        "recipe": recipe,
    }
    if training is None:
        return record
    return record | {
        "recipe": training.recipe,
        "source": training.source,
        "trained": training.training,
        "stored_layers": layers_of_the_original(
            (layer.sublayers for layer in plan.layout.layers), layers_by_recipe(program, plan.program)
        ),
    }


def source_record(original: Model, home: Path | None = None) -> dict[str, Any]:
    """What surgeon.json says of the original; its files are read for their hash, once.

    Args:
        home: the folder that has its card, if it is another than that of its weights.
    """
    return {
        "model": original.public_name,
        "num_layers": original.num_layers,
        **({} if original.own is None else {"program": str(original.own)}),
        "parameters": original.parameters,
        "model_hash": original.hash,
        "card": inherit(home or original.folder).to_json(),
    }


def write_report(
    folder: Path, plan: ExportPlan, edits: dict[str, Any], proof: Proof, records: dict[str, FileRecord]
) -> None:
    """Write surgeon.json.

    Args:
        edits: an `edit_record`.
        records: of files that need not be read again.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: records[name] if name in records else FileRecord.of(folder / name) for name in names}
    report = {"surgeon": __version__, "source": source_record(plan.original, plan.companions.folder)} | edits
    companions = {"carried": sorted(plan.companions.files), "left_behind": plan.companions.left}
    report |= {"companions": companions, "proof": asdict(proof)}
    report |= {"files": {name: asdict(record) for name, record in files.items()}, "versions": versions()}
    write_json(folder / REPORT_FILE, report)
