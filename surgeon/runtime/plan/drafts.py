"""The plan of a model that has tokens drafted by another program over its own weights.

What a draft's attention reads of the text so far are the keys and values that the model's program has cached, and what
it adds of drafted tokens is overwritten when these are verified. So it has to compute, on every rank, KV heads that the
model's program has there, too: those of the same layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from surgeon.checkpoint.drafts import DraftChanges, HealedDraft
from surgeon.checkpoint.load import open_stored
from surgeon.checkpoint.stored import StoredModel
from surgeon.language.operations.variants import is_variant, variant_of
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import Sizes, kv_heads
from surgeon.runtime.plan.placement import computed_of, work_of
from surgeon.runtime.plan.specification import DraftPlan, Plan, Ways
from surgeon.words import plural

Place = tuple[tuple[int, ...], int | None, int]  # layers, width, and which of the attentions of these in the program


def with_draft(plan: Plan, model: str | Path | StoredModel, draft: Program | str | HealedDraft) -> Plan:
    """A model's plan, with a program over the same weights that drafts tokens.

    Its steps lie on ranks as the model's own do: in slices where it can, also of sublayers that share an input and that
    ranks would have whole.

    Raises:
        ValueError: if the program names what the model does not have, does not divide among the ranks, or has an
            attention whose keys and values no rank has cached, or they are to be cached in rank space.
    """
    if plan.kv == "lowrank":
        raise ValueError("drafts read the keys and values of the model's own program; use kv full or auto, not lowrank")
    stored = open_stored(model)
    healed = draft if isinstance(draft, HealedDraft) else None
    if isinstance(draft, HealedDraft):
        DraftChanges.read(draft.folder).check(stored.weights)
        draft = draft.program
    if isinstance(draft, str) and is_variant(draft):
        draft = variant_of(draft, plan.layers, plan.family.steps_per_layer)(plan.ranks)
    ways: Ways = {"dtype": plan.dtype, "decoding": plan.decoding, "low_rank": plan.low_rank, "kv": "full"}

    def make(sliced: bool) -> Plan:
        mode = plan.mixtures.mode
        made = make_plan(stored, plan.ranks, plan.max_tokens, draft, experts=mode, sliced=sliced, **ways)
        return replace(made, changes=None if healed is None else healed.folder)

    return replace(plan, kv="full", draft=draft_beside(plan, stored.weights, make))


def draft_beside(plan: Plan, source: Sizes, make: Callable[[bool], Plan]) -> DraftPlan:
    """A draft whose steps lie on ranks as those of the model's plan do.

    Args:
        source: how large the model's matrices are.
        make: the draft's own plan, given whether it is sliced (`Plan.sliced`).

    Raises:
        ValueError: as `with_draft`.
    """
    reasons = []
    for sliced in (True, False):
        try:
            own = make(sliced)
            return DraftPlan(own, tuple(_slots(plan, own, source, rank) for rank in range(plan.ranks)))
        except ValueError as error:
            reasons.append(error)
    raise ValueError(f"the draft cannot run beside its model: {reasons[0]}")


def _slots(plan: Plan, draft: Plan, source: Sizes, rank: int) -> tuple[int, ...]:
    """The slots of the model's cache that a draft's attentions use on a rank.

    Raises:
        ValueError: if there is none for one of them.
    """
    there = {place: (slot, heads) for slot, (place, _, heads) in enumerate(_attentions(plan, source, rank))}
    found = []
    for place, attention, heads in _attentions(draft, source, rank):
        if place not in there:
            raise ValueError(
                f"{attention} has no keys and values to read: {_nothing(plan, place, attention)}; draft "
                "with attentions of the program that verifies, each once"
            )
        slot, cached = there[place]
        if heads != cached:
            raise ValueError(
                f"rank {rank} computes {attention} of the draft, which has KV heads {_span(heads)}, and caches "
                f"{_span(cached)} of that layer; use as many ranks as the draft has tracks, or another draft"
            )
        found.append(slot)
    return tuple(found)


def _nothing(plan: Plan, place: Place, attention: Sublayer) -> str:
    layers, _, number = place
    if number:
        return f"the draft has it {number + 1} times, and the program that verifies {number}"
    where = "the average of these layers" if len(layers) > 1 else f"layer {layers[0]}"
    of = f" with {attention.width} KV groups" if attention.width else ""
    return f"no attention of {where}{of} is computed there by the program that verifies on {plural(plan.ranks, 'rank')}"


def _attentions(plan: Plan, source: Sizes, rank: int) -> Iterator[tuple[Place, Sublayer, tuple[int, int]]]:
    """A rank's attentions by slot: their place in the program, what it computes, and the KV heads of these."""
    seen: Counter[tuple[tuple[int, ...], int | None]] = Counter()
    for work in work_of(plan, rank):
        for part in work.parts:
            if part.slot is not None:
                own = computed_of(plan, work, part)
                of = own.layers, own.width
                yield (*of, seen[of]), own, kv_heads(plan, source, own)
                seen[of] += 1


def _span(heads: tuple[int, int]) -> str:
    return f"{heads[0]} to {heads[1] - 1}"
