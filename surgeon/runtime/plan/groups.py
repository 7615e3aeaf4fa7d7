"""Which attentions share tables of blocks: groups by window, where that makes room for more texts.

What an attention with a window has left behind can be given back only if no attention with the same table needs it. So
attentions with and without windows are separate groups. All groups take blocks of one size from one cache, so that a
group with fewer attentions than others leaves part of its blocks empty; where attentions of one window are many and of
another few, the many are several groups. Which division holds the most texts of the longest kind follows from the
counts; often that is no division at all (texts hardly longer than the window, or ranks that hold different layers).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from surgeon.language.program import Program
from surgeon.runtime.batching.windows import Windows, text_blocks
from surgeon.runtime.plan.placement import rank_work
from surgeon.runtime.plan.specification import Plan, can_be_low_rank

LEAST_SAVED = 0.1  # of a text's room, that a division is worth
MOST_GROUPS = 8  # every one costs each pass a table to look up, and each row some bytes to the other ranks


@dataclass(frozen=True)
class CacheGroups:
    """A division of all attentions.

    Attributes:
        windows: of the groups.
        slots: by rank, the group of each slot; slots of a coda come behind those of the program.
    """

    windows: Windows
    slots: tuple[tuple[int, ...], ...]

    def width(self, rank: int) -> int:
        """How many attentions of a rank a block is for."""
        return max(Counter(self.slots[rank]).values(), default=0)

    def room(self, tokens: int) -> int:
        """What a text of so many tokens takes of all ranks, in blocks of one attention."""
        return text_blocks(tokens, self.windows) * sum(map(self.width, range(len(self.slots))))


def cache_groups(plan: Plan) -> CacheGroups:
    """The division under which the longest texts take least."""
    windows = [_slot_windows(plan, rank) for rank in range(plan.ranks)]
    counted: Counter[int | None] = Counter(window for own in windows for window in set(own))
    widest: int | None = None if None in counted or not counted else max(one for one in counted if one is not None)
    together = CacheGroups((widest,), tuple((0,) * len(own) for own in windows))
    programs = [plan.program] if plan.coda is None else [plan.program, plan.coda.plan.program]
    # Attentions may keep what the first factors of k and v give, each in a tensor of its own.
    in_rank_space = plan.kv != "full" and any(can_be_low_rank(Program.parse(program)) for program in programs)
    if len(counted) < 2 or in_rank_space:
        return together
    most = max(own.count(window) for own in windows for window in counted)
    divided = (_divided(windows, sorted(counted, key=str), width) for width in range(1, most + 1))
    few_enough = (groups for groups in divided if len(groups.windows) <= MOST_GROUPS)
    best = min(few_enough, key=lambda groups: (groups.room(plan.max_tokens), len(groups.windows)), default=together)
    saved = 1 - best.room(plan.max_tokens) / together.room(plan.max_tokens)
    return best if saved >= LEAST_SAVED else together


def _divided(windows: list[list[int | None]], different: list[int | None], width: int) -> CacheGroups:
    """Groups of one window each, and of so many attentions of a rank at most."""
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
    parts = [part for work in rank_work(Program.parse(plan.program), rank, plan.ranks) for part in work.parts]
    windows = [plan.window(part.sublayer) for part in parts if part.slot is not None]
    own = [None if window is None or window >= plan.max_tokens else window for window in windows]
    return own if plan.coda is None else own + _slot_windows(plan.coda.plan, rank)
