"""Predictions of several programs, on several numbers of ranks, for several loads."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import pandas as pd

from surgeon.cost.candidates import Candidate
from surgeon.cost.deployment import Deployment, Workload
from surgeon.cost.hardware import Hardware
from surgeon.cost.plans import most_texts, plan_on_paper, room
from surgeon.cost.predict import Prediction, predict
from surgeon.errors import did_you_mean
from surgeon.findings.speeds import AXES, PARTS, RATIOS, TOO_LARGE
from surgeon.machine import show_size
from surgeon.runtime.plan.memory import imbalance
from surgeon.words import plural

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
