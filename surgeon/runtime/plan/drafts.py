"""Plans of more than one program: of a model with a draft, of its first rack with a coda, of a pipeline.

A draft's attention reads the keys and values that the model's program has cached, where that caches on the same rank,
of the same layer, the same KV heads in the same way; the draft's own tokens there are overwritten when these are
verified. An attention without such a counterpart (averages of layers, a layer's second time, whole layers or tracks on
a rank that has slices of the model's) has a slot of its own behind the model's.

In a pipeline each rank has a stretch of the program's nodes, as even as they can be by the numbers of its weights, the
head and the coda of the first one among them. A program can be cut before any node but a late step. Where codas draft,
the first stretch is the checkpoint's first rack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from surgeon.checkpoint.belongings import CODAS
from surgeon.checkpoint.codas import INDEX, read_codas
from surgeon.checkpoint.config import open_stored
from surgeon.checkpoint.random_weights import open_weights
from surgeon.checkpoint.stored import StoredModel
from surgeon.checkpoint.tensor_file import TensorFiles
from surgeon.language.operations.base import VARIANTS
from surgeon.language.operations.variants import RUN_OTHERWISE, is_variant, variant_of
from surgeon.language.program import Program, Step
from surgeon.models.families import family_of
from surgeon.models.families.base import attention_windows
from surgeon.models.shapes import check_layers
from surgeon.models.weights import ModelWeights
from surgeon.named import is_program
from surgeon.runtime.plan.checks import make_plan, mixture_size, places_among, rotaries_by_layer
from surgeon.runtime.plan.memory import Sizes, kv_heads, numbers_of
from surgeon.runtime.plan.placement import check_division, computed_of, work_of
from surgeon.runtime.plan.specification import CodaPlan, DraftPlan, KvMode, Mixtures, Plan, Ways
from surgeon.words import plural, show_value

# Layers, width, and which of the attentions of these in the program.
Place = tuple[tuple[int, ...], int | None, int]
# The KV heads, and numbers in rank space in their place.
Kept = tuple[tuple[int, int], tuple[int, int] | None]


def with_draft(plan: Plan, model: str | Path | StoredModel, draft: Program | str) -> Plan:
    """Add a program over the same weights that drafts tokens to a model's plan.

    Its steps lie on ranks as the model's own do, where that leaves it fewer keys of its own: in slices where it can,
    also of sublayers that share an input and that ranks would have whole.
    """
    stored = open_stored(model)
    if isinstance(draft, str) and is_variant(named_draft(draft)):
        draft = variant_of(draft, plan.layers, plan.family.steps_per_layer)(plan.ranks)
    ways: Ways = {"dtype": plan.dtype, "decoding": plan.decoding, "low_rank": plan.low_rank}
    kv: KvMode = "lowrank" if plan.kv == "lowrank" else "full"

    def make(sliced: bool) -> Plan:
        made = make_plan(stored, plan.ranks, plan.max_tokens, draft, sliced=sliced, **ways)
        return replace(made, kv=kv, balance=None)

    # Both programs read the same slices, which are in memory once.
    plan = replace(plan, kv=kv, balance=None)
    return replace(plan, draft=draft_beside(plan, stored.weights, make))


def require_shared(draft: DraftPlan, why: str) -> Plan:
    """Give the plan of a draft, refused where an attention has keys and values of its own, and why."""
    for rank, own in enumerate(draft.own):
        for work in work_of(draft.plan, rank):
            for part in (part for part in work.parts if part.slot in own):
                raise ValueError(
                    f"{work.step.sublayers[part.index]} of the draft has no keys and values of the model's to read "
                    f"(rank {rank} of {draft.plan.ranks}), and keeps its own: {why}; draft with attentions of the "
                    "model, each once"
                )
    return draft.plan


def named_draft(text: str) -> str:
    """Check the name of a draft: a program over the model's weights, or a variant of the model."""
    if is_program(text) or (is_variant(text) and text not in RUN_OTHERWISE):
        return text
    raise ValueError(
        f"there are no drafts {show_value(text)}; give a program over the model's weights, as in "
        f'"A0 F0 [A1 A2] [F1 F2]", or a variant of the model ({", ".join(VARIANTS)}); where it runs, lookup and coda '
        "draft, too"
    )


def draft_beside(plan: Plan, source: Sizes, make: Callable[[bool], Plan]) -> DraftPlan:
    """A draft whose steps lie on ranks as those of the model's plan do; `make` plans it, given whether it is sliced."""
    found = list[DraftPlan]()
    reasons = list[ValueError]()
    for sliced in (True, False):
        try:
            own = make(sliced)
        except ValueError as error:
            reasons.append(error)
            continue
        slots = [list[int]() for _ in range(plan.ranks)]
        more = [list[int]() for _ in range(plan.ranks)]  # the attentions with slots of their own
        for rank in range(plan.ranks):
            there = {
                place: (slot, kept) for slot, (place, kept) in enumerate(_attentions(plan, source, rank))
            }
            for number, (place, kept) in enumerate(_attentions(own, source, rank)):
                slot, cached = there.get(place, (None, None))
                if slot is None or cached != kept:
                    slot = len(there) + len(more[rank])
                    more[rank].append(number)
                slots[rank].append(slot)
        found.append(DraftPlan(own, tuple(map(tuple, slots)), tuple(map(tuple, more))))
        if not found[-1].keeps_own:
            break
    if not found:
        raise ValueError(f"the draft cannot run beside its model: {reasons[0]}")
    return min(found, key=lambda one: sum(map(len, one.own)))


def _attentions(plan: Plan, source: Sizes, rank: int) -> Iterator[tuple[Place, Kept]]:
    """A rank's attentions by slot: their place in the program, and their numbers in the cache."""
    seen: Counter[tuple[tuple[int, ...], int | None]] = Counter()
    for work in work_of(plan, rank):
        for part in work.parts:
            if part.slot is not None:
                own = computed_of(plan, work, part)
                of = (own.layers, own.width)
                (first, end) = kv_heads(plan, source, own)
                yield (*of, seen[of]), ((first, end), plan.kept_factors(own, end - first))
                seen[of] += 1


def with_coda(plan: Plan) -> Plan:
    """Add a checkpoint's first rack and the rack's coda as the draft to its plan.

    The rack's attentions cache for the whole program; the coda's have slots of their own behind those of the program.
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
    """Count the nodes of a checkpoint's first rack, and plan the rack's coda."""
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
        raise ValueError(
            f"{index}: the first rack must have some of the program's {len(whole)} nodes, not {nodes}"
        )
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
    rotaries = tuple(
        dict.fromkeys([*plan.arithmetic.rotaries, *(one for one in by_layer if one is not None)])
    )
    own = replace(
        plan,
        family=family,
        mixtures=mixtures,
        program=str(program),
        layers=layers,
        balance=None,  # its layers may be of other sizes
        windows=attention_windows(family, stored.config, layers) if layers else (),
        arithmetic=replace(
            plan.arithmetic, rotaries=rotaries, rotary_layers=places_among(rotaries, by_layer)
        ),
    )
    return nodes, CodaPlan(file, own)


def with_stretches(plan: Plan, ranks: int, drafts: bool) -> Plan:
    """Divide a plan of one rank into stretches for so many; the coda of the first rack may draft, if it has one."""
    if ranks == 1:
        return plan
    if plan.decoding == "static":
        raise ValueError(
            "ranks with stretches of the program compute passes as they come, which decoding static cannot; use "
            "decoding auto or dynamic"
        )
    if ranks > plan.layers:
        raise ValueError(
            f"{ranks} ranks would have a stretch of layers each, and the model has {plan.layers}; use at most as many "
            "ranks as layers"
        )
    program = Program.parse(plan.program)
    weights = open_weights(plan.folder, plan.family, plan.head_dim)
    head = plan.vocabulary * plan.hidden
    first = 0
    if drafts and read_codas(plan.folder, check_weights=False) is not None:
        first, coda = first_rack(plan)
        arithmetic = replace(plan.arithmetic, rotaries=coda.plan.arithmetic.rotaries)
        plan = replace(plan, arithmetic=arithmetic, coda=coda)
    late = [place for place, node in enumerate(program.nodes) if isinstance(node, Step) and node.late]
    cuts = [place for place in range(max(1, first), len(program)) if place not in late]
    if len(cuts) < ranks - 1:
        where = ""
        if first:
            where = f" behind the first {first}, which the coda is for"
        why = ""
        if late:
            why = "; a late step reads the stream as it was within the stretch before it"
        raise ValueError(
            f"the program's {plural(len(program), 'node')} split into stretches for {plural(len(cuts) + 1, 'rank')} at "
            f"most{where}, not for {ranks}{why}; use fewer ranks, or the model's own program"
        )
    # How many numbers the weights of each node have: the head's with the first, the coda's with its rack's last.
    costs = [_numbers(plan, weights, Program((node,))) for node in program.nodes]
    costs[0] += head
    if plan.coda is not None:
        own = ModelWeights(TensorFiles(plan.coda.file), plan.coda.plan.family, plan.head_dim)
        costs[first - 1] += head + _numbers(plan.coda.plan, own, Program.parse(plan.coda.plan.program))
    return replace(plan, ranks=ranks, stretches=even_stretches(costs, cuts, ranks, first))


def even_stretches(
    costs: Sequence[int], cuts: Sequence[int], ranks: int, first: int = 0
) -> tuple[int, ...]:
    """The node after which each stretch ends, so that the most costly one costs least.

    Args:
        costs: of each node.
        cuts: after how many nodes there can be an end; of all nodes besides. There are enough of them.
        first: where the first stretch ends; 0 for wherever is best.
    """
    until = [0, *accumulate(costs)]
    places = [*cuts, len(costs)]
    # By where a number of stretches ends: the cost of the most costly of them, and where each ends.
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        place: (until[place], (place,)) for place in places if place == (first or place)
    }
    for _ in range(ranks - 1):
        longer = dict[int, tuple[int, tuple[int, ...]]]()
        for place in places:
            for before, (most, ends) in best.items():
                if before < place:
                    found = max(most, until[place] - until[before]), (*ends, place)
                    longer[place] = min(found, longer.get(place, found))
        best = longer
    return best[len(costs)][1]


def _numbers(plan: Plan, weights: Sizes, program: Program) -> int:
    return sum(numbers_of(plan, weights, (sublayer, 1)) for sublayer in program.sublayers())
