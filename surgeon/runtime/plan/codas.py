"""The plan of a model that drafts tokens with the coda of its first rack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from surgeon.checkpoint.read import Checkpoint, read_json
from surgeon.checkpoint.tensor_file import TensorFile
from surgeon.families import family_of
from surgeon.model import check_layers
from surgeon.program import Program, Step
from surgeon.runtime.plan.checks import rotary_layers_of, windows_of
from surgeon.runtime.plan.division import check_division
from surgeon.runtime.plan.specification import CodaPlan, Plan
from surgeon.weights import ModelWeights

FOLDER, FORMAT = "codas", 1


def with_coda(plan: Plan) -> Plan:
    """A checkpoint's plan, with the coda of its first rack.

    Raises:
        FileNotFoundError: if a file of the codas is missing.
        ValueError: if there are no codas, they are not of these weights or damaged, the program cannot be cut behind
            the first rack, the coda's heads or neurons do not divide among the ranks, or decoding is asked for in
            fixed shapes.
    """
    if plan.decoding in ("static", "captured"):
        raise ValueError(
            f"drafts are verified in passes of changing shapes, which decoding {plan.decoding} cannot compute; use "
            "decoding auto or dynamic"
        )
    file = plan.folder / FOLDER / "codas.json"
    stored = _read(plan.folder, file)
    nodes, program = int(stored["nodes"][0]), Program.parse(str(stored["program"]))
    _check_cut(Program.parse(plan.program), nodes, file)
    config = AutoConfig.for_model(**stored["config"])
    family, tensors = family_of(config), file.parent / "rack-0.safetensors"
    source = ModelWeights(TensorFile(tensors), family, plan.head_dim)
    layers = source.count_layers()
    check_layers(program, layers)
    check_division(program, source.units, plan.ranks)
    own = replace(
        plan,
        model_type=family.model_type,
        described=None,
        program=str(program),
        layers=layers,
        windows=windows_of(config, family, layers),
        rotary_layers=rotary_layers_of(config, family, layers),
    )
    return replace(plan, coda=CodaPlan(nodes, tensors, own))


def _read(folder: Path, file: Path) -> dict[str, Any]:
    """What is said of the codas beside a checkpoint's weights."""
    if not file.exists():
        raise ValueError(
            f"{folder} has no codas ({FOLDER}/{file.name}), which would draft; surgeon heal --racks trains some; "
            "or leave the drafts out"
        )
    found = read_json(file)
    missing = [name for name in ("nodes", "program", "config", "weights") if not found.get(name)]
    if found.get("format") != FORMAT or missing:
        raise ValueError(
            f"{file} is not of format {FORMAT}, or lacks {', '.join(missing) or 'nothing'}; write codas again"
        )
    if found["weights"] != Checkpoint(folder).model_hash():
        raise ValueError(f"{file} is of other weights than {folder} holds; train codas for these")
    return found


def _check_cut(program: Program, nodes: int, file: Path) -> None:
    behind = program.nodes[nodes : nodes + 1]
    if nodes < 1 or not behind:
        raise ValueError(f"{file}: the first rack must have some of the program's {len(program)} nodes, not {nodes}")
    if isinstance(behind[0], Step) and behind[0].late:
        raise ValueError(
            f"{file}: the program cannot be cut before {behind[0]}, which reads the stream as it was within the first "
            "rack; train codas with other racks"
        )
