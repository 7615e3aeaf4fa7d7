"""The plan of a model that drafts tokens with the coda of its first rack: a few layers, a norm and a head behind it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from surgeon.checkpoint.belongings import CODAS
from surgeon.checkpoint.codas import INDEX, read_codas
from surgeon.checkpoint.tensor_file import TensorFiles
from surgeon.language.program import Program, Step
from surgeon.models.edit import check_layers
from surgeon.models.families import family_of
from surgeon.models.families.positions import attention_windows
from surgeon.models.weights import ModelWeights
from surgeon.runtime.plan.checks import mixture_size, places_among, rotaries_by_layer
from surgeon.runtime.plan.division import check_division
from surgeon.runtime.plan.mixtures import Mixtures
from surgeon.runtime.plan.placement import work_of
from surgeon.runtime.plan.specification import CodaPlan, DraftPlan, Plan


def with_coda(plan: Plan) -> Plan:
    """A checkpoint's plan, with its first rack and the rack's coda as the draft.

    What the rack's attentions cache of a token is what the whole program caches; the coda's have slots of their own
    behind those of the program.
    """
    plan = replace(plan, kv="lowrank" if plan.kv == "lowrank" else "full")
    nodes, coda = first_rack(plan)
    rack = replace(
        plan,
        program=str(Program(Program.parse(plan.program).nodes[:nodes])),
        arithmetic=replace(plan.arithmetic, rotaries=coda.plan.arithmetic.rotaries),
        decoding="auto" if plan.decoding == "auto" else "dynamic",
        halves="off",
        coda=coda,
    )
    slots = list[tuple[int, ...]]()
    own = list[tuple[int, ...]]()
    for rank in range(plan.ranks):
        shared, more, end = (
            sum(part.slot is not None for work in work_of(one, rank) for part in work.parts)
            for one in (rack, coda.plan, plan)
        )
        slots.append((*range(shared), *range(end, end + more)))
        own.append(tuple(range(shared, shared + more)))
    return replace(plan, draft=DraftPlan(rack, tuple(slots), tuple(own)))


def first_rack(plan: Plan) -> tuple[int, CodaPlan]:
    """How many nodes of a checkpoint's program its first rack has, and the rack's coda."""
    stored = read_codas(plan.folder)
    if stored is None:
        raise ValueError(
            f"{plan.folder} has no codas ({CODAS}/{INDEX}), which would draft; surgeon heal --racks trains some; "
            "or leave the drafts out"
        )
    nodes = stored.nodes[0]
    program = stored.program
    whole = Program.parse(plan.program)
    index = plan.folder / CODAS / INDEX
    if not 1 <= nodes < len(whole):
        raise ValueError(f"{index}: the first rack must have some of the program's {len(whole)} nodes, not {nodes}")
    behind = whole.nodes[nodes]
    if isinstance(behind, Step) and behind.late:
        raise ValueError(
            f"{index}: the program cannot be cut before {behind}, which reads the stream as it was within the first "
            "rack; train codas with other racks"
        )
    family = family_of(stored.config)
    file = plan.folder / CODAS / "rack-0.safetensors"
    source = ModelWeights(TensorFiles(file), family, plan.head_dim)
    layers = 0  # it may be a norm and a head only
    if len(program):
        layers = source.count_layers()
    mixtures = Mixtures.of(partial(mixture_size, source), layers)
    by_layer = []
    if layers:
        check_layers(program, layers)
        check_division(program, source.units, plan.ranks, mixtures)
        by_layer = rotaries_by_layer(stored.config, family, layers, plan.max_tokens)
    # Passes have one set of angles for rack and coda; a kind that is the coda's alone comes behind the model's.
    rotaries = tuple(dict.fromkeys([*plan.arithmetic.rotaries, *(one for one in by_layer if one is not None)]))
    own = replace(
        plan,
        family=family,
        mixtures=mixtures,
        program=str(program),
        layers=layers,
        windows=attention_windows(family, stored.config, layers) if layers else (),
        arithmetic=replace(plan.arithmetic, rotaries=rotaries, rotary_layers=places_among(rotaries, by_layer)),
    )
    return nodes, CodaPlan(file, own)
