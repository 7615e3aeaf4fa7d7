"""The plan of a model that has tokens drafted by another program over its own weights.

What a draft's attention reads of the text so far are the keys and values that the model's program has cached, where
that caches on the same rank, of the same layer, the same KV heads in the same way; what the draft adds of its tokens is
overwritten when these are verified. An attention without such a counterpart (averages of layers, a layer's second
time, whole layers or tracks on a rank that has slices of the model's) has a slot of its own behind the model's. A view
of some heads of a slot would save that for tracks: but the keys and values of a slot are one piece of memory for every
kernel, and those of some heads would be two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from surgeon.checkpoint.config import open_stored
from surgeon.checkpoint.stored import StoredModel
from surgeon.errors import shown
from surgeon.language.operations.declare import VARIANTS
from surgeon.language.operations.variants import RUN_OTHERWISE, is_variant, variant_of
from surgeon.language.program import Program
from surgeon.named import is_program
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import Sizes, kv_heads
from surgeon.runtime.plan.placement import computed_of, work_of
from surgeon.runtime.plan.specification import DraftPlan, KvMode, Plan, Ways

Place = tuple[tuple[int, ...], int | None, int]  # layers, width, and which of the attentions of these in the program
Kept = tuple[tuple[int, int], tuple[int, int] | None]  # the KV heads, and numbers in rank space in their place


def with_draft(plan: Plan, model: str | Path | StoredModel, draft: Program | str) -> Plan:
    """A model's plan, with a program over the same weights that drafts tokens.

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
        return replace(made, kv=kv)

    return replace(plan, kv=kv, draft=draft_beside(replace(plan, kv=kv), stored.weights, make))


def require_shared(draft: DraftPlan, why: str) -> Plan:
    """The plan of a draft whose attentions all use the model's keys and values.

    Args:
        why: they have to, for who reads that one has its own.
    """
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
    """What a draft is named by: a program over the model's weights, or a variant of the model."""
    if is_program(text) or (is_variant(text) and text not in RUN_OTHERWISE):
        return text
    raise ValueError(
        f"there are no drafts {shown(text)}; give a program over the model's weights, as in "
        f'"A0 F0 [A1 A2] [F1 F2]", or a variant of the model ({", ".join(VARIANTS)}); where it runs, lookup and coda '
        "draft, too"
    )


def draft_beside(plan: Plan, source: Sizes, make: Callable[[bool], Plan]) -> DraftPlan:
    """A draft whose steps lie on ranks as those of the model's plan do.

    Args:
        source: how large the model's matrices are.
        make: the draft's own plan, given whether it is sliced (`Plan.sliced`).
    """
    found = list[DraftPlan]()
    reasons = list[ValueError]()
    for sliced in (True, False):
        try:
            own = make(sliced)
        except ValueError as error:
            reasons.append(error)
            continue
        slots, more = zip(*(_slots(plan, own, source, rank) for rank in range(plan.ranks)), strict=True)
        found.append(DraftPlan(own, slots, more))
        if not found[-1].keeps_own:
            break
    if not found:
        raise ValueError(f"the draft cannot run beside its model: {reasons[0]}")
    return min(found, key=lambda one: sum(map(len, one.own)))


def _slots(plan: Plan, draft: Plan, source: Sizes, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The slots of the cache that a draft's attentions use on a rank, and which of these attentions have their own."""
    there = {place: (slot, kept) for slot, (place, kept) in enumerate(_attentions(plan, source, rank))}
    slots = list[int]()
    own = list[int]()
    for number, (place, kept) in enumerate(_attentions(draft, source, rank)):
        slot, cached = there.get(place, (None, None))
        if slot is None or cached != kept:
            slot = len(there) + len(own)
            own.append(number)
        slots.append(slot)
    return tuple(slots), tuple(own)


def _attentions(plan: Plan, source: Sizes, rank: int) -> Iterator[tuple[Place, Kept]]:
    """A rank's attentions by slot: their place in the program, and what is kept of each."""
    seen: Counter[tuple[tuple[int, ...], int | None]] = Counter()
    for work in work_of(plan, rank):
        for part in work.parts:
            if part.slot is not None:
                own = computed_of(plan, work, part)
                of = (own.layers, own.width)
                (first, end) = kv_heads(plan, source, own)
                yield (*of, seen[of]), ((first, end), plan.kept_factors(own, end - first))
                seen[of] += 1
