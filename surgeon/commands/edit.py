"""`surgeon.edit`: what a model is to run, by a program, a recipe, or operations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from surgeon.analysis.factors.factor_plan import plan_factors, with_units
from surgeon.commands.command import as_range
from surgeon.exports import in_memory  # noqa: F401 - how edited models are saved
from surgeon.language.operations.base import show_range
from surgeon.language.program import Program
from surgeon.language.recipe import DocumentReader, Recipe, read_recipe
from surgeon.models.edit import edit as run_program
from surgeon.models.edit import restore
from surgeon.models.weights import FactorSource
from surgeon.named import is_recipe
from surgeon.opened import EditedModel, Model
from surgeon.words import show_value

if TYPE_CHECKING:  # takes seconds, and who has no model yet does without
    from transformers import PreTrainedModel

# Layers as a recipe has them, "1:7" or several such texts, or with parameters: {"layers": "0:32", "keep": 0.6}.
Applied = str | range | Sequence[str | range] | Mapping[str, Any]


@overload
def edit(
    model: PreTrainedModel,
    program: Program | Recipe | str | Path | None = None,
    *,
    factors: FactorSource | None = None,
    **operations: Applied,
) -> PreTrainedModel: ...


@overload
def edit(
    model: Model | EditedModel,
    program: Program | Recipe | str | Path | None = None,
    *,
    factors: FactorSource | None = None,
    **operations: Applied,
) -> EditedModel: ...


def edit(
    model: PreTrainedModel | Model | EditedModel,
    program: Program | Recipe | str | Path | None = None,
    *,
    factors: FactorSource | None = None,
    **operations: Applied,
) -> PreTrainedModel | EditedModel:
    """Make a model run another program; editing an edited model starts from the original again.

        surgeon.edit(model, "A0 F0 [A1 A2] [F1 F2] A3 F3")
        surgeon.edit(model, "recipe.yaml")
        surgeon.edit(model, pair="1:7", prune="9:10")

    Args:
        model: that is loaded (`surgeon.load`), which is changed in place; or that is open (`surgeon.open`), edited
            before or not.
        program: a program, its text, a recipe, or the path of one (.yaml). Which model a recipe names does not count.
        factors: of matrices that the program has a rank for; by default their truncated singular values. It says which
            heads and neurons are kept, too, if it has an `order` of them; by default KV groups of the largest weights,
            and any neurons.
        operations: in place of a program, in this order, each with its layers or with all that a recipe says of it:
            `lowrank={"layers": "0:8", "keep": 0.6}`.

    Returns:
        The same model, if it is loaded; else the open model with what it is to run, as `surgeon.export` and others
        take it.

    Raises:
        FileNotFoundError: if there is no such recipe.
        ValueError: if there is no such operation, or what is to be run does not fit the model.
    """
    model = model.model if isinstance(model, EditedModel) else model
    if not hasattr(model, "modules") and not isinstance(model, Model):
        raise ValueError(
            f"{show_value(model)} is no model that is loaded or open; give what surgeon.open or load returns"
        )
    program = _to_run(program, operations)
    if isinstance(model, Model):
        if isinstance(program, Recipe):
            edited = EditedModel(model.name, model, model.program_of(program), program, factors)
            plan = plan_factors(program, model)
            if factors is not None or plan.is_calibrated:
                return edited
            return with_units(edited, plan)
        model.check(program)
        return EditedModel(model.name, model, program, factors=factors)
    if isinstance(program, Recipe):
        original = Model.of_config(
            restore(model).config, "a loaded model", vars(model).get("own_program")
        )
        if factors is None:
            plan = plan_factors(program, original)
            if plan.is_calibrated:
                raise ValueError(
                    f"{program.source}: its factors or units go by a text, and a loaded model gets those of weights; "
                    "edit a model that is open, and evaluate or export that, or give factors"
                )
            factors = plan.source
        program = original.program_of(program)
    return run_program(model, program, factors=factors)


def _to_run(
    program: Program | Recipe | str | Path | None, operations: Mapping[str, Applied]
) -> Program | Recipe:
    if (program is None) == (not operations):
        raise ValueError(
            'say what is to be run, either by a program or a recipe or by operations, as in pair="1:7"'
        )
    if operations:
        return Recipe("", _apply(operations), source="edit")
    if isinstance(program, str | Path):
        if is_recipe(program):
            return read_recipe(Path(program))
        return Program.parse(str(program))
    if not isinstance(program, Recipe | Program):
        raise ValueError(
            f"what is to be run is a program, its text, a recipe or its path, not {show_value(program)}"
        )
    return program


def _apply(operations: Mapping[str, Applied]) -> Any:
    entries = []
    for name, given in operations.items():
        entry = dict(given) if isinstance(given, Mapping) else {"layers": given}
        if (layers := entry.get("layers")) is not None:
            several = isinstance(layers, list | tuple)
            ranges = []
            for one in layers if several else [layers]:
                if isinstance(one, str):
                    ranges.append(one)
                    continue
                if not isinstance(one, range):
                    raise ValueError(
                        f'{name}: layers are a range, as in {name}="4:30" or range(4, 30) for layers 4 to 29, or '
                        f"several of them, not {show_value(one)}"
                    )
                as_range(one)
                ranges.append(show_range(one))
            entry["layers"] = ranges if several else ranges[0]
        entries.append({name: entry})
    reader = DocumentReader(json.dumps({"operations": entries}), "edit")
    return reader.operations(reader.document["operations"])
