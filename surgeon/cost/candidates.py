"""Candidates: models, recipes, programs, or variants by name, and predictions of several on many ranks and loads."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import pandas as pd

from surgeon.checkpoint.config import DEMO
from surgeon.cost.deployment import Deployment, Workload, most_texts, plan_on_paper, room
from surgeon.cost.hardware import Hardware
from surgeon.cost.predict import Prediction, predict, predict_drafting
from surgeon.findings.speeds import AXES, DRAFT_COLUMNS, PARTS, RATIOS, TOO_LARGE
from surgeon.language.operations.variants import (
    HALVES,
    RUN_OTHERWISE,
    UPPER_BOUND,
    is_variant,
    variant_names,
    variant_of,
)
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe, read_recipe
from surgeon.machine import show_size
from surgeon.named import is_program, is_recipe, on_disk
from surgeon.opened import EditedModel, Model, open_model
from surgeon.runtime.plan.memory import imbalance
from surgeon.runtime.plan.specification import HalvesMode
from surgeon.words import did_you_mean, plural

_LONGEST_NAME = 18  # so that tables fit a terminal


@dataclass(frozen=True)
class Candidate:
    """A program of a model.

    Attributes:
        name: for tables.
        program: for so many ranks: tracks have a slice for each.
        connected: whether ranks wait for each other; without, results are wrong and nothing can be faster.
        recipe: that made it, if one did.
        halves: which of its passes are computed in two halves.
    """

    name: str
    model: Model
    program: Callable[[int], Program]
    connected: bool = True
    recipe: Recipe | None = None
    halves: HalvesMode = "off"


def open_candidates(
    model: str | Path | Model | EditedModel,
    compared: Sequence[str] = (),
    program: Program | str | None = None,
    layers: range | None = None,
    weights: bool = False,
) -> list[Candidate]:
    """Open the model first, then what is compared with it, all under different names.

    Args:
        model: as `open_model` takes it, a recipe, or a model that is open, edited or not.
        compared: any of these, programs, or names of variants of the model's unedited program.
        layers: that variants change; all but the first and last two by default.
        weights: whether they have to be there.

    Raises:
        FileNotFoundError, ValueError: if there is no such model or recipe, one cannot be read, they do not fit, or
            there are layers and no variant.
    """
    if layers is not None and not any(
        is_variant(text) and text not in RUN_OTHERWISE for text in compared
    ):
        raise ValueError(
            "layers are those that variants change, and none is compared; compare one, such as lp, or leave layers out"
        )
    first = _open(model, weights, program)
    found = [first]
    for text in compared:
        if text == UPPER_BOUND:
            found.append(replace(first, name=text, connected=False))
        elif text == HALVES:
            found.append(replace(first, name=text, halves="on"))
        elif is_variant(text):
            own = first.model
            varied = variant_of(text, own.num_layers, own.family.steps_per_layer, layers)
            found.append(Candidate(text, own, varied))
        elif is_program(text):
            found.append(_fixed_candidate(text, first.model, Program.parse(text)))
        elif not (is_recipe(text) or "/" in text or text == DEMO or on_disk(text)):
            missing = f"there is no model folder {text}, nor a variant of a model;"
            raise FileNotFoundError(f"{missing} {did_you_mean(text, variant_names())}")
        else:
            found.append(_open(text, weights))
    names = apart([one.name for one in found])
    return [replace(one, name=name) for one, name in zip(found, names, strict=True)]


def _open(
    what: str | Path | Model | EditedModel, weights: bool, program: Program | str | None = None
) -> Candidate:
    path = Path(what) if isinstance(what, str | Path) and is_recipe(what) else None
    if program is not None and (path is not None or isinstance(what, EditedModel)):
        given = f"{path} is a recipe and" if path is not None else f"{what!r}"
        raise ValueError(f"{given} has a program of its own; give a program with a model")
    if isinstance(what, EditedModel):
        return replace(_fixed_candidate(what.model.label, what.model, what.program), recipe=what.recipe)
    if path is not None:
        recipe = read_recipe(path)
        model = open_model(recipe.model, weights)
        return replace(_fixed_candidate(path.stem, model, model.program_of(recipe)), recipe=recipe)
    model = what if isinstance(what, Model) else open_model(what, weights)
    parsed = Program.parse(program) if isinstance(program, str) else program
    return _fixed_candidate(model.label, model, model.program if parsed is None else parsed)


def _fixed_candidate(name: str, model: Model, program: Program) -> Candidate:
    if model.files is None:
        _ = model.shapes  # a configuration of impossible sizes is refused now
    return Candidate(name, model, lambda _: program)


def apart(names: Sequence[str]) -> list[str]:
    """Shorten names, with a number behind those that occur again."""
    seen: dict[str, int] = {}
    found = []
    for name in (
        name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..." for name in names
    ):
        number = seen[name] = seen.get(name, 0) + 1
        suffix = f" ({number})" if number > 1 else ""
        found.append(name[: _LONGEST_NAME - len(suffix)] + suffix)
    return found


MOST_RANKS = 64  # that are looked at for those that have room
MOST_TEXTS = 1 << 16  # likewise
MS = 1e3
SIZES = ("weights", "cache", "activations", "needed", "there")  # of a rank's memory
NUMBERS = (
    *("first_token_ms", "per_token_ms", "tokens_per_second", "communication_share"),
    *(
        f"{phase}_{name}"
        for phase in ("prefill", "decode")
        for name in (
            *(f"{part}_ms" for part in (*PARTS, "communication")),
            *("all_reduces", "all_gathers", "bytes", "vocabulary_collectives"),
        )
    ),
    *(f"{name}_bytes" for name in SIZES),
)  # columns of a prediction
_RANGE = re.compile(r"(\d{1,7})(?:\.\.(\d{1,7}))?")


@dataclass(frozen=True)
class SweepCell:
    """One prediction, or the reason why there is none.

    Attributes:
        prediction: None if these ranks cannot share the program.
        refused: the reason, or that it does not fit into memory; empty where all is well.
    """

    candidate: Candidate
    deployment: Deployment
    workload: Workload
    prediction: Prediction | None
    refused: str = ""


def parse_sweep(text: str) -> dict[str, list[int]]:
    """Read axes such as "ranks=1..64,batch=1..256": the first value, twice as many, ..., the last.

    Raises:
        ValueError: if it cannot be read.
    """
    axes: dict[str, list[int]] = {}
    for part in text.split(","):
        name, equals, values = (piece.strip() for piece in part.partition("="))
        if name not in AXES:
            raise ValueError(f"there is no {name!r} to sweep; {did_you_mean(name, AXES)}")
        match = _RANGE.fullmatch(values)
        if not equals or match is None:
            raise ValueError(
                f"{part.strip()!r} is no range; write e.g. {name}=1..64 (doubling) or {name}=8"
            )
        if name in axes:
            raise ValueError(f"{name} is there twice; keep one of them")
        first = int(match[1])
        last = int(match[2] or match[1])
        if not 1 <= first <= last:
            raise ValueError(f"{name}={values}: a range goes from at least 1 upwards")
        axes[name] = [
            *(first << doubling for doubling in range(((last - 1) // first).bit_length())),
            last,
        ]
    return axes


def sweep(
    candidates: Sequence[Candidate],
    hardware: Hardware,
    deployment: Deployment,
    workload: Workload,
    axes: Mapping[str, Sequence[int]],
    advance: Callable[[float], None] = lambda _: None,
) -> list[SweepCell]:
    """Predict every program for all combinations of the axes' values, in their order.

    Raises:
        ValueError: if the hardware has no such link or network, also where there are too few ranks for one.
    """
    for name, between_nodes in ((deployment.link, False), (deployment.network, True)):
        if name is not None:
            hardware.link(name, between_nodes)
    cells = []
    for values in product(*(axes.get(name, (None,)) for name in AXES)):
        chosen = {name: value for name, value in zip(AXES, values, strict=True) if value is not None}
        ranks = chosen.pop("ranks", deployment.ranks)
        for one in candidates:
            cells.append(
                cell(one, hardware, replace(deployment, ranks=ranks), replace(workload, **chosen))
            )
            advance(1)
    return cells


def cell(
    candidate: Candidate, hardware: Hardware, deployment: Deployment, workload: Workload
) -> SweepCell:
    """Predict one cell; refusals of ranks or memory are noted in it."""
    halves = deployment.halves if candidate.halves == "off" else candidate.halves
    deployment = replace(
        deployment, connected=deployment.connected and candidate.connected, halves=halves
    )
    try:
        program = candidate.program(deployment.ranks)
        prediction = predict(candidate.model.shapes, program, hardware, workload, deployment)
    except ValueError as error:
        return SweepCell(candidate, deployment, workload, None, str(error))
    refused = "" if prediction.memory.fits else TOO_LARGE
    return SweepCell(candidate, deployment, workload, prediction, refused)


def explain_memory(cell: SweepCell, hardware: Hardware) -> str:
    """Explain a prediction that does not fit: its needs, and how many texts or ranks would do."""
    prediction = cell.prediction
    workload = cell.workload
    assert prediction is not None
    needed = prediction.memory
    plan = prediction.plan
    ranks = plural(plan.ranks, "rank")
    amounts = (
        f"{show_size(needed.needed)} (weights {show_size(needed.weights)}, cache {show_size(needed.cache)}, "
        f"activations {show_size(needed.activations)})"
    )
    ways = []
    fewer = most_texts(cell.candidate.model.shapes, plan, hardware, workload.prompt, MOST_TEXTS)
    if fewer:
        ways.append(f"at most {fewer} {'text fits' if fewer == 1 else 'texts fit'} on {ranks}")
    enough = next(ranks_with_room(cell, hardware), None)
    if enough:
        ways.append(f"{plural(enough, 'rank')} would do for batch {workload.batch}")
    return (
        f"{cell.candidate.name} in {plan.dtype} on {ranks} with batch {workload.batch} and texts of "
        f"{plan.max_tokens} tokens needs {amounts} on each, and {hardware.name} has {show_size(needed.there)} for it; "
        f"{'; '.join(ways) or f'no number of ranks up to {MOST_RANKS} would do'}"
    )


def ranks_with_room(cell: SweepCell, hardware: Hardware) -> Iterator[int]:
    """Yield more ranks than the cell's that can share the program and have room for it."""
    assert cell.prediction is not None
    for ranks in range(cell.deployment.ranks + 1, MOST_RANKS + 1):
        if ranks > hardware.devices and not hardware.networks:
            return
        try:
            shapes = cell.candidate.model.shapes
            program = cell.candidate.program(ranks)
            length = cell.workload.length
            dtype = cell.prediction.plan.dtype
            plan = plan_on_paper(shapes, program, ranks, length, dtype, "auto", cell.deployment.kv)
        except ValueError:
            continue
        if room(shapes, plan, hardware, cell.workload.batch, cell.workload.prompt).fits:
            yield ranks


def prediction_table(cells: Sequence[SweepCell]) -> pd.DataFrame:
    """One row per program, ranks and load; speedups are over the first program at the same ranks and load."""
    rows = list[dict[str, object]]()
    for cell in cells:
        load = cell.workload
        found = cell.prediction
        row: dict[str, object] = {
            "program": cell.candidate.name,
            "ranks": cell.deployment.ranks,
            "batch": load.batch,
            "prompt": load.prompt,
            "new": load.new,
            **dict.fromkeys(NUMBERS, math.nan),
            "fits": int(found is not None and found.memory.fits),
            "refused": cell.refused,
        }
        rows.append(row)
        if found is None:
            continue
        times = found.first_token * MS, found.per_token * MS, found.rate, found.share
        row |= zip(NUMBERS, times, strict=False)
        for phase, cost in (("prefill", found.prefill), ("decode", found.decode)):
            if cost is not None:
                values = {f"{part}_ms": getattr(cost, part) * MS for part in (*PARTS, "communication")}
                values |= asdict(cost.layers)
                sums = cost.vocabulary.all_reduces + cost.vocabulary.all_gathers
                values["vocabulary_collectives"] = sums
                row |= {f"{phase}_{name}": value for name, value in values.items()}
        row["imbalance"] = imbalance(found.plan, cell.candidate.model.shapes)
        row |= {f"{name}_bytes": getattr(found.memory, name) for name in SIZES}
    table = pd.DataFrame(rows)
    where = list(AXES)
    first = table[table["program"] == table["program"].iloc[0]].set_index(where)
    own = first.reindex(pd.MultiIndex.from_frame(table[where]))
    for name, column in zip(RATIOS, ("first_token_ms", "per_token_ms"), strict=False):
        table[name] = own[column].to_numpy() / table[column].to_numpy()
    table[RATIOS[-1]] = table["tokens_per_second"].to_numpy() / own["tokens_per_second"].to_numpy()
    return table


def draft_cells(
    plain: SweepCell, alone: SweepCell, hardware: Hardware, acceptances: Sequence[float]
) -> list[dict[str, float]]:
    """Make a row of `DRAFT_COLUMNS` for each acceptance: drafting beside the model without drafts and the draft alone.

    Args:
        plain, alone: the model's cell and the draft's, of the same ranks and load.
    """
    for one in (plain, alone):
        if one.refused:
            raise ValueError(one.refused if one.prediction is None else explain_memory(one, hardware))
    assert plain.prediction is not None
    assert alone.prediction is not None
    load = plain.workload
    ranks = plain.deployment.ranks
    draft = alone.candidate.program(ranks)
    sizes = ranks, load.batch, load.prompt, load.new
    dense = plain.prediction.rate
    lossy = alone.prediction.rate
    rows = []
    for found in predict_drafting(plain.prediction, draft, acceptances):
        times = found.draft * MS, found.verify * MS, found.per_token * MS
        values = (
            *sizes,
            found.acceptance,
            found.ahead,
            *times,
            dense,
            found.rate,
            lossy,
            found.rate / dense,
            lossy / dense,
        )
        rows.append(dict(zip(DRAFT_COLUMNS, values, strict=True)))
    return rows
