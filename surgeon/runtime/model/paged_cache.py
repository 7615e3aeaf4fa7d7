"""The keys and values a rank keeps, in blocks, for sequences of any lengths.

Attentions of one window are a group of slots where that saves memory (plan/memory.py), and a sequence has blocks of its
own in each group. A block is as wide as the widest group: those of all groups lie in one tensor.

Where k and v are two factors each, a slot may hold the first ones' output, of which keys and values are made whenever
they are read, by two buffers (DeInfer, section 4.2): several runs of blocks are copied into one side by side, and the
second factors write to the other one what attention reads.

Shapes: D head_dim, K KV heads of a slice, N tokens of a sequence so far, R the ranks of k and v together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgeon.runtime.batching.blocks import GONE, BlockRun
from surgeon.runtime.batching.sequence import Row
from surgeon.runtime.batching.windows import BLOCK_TOKENS, Windows
from surgeon.runtime.kernels.functions import Weighting, Window, kernels_for
from surgeon.runtime.kernels.triton.functions import TextBlocks, triton_kernels_for
from surgeon.runtime.model.ends import Index
from surgeon.runtime.model.layers import Rebuild
from surgeon.runtime.model.rotary import AllAngles


class Buffers:
    """Room to read a cache in rank space, and for the keys and values made of it; all attentions take turns in it."""

    def __init__(self, rebuilds: Sequence[Rebuild], like: Tensor) -> None:
        self._kept_width = max((sum(one.columns) for one in rebuilds), default=0)
        self._rebuilt_width = max((2 * one.width for one in rebuilds), default=0)
        self.kept = self.rebuilt = like.new_empty(0)

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens; older views keep the buffers of before."""
        if tokens * self._kept_width > self.kept.numel():
            self.kept = self.kept.new_empty(tokens * self._kept_width)
            self.rebuilt = self.rebuilt.new_empty(tokens * self._rebuilt_width)

    def for_kept(self, rebuild: Rebuild, tokens: int) -> Tensor:
        """Room for the numbers kept of so many tokens, (N, R)."""
        self.reserve(tokens)
        return self.kept[: tokens * sum(rebuild.columns)].view(tokens, -1)


class PagedCache:
    """Room for keys and values of every attention of one rank's work, or for what these are rebuilt of.

    Attributes:
        stored: keys and behind them values of one attention of a group after the other, (1, 2 * sum of K, places, D); a
            place holds one token. Attentions in rank space have no heads in it.
        pairs: the part of each attention, (2 * K, places, D); slots: its keys and its values, (K, places, D).
        rebuilds: of attentions in rank space, by slot; low_rank: their numbers, (places, R).
        borrowed: slots of another program, in which tokens that it has computed (`Row.known`) are read, not written.
    """

    def __init__(
        self,
        kv_heads: list[int],
        blocks: int,
        head_dim: int,
        like: Tensor,
        rebuilds: Mapping[int, Rebuild] | None = None,
        group_of: Sequence[int] | None = None,
        windows: Windows = (None,),
    ) -> None:
        self.kv_heads = kv_heads
        self.group_of = group_of or [0] * len(kv_heads)
        self.windows = windows
        self.rebuilds = dict(rebuilds or {})
        self.borrowed = frozenset[int]()
        self.device = like.device
        self.kernels = kernels_for(like)
        self.triton = triton_kernels_for(like)
        places = blocks * BLOCK_TOKENS
        stored = [0 if slot in self.rebuilds else heads for slot, heads in enumerate(kv_heads)]
        groups = [
            [slot for slot, own in enumerate(self.group_of) if own == group]
            for group in range(len(windows))
        ]
        width = max(sum(2 * stored[slot] for slot in slots) for slots in groups)
        self.stored = like.new_empty(1, width, places, head_dim)
        self.pairs = list[Tensor]([self.stored[0, :0]] * len(kv_heads))
        self.places_in_group = [0] * len(kv_heads)
        for slots in groups:
            sizes = [2 * stored[slot] for slot in slots]
            for place, (slot, pair) in enumerate(
                zip(slots, self.stored[0, : sum(sizes)].split(sizes), strict=True)
            ):
                self.pairs[slot] = pair
                self.places_in_group[slot] = place
        self.slots = [pair.chunk(2) for pair in self.pairs]
        self.halves = [[stored[slot] for slot in slots for _ in range(2)] for slots in groups]
        self.low_rank = {
            slot: like.new_empty(places, sum(one.columns)) for slot, one in self.rebuilds.items()
        }
        self.buffers = Buffers(list(self.rebuilds.values()), like)

    @property
    def tokens(self) -> int:
        return self.stored.shape[2]

    def lent(self, slots: Sequence[int], own: Sequence[int] | None = None) -> PagedCache:
        """Lend the room to another program, whose attentions use these slots.

        Args:
            own: attentions whose slots are theirs alone, perhaps none; None if the program never computes tokens that
                the model knows.
        """
        other = copy(self)
        if own is not None:
            other.borrowed = frozenset(range(len(slots))).difference(own)
        other.rebuilds = {
            at: self.rebuilds[slot] for at, slot in enumerate(slots) if slot in self.rebuilds
        }
        other.low_rank = {
            at: self.low_rank[slot] for at, slot in enumerate(slots) if slot in self.low_rank
        }
        other.kv_heads = [self.kv_heads[slot] for slot in slots]
        other.group_of = [self.group_of[slot] for slot in slots]
        other.places_in_group = [self.places_in_group[slot] for slot in slots]
        other.pairs = [self.pairs[slot] for slot in slots]
        other.slots = [self.slots[slot] for slot in slots]
        return other

    def attend(self, slot: int, queries: Tensor, texts: TextBlocks, weighting: Weighting) -> Tensor:
        """Attended values, (B, H * D), of one token of each text, (B, H, D), by the kernels for GPUs."""
        assert self.triton is not None
        rule = weighting.scale, weighting.window, weighting.softcap, weighting.sinks
        return self.triton.attend(queries, self.pairs[slot], texts, BLOCK_TOKENS, *rule)

    def counters(self, texts: int) -> Tensor:
        """Zeros for these kernels to count in."""
        return torch.zeros(texts * max(self.kv_heads, default=0), dtype=torch.int32, device=self.device)

    def rebuild(self, slot: int, kept: Tensor, angles: AllAngles) -> tuple[Tensor, Tensor]:
        """Keys and values, (N, K, D) each, of the numbers kept of N tokens, (N, R); they last until the next ones."""
        rebuild = self.rebuilds[slot]
        self.buffers.reserve(len(kept))
        room = self.buffers.rebuilt[: 2 * len(kept) * rebuild.width].view(2, len(kept), -1)
        return rebuild(kept, angles, room)


def stretches(runs: Sequence[BlockRun], first: int, end: int) -> list[slice]:
    """The places in the cache of a sequence's tokens from `first` up to `end`, as few slices as there can be."""
    found = []
    before = 0
    for first_block, blocks in runs:
        offset = first_block * BLOCK_TOKENS - before
        after = before + blocks * BLOCK_TOKENS
        if first < after and before < end:
            found.append(slice(max(first, before) + offset, min(end, after) + offset))
        before = after
    return found


def runs_of(
    rows: Sequence[Row], group: int, window: Window | None
) -> tuple[list[tuple[int, int]], list[int]]:
    """The runs of places that the last token of each row looks at, in a group of the cache.

    Returns:
        First place and number of places of each run, and how many runs there are up to the end of each row.
    """
    runs = list[tuple[int, int]]()
    ends = list[int]()
    for row in rows:
        end = row.end
        parts = stretches(row.runs[group], 0 if window is None else window.first(end), end)
        runs += [(part.start, part.stop - part.start) for part in parts]
        ends.append(len(runs))
    return runs, ends


def write_table(table: Any, runs: Sequence[BlockRun], gone: int) -> None:
    """Write a text's blocks into a numpy array, as far as it has room; `gone` for those that are there no more."""
    at = 0
    room = len(table)
    for first, blocks in runs:
        end = min(at + blocks, room)
        table[at:end] = gone
        if first != GONE:
            table[at:end] = np.arange(first, first + end - at)
        at = end


def angles_at(angles: AllAngles, positions: Index) -> AllAngles:
    """Take the angles of some positions."""

    def rows(angle: Tensor) -> Tensor:
        kernels = kernels_for(angle)
        if kernels is None or isinstance(positions, slice):
            return angle[positions]
        return kernels.rows(angle.flatten(1), positions)[:, None]

    return tuple((rows(cosine), rows(sine)) for cosine, sine in angles)
