"""The plan of a model that drafts tokens with the coda of its first rack."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from surgeon.checkpoint.belongings import CODAS
from surgeon.checkpoint.codas import INDEX, read_codas
from surgeon.checkpoint.tensor_file import TensorFile
from surgeon.language.program import Program, Step
from surgeon.models.edit import check_layers
from surgeon.models.families import FAMILIES, family_of
from surgeon.models.families.positions import attention_windows
from surgeon.models.weights import ModelWeights
from surgeon.runtime.plan.checks import mixture_size, places_among, rotaries_by_layer
from surgeon.runtime.plan.division import check_division
from surgeon.runtime.plan.mixtures import Mixtures
from surgeon.runtime.plan.specification import CodaPlan, Plan


def with_coda(plan: Plan) -> Plan:
    """A checkpoint's plan, with the coda of its first rack.

    Raises:
        FileNotFoundError: if a file of the codas is missing.
        ValueError: if there are no codas, they are not of these weights or damaged, the program cannot be cut behind
            the first rack, the coda's heads or neurons do not divide among the ranks, or decoding is asked for in
            fixed shapes, or in halves.
    """
    if plan.halves == "on":
        raise ValueError("what a coda drafts is verified in one piece; use halves off with a coda")
    if plan.decoding in ("static", "captured"):
        raise ValueError(
            f"drafts are verified in passes of changing shapes, which decoding {plan.decoding} cannot compute; use "
            "decoding auto or dynamic"
        )
    stored = read_codas(plan.folder)
    if stored is None:
        raise ValueError(
            f"{plan.folder} has no codas ({CODAS}/{INDEX}), which would draft; surgeon heal --racks trains some; "
            "or leave the drafts out"
        )
    folder, nodes, program = plan.folder / CODAS, stored.nodes[0], stored.program
    _check_cut(Program.parse(plan.program), nodes, folder / INDEX)
    family, file = family_of(stored.config), folder / "rack-0.safetensors"
    source = ModelWeights(TensorFile(file), family, plan.head_dim)
    layers = source.count_layers() if len(program) else 0  # it may be a norm and a head only
    mixtures = Mixtures.of(partial(mixture_size, source), layers, plan.mixtures.mode)
    if layers:
        check_layers(program, layers)
        check_division(program, source.units, plan.ranks, mixtures)
    by_layer = rotaries_by_layer(stored.config, family, layers, plan.max_tokens) if layers else []
    # The coda's passes have the angles of the model's; a kind that is the coda's alone comes behind those.
    rotaries = tuple(dict.fromkeys([*plan.rotaries, *(one for one in by_layer if one is not None)]))
    own = replace(
        plan,
        model_type=family.model_type,
        described=None if family == FAMILIES.get(family.model_type) else family,
        mixtures=mixtures,
        program=str(program),
        layers=layers,
        windows=attention_windows(family, stored.config, layers) if layers else (),
        rotaries=rotaries,
        rotary_layers=places_among(rotaries, by_layer),
    )
    return replace(plan, rotaries=rotaries, coda=CodaPlan(nodes, file, own))


def _check_cut(program: Program, nodes: int, file: Path) -> None:
    behind = program.nodes[nodes : nodes + 1]
    if nodes < 1 or not behind:
        raise ValueError(f"{file}: the first rack must have some of the program's {len(program)} nodes, not {nodes}")
    if isinstance(behind[0], Step) and behind[0].late:
        raise ValueError(
            f"{file}: the program cannot be cut before {behind[0]}, which reads the stream as it was within the first "
            "rack; train codas with other racks"
        )
