"""Memory of weights and cache on every rank, from the shapes in a checkpoint and before any is read.

Attentions are groups by window, with tables of blocks of their own, where that makes room for more texts: blocks behind
a window can be given back only if no attention with the same table needs them. All groups take blocks of one size, so
that a group with fewer attentions than others leaves part of its blocks empty; where attentions of one window are many
and of another few, the many are several groups. Often the best division is none at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import NamedTuple

from surgeon.checkpoint.random_weights import open_weights
from surgeon.checkpoint.tensor_file import TensorFiles
from surgeon.language.program import Program, Step
from surgeon.language.sublayer import ATTENTION, Sublayer
from surgeon.machine import free_bytes, show_size
from surgeon.models.families.specs import unit_bounds
from surgeon.models.shapes import ModelShapes
from surgeon.models.weights import ModelWeights
from surgeon.runtime.batching.blocks import (
    BLOCK_TOKENS,
    PASS_TOKENS,
    Windows,
    longest_text,
    pass_blocks,
    text_blocks,
)
from surgeon.runtime.plan.placement import computed_of, rank_work, work_of
from surgeon.runtime.plan.specification import CodaPlan, Plan

LEAST_SAVED = 0.1  # of a text's room, that a division is worth
# Every one costs each pass a table to look up, and each row some bytes to the other ranks.
MOST_GROUPS = 8


@dataclass(frozen=True)
class CacheGroups:
    """A division of all attentions into groups with windows.

    Attributes:
        slots: by rank, the group of each slot; a coda's, or a draft's own, come behind those of the program.
    """

    windows: Windows
    slots: tuple[tuple[int, ...], ...]

    def room(self, tokens: int) -> int:
        """The room of all ranks that a text of so many tokens takes, in blocks of one attention."""
        # The attentions that a block is for.
        widest = sum(max(Counter(slots).values(), default=0) for slots in self.slots)
        return text_blocks(tokens, self.windows) * widest


def cache_groups(plan: Plan) -> CacheGroups:
    """The division under which the longest texts take least."""
    windows = [_slot_windows(*plan.of_rank(rank)) for rank in range(plan.ranks)]
    if plan.draft is not None and plan.draft.keeps_own:
        # It computes its own keys later than the model, and reads then what windows would have left behind.
        counts = (len(own) + len(more) for own, more in zip(windows, plan.draft.own, strict=True))
        return CacheGroups((None,), tuple((0,) * count for count in counts))
    counted: Counter[int | None] = Counter(window for own in windows for window in set(own))
    widest: int | None = None
    if not (None in counted or not counted):
        widest = max(one for one in counted if one is not None)
    together = CacheGroups((widest,), tuple((0,) * len(own) for own in windows))
    if plan.coda is None:
        plans = [plan]
    else:
        plans = [plan, plan.coda.plan]
    # Attentions may keep what the first factors of k and v give, each in a tensor of its own.
    in_rank_space = plan.kv != "full" and any(one.can_be_low_rank for one in plans)
    if len(counted) < 2 or in_rank_space:
        return together
    most = max(own.count(window) for own in windows for window in counted)
    divided = (_divide_windows(windows, sorted(counted, key=str), width) for width in range(1, most + 1))
    few_enough = (groups for groups in divided if len(groups.windows) <= MOST_GROUPS)
    best = min(
        few_enough,
        key=lambda groups: (groups.room(plan.max_tokens), len(groups.windows)),
        default=together,
    )
    saved = 1 - best.room(plan.max_tokens) / together.room(plan.max_tokens)
    if saved >= LEAST_SAVED:
        return best
    return together


def _divide_windows(
    windows: list[list[int | None]], different: list[int | None], width: int
) -> CacheGroups:
    """Divide into groups of one window each, and of so many attentions of a rank at most."""
    names: list[int | None] = []
    slots = [[0] * len(own) for own in windows]
    for window in different:
        parts = max(-(-own.count(window) // width) for own in windows)
        for own, groups in zip(windows, slots, strict=True):
            same = [slot for slot, one in enumerate(own) if one == window]
            for number, slot in enumerate(same):
                groups[slot] = len(names) + number * parts // len(same)
        names += [window] * parts
    return CacheGroups(tuple(names), tuple(map(tuple, slots)))


def _slot_windows(plan: Plan, rank: int) -> list[int | None]:
    """The window of each of a rank's attentions, None where it is as long as any text."""
    parts = [part for work in work_of(plan, rank) for part in work.parts]
    windows = [plan.window(part.sublayer) for part in parts if part.slot is not None]
    own = [None if window is None or window >= plan.max_tokens else window for window in windows]
    if plan.coda is None:
        return own
    return own + _slot_windows(plan.coda.plan, rank)


@dataclass(frozen=True)
class Footprint:
    """Bytes by rank, without norms and biases, a thousandth of it, and without what packing fills up.

    Packing fills up to 15 rows of each matrix (`linear.Panels`): much only of narrow factors.

    Attributes:
        weights: matrices, embedding and head.
        kept: by slot, of each attention in a block.
        buffers: to read one block of a cache in rank space, and to make keys and values of it.
        copies: of one block of the widest attention's keys and values (`Plan.gathers`).
        groups: of the attentions; a block has room for those of any one of them.
    """

    weights: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]
    buffers: tuple[int, ...]
    copies: tuple[int, ...]
    groups: CacheGroups

    @property
    def block(self) -> tuple[int, ...]:
        """One block of the cache: as wide as the widest group."""
        widest = []
        for kept, groups in zip(self.kept, self.groups.slots, strict=True):
            sizes = [0] * len(self.groups.windows)
            for group, size in zip(groups, kept, strict=True):
                sizes[group] += size
            widest.append(max(sizes))
        return tuple(widest)

    def blocks(self, texts: int, tokens: int, together: int) -> int:
        """Count the blocks of so many texts of so many tokens, of which `together` are computed in one pass."""
        windows = self.groups.windows
        return texts * text_blocks(tokens, windows) + pass_blocks(min(texts * tokens, together), windows)


Sizes = ModelWeights | ModelShapes  # what says how large matrices are: weights, or a configuration


class _Held(NamedTuple):
    """One rank's bytes, as `Footprint` has those of all."""

    weights: int
    kept: tuple[int, ...]
    buffers: int
    copies: int

    def beside(self, other: _Held) -> _Held:
        """Add what another program holds, which takes turns in the same buffers."""
        return _Held(
            self.weights + other.weights,
            self.kept + other.kept,
            max(self.buffers, other.buffers),
            max(self.copies, other.copies),
        )


def footprint(plan: Plan, source: Sizes | None = None) -> Footprint:
    """Count what ranks will hold for a plan, by its checkpoint's sizes if no others are given."""
    source = source or open_weights(plan.folder, plan.family, plan.head_dim)
    held = []
    for own, rank in map(plan.of_rank, range(plan.ranks)):
        matrices = 2
        if own.tied:
            matrices = 1
        if own.stretch:
            matrices = 0
        rows = -(-own.vocabulary // own.ranks) * matrices + source.position_rows
        whole = _program_held(own, rank, source, rows)
        if own.draft is not None:
            draft = own.draft.plan
            own_parts = _read_by(own, rank)
            new = (
                part
                for part in _read_by(draft, rank)
                if part not in own_parts or draft.exchanges(part[0])
            )
            weights = sum(numbers_of(draft, source, part) for part in new) * own.dtype_bytes
            beside = _program_held(draft, rank, source, 0)._replace(weights=weights)
            if draft.coda is not None:
                beside = beside.beside(_coda_held(draft.coda, rank))
            whole = whole.beside(
                beside._replace(kept=tuple(beside.kept[number] for number in own.draft.own[rank]))
            )
        if own.coda is not None:
            whole = whole.beside(_coda_held(own.coda, rank))
        held.append(whole)
    return Footprint(
        tuple(one.weights for one in held),
        tuple(one.kept for one in held),
        tuple(one.buffers for one in held),
        tuple(one.copies for one in held),
        cache_groups(plan),
    )


def _read_by(plan: Plan, rank: int) -> set[tuple[Sublayer, int]]:
    """A rank's parts that have different matrices, each with how many ranks share the sublayer."""
    return {(part.sublayer, len(part.sharers)) for work in work_of(plan, rank) for part in work.parts}


def _coda_held(coda: CodaPlan, rank: int) -> _Held:
    own = ModelWeights(TensorFiles(coda.file), coda.plan.family, coda.plan.head_dim)
    has_head = own.names.own(f"{coda.plan.family.head}.weight") in own.store
    rows = -(-coda.plan.vocabulary // coda.plan.ranks) * has_head
    return _program_held(coda.plan, rank, own, rows)


def _program_held(plan: Plan, rank: int, source: Sizes, rows: int) -> _Held:
    """Count a rank's part of a plan's program, and so many rows as wide as the stream."""
    block = BLOCK_TOKENS * plan.dtype_bytes  # a number of every token of a block
    numbers = rows * plan.hidden
    numbers += sum(numbers_of(plan, source, part) for part in _read_by(plan, rank))
    kept = list[int]()
    copied = 0
    rebuilt = 0
    read = 0
    parts = [(work, part) for work in work_of(plan, rank) for part in work.parts]
    for attention in (computed_of(plan, work, part) for work, part in parts if part.slot is not None):
        first, end = kv_heads(plan, source, attention)
        keys_values = 2 * (end - first) * plan.head_dim
        columns = plan.kept_factors(attention, end - first)
        kept.append((keys_values if columns is None else sum(columns)) * block)
        if columns is None:
            read = max(read, keys_values)
        else:  # all such attentions read by the same two buffers
            copied = max(copied, sum(columns))
            rebuilt = max(rebuilt, keys_values)
    copies = read * block
    if plan.arithmetic.attention_softcap is not None:
        copies *= 2  # a product copies them once more
    return _Held(numbers * plan.dtype_bytes, tuple(kept), (copied + rebuilt) * block, copies)


def kv_heads(plan: Plan, source: Sizes, attention: Sublayer) -> tuple[int, int]:
    """The first and the end of the KV heads that a slice of an attention has."""
    if plan.latent is not None:
        own = plan.latent.share(attention.piece)
        return own.start, own.stop
    (unit,) = (
        p.unit
        for p in source.family.spec(attention.kind, attention.layers[0]).projections
        if p.role == "k"
    )
    return unit_bounds(source.units(attention), unit, attention.piece)


def numbers_of(plan: Plan, source: Sizes, part: tuple[Sublayer, int]) -> int:
    """Count the numbers of a part's matrices, given how many ranks share the sublayer."""
    sublayer, members = part
    size = plan.mixtures.size(sublayer)
    whole = plan.mixtures.whole_experts(sublayer, members)
    numbers = 0  # of the router
    if size is not None:
        numbers = size.experts * plan.hidden
    if plan.latent is not None and sublayer.kind == ATTENTION:
        own = plan.latent.share(sublayer.piece)
        numbers += sum(map(prod, plan.latent.products(plan.hidden, own.stop - own.start).values()))
    for projection in source.family.spec(sublayer.kind, sublayer.layers[0]).projections:
        of = sublayer
        count = 1
        if projection.stacked and size is not None:
            count = size.experts
            if whole is not None:
                of = whole.of
                count = len(whole.own)
            # They are all alike.
            of = replace(of, experts=(0,) if of.experts is None else of.experts[:1])
        outputs, inputs = source.matrix(of, projection.role).shape
        factors = of.rank(projection.role)
        numbers += count * (outputs * inputs if factors is None else factors * (outputs + inputs))
    return numbers


def imbalance(plan: Plan, source: Sizes | None = None) -> float:
    """Return how many numbers of matrices the busiest rank reads in a pass, times an even share.

    Ranks wait for each other at every sum, so that the busiest one counts of every step, and of late steps and those
    before them of all together.
    """
    source = source or open_weights(plan.folder, plan.family, plan.head_dim)
    program = Program.parse(plan.program)
    waited_for = 0.0
    total = 0
    together = [0] * plan.ranks
    works = [iter(work_of(plan, rank)) for rank in range(plan.ranks)]
    for number, node in enumerate(program.nodes):
        for rank, work in enumerate(works):
            steps = len(rank_work(Program((node,)), rank, plan.ranks, plan.sliced))
            own = islice(work, steps)
            parts = [(part.sublayer, len(part.sharers)) for one in own for part in one.parts]
            together[rank] += sum(numbers_of(plan, source, part) for part in parts)
        following = program.nodes[number + 1 : number + 2]
        if not any(isinstance(one, Step) and one.late for one in following):
            waited_for += max(together)
            total += sum(together)
            together = [0] * plan.ranks
    if total == 0:
        return 1.0
    return waited_for * plan.ranks / total


def choose_cache(
    plan: Plan,
    device: str,
    max_batch: int,
    blocks: int | None,
    memory: int | None,
    local_ranks: int | None = None,
    free: Callable[[], int] = free_bytes,
    drafts: int = 0,
) -> tuple[Plan, int]:
    """Choose the blocks of the cache, and the plan, in which memory may have become the limit (`Plan.kv`).

    Args:
        device: "cpu", where all ranks of a machine share its memory, or "cuda", where each has its own.
        max_batch: where `blocks` is None, as many of the longest sequences have room if the memory does.
        memory: for weights and cache, on this machine together or on each GPU; most of what is free if None.
        local_ranks: how many of the ranks run on this machine; all if None.
        free: tells the free memory of this machine (ranks on other machines are taken to have as much), or of the GPU
            that has least.
        drafts: tokens that are drafted for each sequence, and verified in one pass, each as a text of its own.
    """
    here = local_ranks or plan.ranks
    allowed = free() if memory is None else memory
    room = _room(plan, device, here, max_batch, allowed, drafts)
    wanted = room[-1] if blocks is None else blocks
    if plan.kv == "auto" and room[0] < wanted:
        fewer = replace(plan, kv="fewer")
        smaller = _room(fewer, device, here, max_batch, allowed, drafts)
        if smaller[0] > room[0]:
            plan = fewer
            room = smaller
    fitting, weights, block, _ = room
    limit = f"{show_size(allowed)} {'are free' if memory is None else 'are allowed'}"
    place = " on each GPU"
    if device == "cpu":
        place = ""
    if fitting < 1:
        raise ValueError(
            f"the weights take {show_size(weights)}{place} and {limit}; give more memory or another model"
        )
    if blocks is not None and blocks > fitting:
        raise ValueError(
            f"weights of {show_size(weights)} and {blocks} blocks of {show_size(block)} do not fit: "
            f"{limit}{place}; at most {fitting} blocks do"
        )
    return plan, min(fitting, wanted)


@dataclass(frozen=True)
class Capacity:
    """Texts that a cache holds at a time.

    Attributes:
        longest: tokens that the longest text may have.
        max_batch: texts that are computed together at most.
        pass_tokens: of prompts in one pass.
        weights, cache: bytes, of all ranks together.
    """

    blocks: int
    windows: Windows
    longest: int
    max_batch: int
    pass_tokens: int
    weights: int
    cache: int

    @classmethod
    def of(cls, plan: Plan, blocks: int, max_batch: int, device: str = "cpu") -> Capacity:
        sizes = footprint(plan)
        windows = sizes.groups.windows
        longest = longest_text(blocks, windows, plan.max_tokens)
        weights = sum(sizes.weights)
        cache = blocks * sum(sizes.block)
        return cls(blocks, windows, longest, max_batch, PASS_TOKENS[device], weights, cache)

    def texts(self, tokens: int) -> int:
        """Count the texts of so many tokens that there is room for; up to `max_batch`, and at least 1."""
        left = self.blocks - pass_blocks(min(tokens, self.pass_tokens), self.windows)
        return max(1, min(self.max_batch, left // text_blocks(tokens, self.windows)))

    def line(self) -> str:
        """Tell the user."""
        all_ = self.texts(self.longest)
        found = f"{all_} {'text' if all_ == 1 else 'texts'} of up to {self.longest} tokens"
        tokens = self.longest
        while tokens > 1 and self.texts(tokens) < self.max_batch:
            tokens //= 2
        if all_ < self.max_batch:
            found += f" (or {self.texts(tokens)} of {tokens})"
        return f"room for {found} at a time: weights {show_size(self.weights)}, cache {show_size(self.cache)}"


def _room(
    plan: Plan, device: str, here: int, max_batch: int, allowed: int, drafts: int
) -> tuple[int, int, int, int]:
    """Count the room of one machine's CPU, or of the GPU that holds the most.

    Returns:
        Blocks that fit beside the weights and their buffers, bytes of the weights and of a block of the cache, and
        blocks of as many of the longest texts as are computed together.
    """
    sizes = footprint(plan)
    weights, block, buffers, copies = (
        sum(sorted(each)[-here:]) if device == "cpu" else max(each)
        for each in (sizes.weights, sizes.block, sizes.buffers, sizes.copies)
    )
    wanted = sizes.blocks(max_batch, plan.max_tokens, PASS_TOKENS[device])
    if not block:
        return 1 << 30, weights, block, wanted  # a program without attention has no cache
    texts, blocks = plan.read_at_once(device, max_batch * (1 + drafts))
    left = allowed - weights
    buffers = texts * (buffers + (copies if plan.gathers(device) else 0))
    # No text is longer than the cache, which counts where that is shorter than the longest text.
    fitting = max(left // (block + buffers), (left - buffers * blocks) // block)
    return fitting, weights, block, wanted
