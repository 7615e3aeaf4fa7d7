"""The keys and values a rank keeps, in blocks, for sequences of any lengths, and attention over them.

Attentions of one window are a group of slots where that saves memory (plan/memory.py), and a sequence has blocks of its
own in each group. A block is as wide as the widest group: those of all groups lie in one tensor.

Where k and v are two factors each, a slot may hold the first ones' output, of which keys and values are made whenever
they are read, by two buffers (DeInfer, section 4.2): several runs of blocks are copied into one side by side, and the
second factors write to the other one what attention reads.

The tokens of one forward pass lie one after another. In float32 on CPUs the kernels (runtime/kernels) read blocks where
they lie, those of all sequences that add one token in one call; those for GPUs do the latter. Elsewhere attention goes
through the sequences one by one, which on a CPU is faster than padding them to one length: one run of blocks is a view;
several are gathered first, which costs about a fifth more time (padding several times as much).

Shapes: T tokens of the pass, D head_dim, H heads and K KV heads of a slice, N tokens of a sequence so far, R the ranks
of k and v together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surgeon.runtime.batching.blocks import BLOCK_TOKENS, GONE, BlockRun, Windows, blocks_for
from surgeon.runtime.batching.request import Row, Rows
from surgeon.runtime.kernels.functions import (
    Runs,
    TextKeys,
    Weighting,
    Window,
    kernels_for,
    triton_kernels_for,
)
from surgeon.runtime.kernels.triton import TextBlocks
from surgeon.runtime.model.attending import AllAngles, attention
from surgeon.runtime.model.ends import Index
from surgeon.runtime.model.layers import Rebuild


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
        stored: keys and behind them values of one attention of a group after the other, (2 * sum of K, places, D); a
            place holds one token. Attentions in rank space have no heads in it.
        pairs: the part of each attention, (2 * K, places, D).
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
        self.stored = like.new_empty(width, places, head_dim)
        self.pairs = list[Tensor]([self.stored[:0]] * len(kv_heads))
        for slots in groups:
            sizes = [2 * stored[slot] for slot in slots]
            for slot, pair in zip(slots, self.stored[: sum(sizes)].split(sizes), strict=True):
                self.pairs[slot] = pair
        self.low_rank = {
            slot: like.new_empty(places, sum(one.columns)) for slot, one in self.rebuilds.items()
        }
        self.buffers = Buffers(list(self.rebuilds.values()), like)

    @property
    def tokens(self) -> int:
        return self.stored.shape[1]

    def lend(self, slots: Sequence[int], own: Sequence[int] | None = None) -> PagedCache:
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
        other.pairs = [self.pairs[slot] for slot in slots]
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


def runs_of(rows: Rows, group: int, window: Window | None) -> tuple[list[tuple[int, int]], list[int]]:
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


class PagedLayout:
    """The places of one pass's tokens, in the stream and in the cache.

    Attributes:
        positions: of the tokens, each in its sequence.
    """

    def __init__(self, rows: Rows, cache: PagedCache, angles: AllAngles = ()) -> None:
        self.cache = cache
        self._parts: list[_Singles | _Text] = []
        positions = []
        first = 0
        for row in rows:
            positions.append(slice(row.start, row.end))
            text = _Text(first, row, cache, angles)
            if len(row.tokens) > 1:
                self._parts.append(text)
            elif self._parts and isinstance(self._parts[-1], _Singles):
                self._parts[-1].texts.append(text)
            else:
                self._parts.append(_Singles(first, text, cache))
            first += len(row.tokens)
        self.positions = as_index(positions, cache.device)
        self._keeping = cache.kernels or cache.triton
        self._written = _Written.of(rows, cache, [row.start for row in rows])
        self._newly = self._written  # of what another program has not computed
        if any(row.known > row.start for row in rows):
            self._newly = _Written.of(rows, cache, [row.known for row in rows])

    def attend(self, slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
        """Put new keys and values into a slot; queries (T, H, D) to attended values (T, H * D).

        Args:
            kept: keys and, behind them, values, (T, 2 * K, D), or the numbers they are rebuilt of, (T, R).
        """
        cache = self.cache
        group = cache.group_of[slot]
        if slot in cache.borrowed:
            written = self._newly
        else:
            written = self._written
        new = kept
        if written.tokens is not None:
            new = kept[written.tokens]
        if slot in cache.rebuilds:
            cache.low_rank[slot][written.places[group]] = new
        elif self._keeping is not None:
            self._keeping.keep(new, written.numbers[group], cache.pairs[slot])
        else:
            cache.pairs[slot][:, written.places[group]] = new.transpose(0, 1)
        attended = [part.attend(slot, queries, kept, weighting) for part in self._parts]
        if len(attended) == 1:
            return attended[0]
        return torch.cat(attended)


class _Written(NamedTuple):
    """The tokens of a pass that are put into the cache (None for all), and their places in each group."""

    tokens: Index | None
    places: list[Index]
    numbers: list[Tensor]

    @classmethod
    def of(cls, rows: Rows, cache: PagedCache, begins: Sequence[int]) -> _Written:
        """The tokens of rows from a position of each on."""
        first = 0
        some = list[slice]()
        all_ = True
        found: list[list[slice]] = [[] for _ in cache.windows]
        for row, begin in zip(rows, begins, strict=True):
            end = row.end
            left_out = min(max(0, begin - row.start), len(row.tokens))
            if left_out < len(row.tokens):
                some += [slice(first + left_out, first + len(row.tokens))]
            for places, runs in zip(found, row.runs, strict=True):
                places.extend(stretches(runs, row.start + left_out, end))
            first = first + len(row.tokens)
            all_ = all_ and not left_out
        indexes = [as_index(places, cache.device) for places in found]
        numbers = list[Tensor]()
        if cache.kernels is not None or cache.triton is not None:
            for index in indexes:
                if isinstance(index, slice):
                    numbers.append(torch.arange(index.start, index.stop, device=cache.device))
                else:
                    numbers.append(index)
        return cls(None if all_ else as_index(some, cache.device), indexes, numbers)


class _Singles:
    """Consecutive rows of one token each: texts that are continued."""

    def __init__(self, first: int, text: _Text, cache: PagedCache) -> None:
        self.texts = [text]
        self._first = first
        self._cache = cache
        self._runs: dict[tuple[int, Window | None], Runs] = {}
        self._tables: dict[int, TextBlocks] = {}

    def attend(self, slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
        """Attended values of these rows, (rows, H * D), given queries of the whole pass and what it keeps."""
        cache = self._cache
        group = cache.group_of[slot]
        own = queries[self._first : self._first + len(self.texts)]
        if slot in cache.rebuilds or (cache.triton is None and cache.kernels is None):
            return torch.cat([text.attend(slot, queries, kept, weighting) for text in self.texts])
        if cache.triton is not None:
            if group not in self._tables:
                rows = [text.row for text in self.texts]
                blocks = blocks_for(max(row.start for row in rows) + 1)
                inputs = torch.zeros(len(rows), 1 + blocks, dtype=torch.long)
                for line, row in zip(inputs.numpy(), rows, strict=True):
                    line[0] = row.start
                    write_table(line[1:], row.runs[group], 0)
                inputs = inputs.to(cache.device)
                self._tables[group] = TextBlocks(inputs[:, 1:], inputs[:, 0], cache.counters(len(rows)))
            return cache.attend(slot, own, self._tables[group], weighting)
        assert cache.kernels is not None
        key = group, weighting.window
        if key not in self._runs:
            runs, ends = runs_of([text.row for text in self.texts], *key)
            self._runs[key] = Runs(torch.tensor(runs), torch.tensor(ends))
        return cache.kernels.attend(own, cache.pairs[slot], self._runs[key], weighting)


class _Text:
    """A row, and the keys and values of its sequence up to its end."""

    def __init__(self, first: int, row: Row, cache: PagedCache, angles: AllAngles) -> None:
        self.row = row
        self._own = slice(first, first + len(row.tokens))
        self._cache = cache
        self._angles = angles
        self._texts: dict[tuple[int, Window | None, int], TextKeys] = {}
        self._masks: dict[tuple[int, int, Window | None], Tensor] = {}
        self._found: dict[tuple[int, int], Index] = {}

    def attend(self, slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
        """Attended values of this row, (tokens, H * D), given queries of the whole pass and what it keeps."""
        cache = self._cache
        start = self.row.start
        own = queries[self._own]
        window = Window.within(weighting.window, self.row.end)
        by_kernels = cache.kernels is not None and slot not in cache.rebuilds
        # All that a whole prompt reads comes with the pass itself, or has been read by another program.
        fresh = None
        if not by_kernels and not start and not (self.row.known and slot in cache.borrowed):
            fresh = self._fresh(slot, kept[self._own])
        attended = []
        for part in self._parts(window):
            asked = own[part.start - start : part.stop - start]
            first = 0  # the first token looks back the furthest
            if window is not None:
                first = window.first(part.start + 1)
            if cache.kernels is not None and by_kernels:
                text = self._text(cache.group_of[slot], window, part, first)
                attended.append(cache.kernels.attend_text(asked, cache.pairs[slot], text, weighting))
                continue
            if fresh is None:
                keys, values = (one[:, :, : part.stop - first] for one in self.read_from(slot, first))
            else:
                keys, values = (one[:, :, first : part.stop] for one in fresh)
            if len(asked) == 1:
                # The heads of one KV group are like several tokens that may look at everything: no copies of keys.
                grouped = asked.view(1, keys.shape[1], -1, asked.shape[-1])
                attended.append(attention(grouped, keys, values, weighting).reshape(1, -1))
                continue
            causal = part.start == first and (window is None or window.chunked)
            mask = None
            if not causal:
                mask = self._mask(len(asked), keys.shape[2], window)
            found = attention(asked.transpose(0, 1)[None], keys, values, weighting, mask, causal)
            attended.append(found.transpose(1, 2).flatten(2)[0])
        if len(attended) == 1:
            return attended[0]
        return torch.cat(attended)

    def _parts(self, window: Window | None) -> list[slice]:
        """The row's positions, cut where a chunk begins: tokens of a chunk look at the same first one."""
        borders = range(0)
        if window is not None and window.chunked:
            borders = range(
                (self.row.start // window.tokens + 1) * window.tokens, self.row.end, window.tokens
            )
        return [slice(*part) for part in pairwise((self.row.start, *borders, self.row.end))]

    def _text(self, group: int, window: Window | None, part: slice, first: int) -> TextKeys:
        """The keys that some positions read in attentions of a group with such a window."""
        key = group, window, part.start
        if key not in self._texts:
            places = stretches(self.row.runs[group], first, part.stop)
            runs = torch.tensor([(place.start, place.stop - place.start) for place in places])
            sliding = None if window is None or window.chunked else window.tokens
            self._texts[key] = TextKeys(runs, first, part.start, sliding)
        return self._texts[key]

    def _fresh(self, slot: int, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, (1, K, tokens, D) each, of a whole prompt."""
        if slot in self._cache.rebuilds:
            return by_head(
                self._cache.rebuild(slot, kept, angles_at(self._angles, slice(0, self.row.end)))
            )
        keys, values = kept.transpose(0, 1)[None].chunk(2, 1)
        return keys, values

    def _mask(self, tokens: int, keys: int, window: Window | None) -> Tensor:
        """A mask, (tokens, keys), of tokens that end with the last key."""
        key = tokens, keys, window
        if key not in self._masks:
            before = keys - tokens
            seen = torch.ones(tokens, keys, dtype=torch.bool, device=self._cache.device).tril(before)
            if window is not None and not window.chunked:
                seen = seen.triu(before - window.tokens + 1)
            self._masks[key] = seen
        return self._masks[key]

    def read_from(self, slot: int, first: int) -> tuple[Tensor, Tensor]:
        """A slot's keys and values from a token on, (1, K, N, D) each: views of one run of blocks, else copies.

        Rebuilt ones last until the next.
        """
        cache = self._cache
        group = cache.group_of[slot]
        if slot in cache.rebuilds:
            runs = [
                cache.low_rank[slot][run] for run in stretches(self.row.runs[group], first, self.row.end)
            ]
            kept = runs[0]
            if len(runs) > 1:
                kept = torch.cat(
                    runs, out=cache.buffers.for_kept(cache.rebuilds[slot], self.row.end - first)
                )
            return by_head(
                cache.rebuild(slot, kept, angles_at(self._angles, slice(first, self.row.end)))
            )
        if (group, first) not in self._found:
            parts = stretches(self.row.runs[group], first, self.row.end)
            self._found[group, first] = as_index(parts, cache.device)
        keys, values = cache.pairs[slot][:, self._found[group, first]][None].chunk(2, 1)
        return keys, values


def by_head(keys_values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence by token, (N, K, D), as (1, K, N, D)."""
    keys, values = keys_values
    return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def as_index(parts: Sequence[slice], device: torch.device) -> Index:
    """An index of all of these in order: a slice (whose result is a view) where there is one only."""
    if len(parts) == 1:
        return parts[0]
    places = [place for part in parts for place in range(part.start, part.stop)]
    return torch.tensor(places, dtype=torch.long, device=device)
