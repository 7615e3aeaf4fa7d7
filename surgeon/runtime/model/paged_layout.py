"""Attention over a paged cache for sequences of any lengths at once.

The tokens of one forward pass lie one after another, whichever sequences they belong to. All but attention treats
every token alike. In float32 on CPUs the kernels (runtime/kernels) read blocks where they lie, those of all sequences
that add one token in one call; those for GPUs do the latter. Elsewhere attention goes through the sequences one by one,
which on a CPU is faster than padding them to one length: a sequence in one run of blocks is read where it lies, as a
view; for one in several runs they are gathered first, which costs about a fifth more time than a view (padding costs
several times as much).

An attention with a window reads the window's keys only: for one more token of a sequence a shorter view.

Shapes: T tokens of the pass, D head_dim, H heads and K KV heads of a slice, N tokens of a sequence so far, R the ranks
of k and v together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from surgeon.runtime.batching.sequence import Row
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.kernels.functions import Runs, TextKeys, Weighting, Window
from surgeon.runtime.kernels.triton.functions import TextBlocks
from surgeon.runtime.model.attending import attention
from surgeon.runtime.model.ends import Index
from surgeon.runtime.model.paged_cache import PagedCache, angles_at, runs_of, stretches, write_table
from surgeon.runtime.model.rotary import AllAngles


class PagedLayout:
    """Where the tokens of one pass are, in the stream and in the cache.

    Attributes:
        positions: of the tokens, each in its sequence.
    """

    def __init__(self, rows: Sequence[Row], cache: PagedCache, angles: AllAngles = ()) -> None:
        """Find the places.

        Args:
            angles: of all positions up to the last one.
        """
        self.cache = cache
        self._parts: list[_Singles | _Chunk] = []
        positions = []
        first = 0
        for row in rows:
            positions.append(slice(row.start, row.start + len(row.tokens)))
            if len(row.tokens) > 1:
                self._parts.append(_Chunk(first, row, cache, angles))
            elif self._parts and isinstance(self._parts[-1], _Singles):
                self._parts[-1].add(row)
            else:
                self._parts.append(_Singles(first, row, cache, angles))
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
            kept: keys and, behind them, values, (T, 2 * K, D), or what they are rebuilt of, (T, R).
        """
        self._keep(slot, kept)
        attended = [part.attend(slot, queries, kept, weighting) for part in self._parts]
        if len(attended) == 1:
            return attended[0]
        return torch.cat(attended)

    def _keep(self, slot: int, kept: Tensor) -> None:
        cache = self.cache
        group = self.cache.group_of[slot]
        written = self._newly if slot in cache.borrowed else self._written
        if written.tokens is not None:
            kept = kept[written.tokens]
        if slot in cache.rebuilds:
            cache.low_rank[slot][written.places[group]] = kept
        elif self._keeping is not None:
            self._keeping.keep(kept, written.numbers[group], cache.pairs[slot])
        else:
            cache.pairs[slot][:, written.places[group]] = kept.transpose(0, 1)


class _Written(NamedTuple):
    """Which tokens of a pass are put into the cache, and where.

    Attributes:
        tokens: None for all.
        places: of these in each group.
        numbers: the same as tensors, where kernels put them there.
    """

    tokens: Index | None
    places: list[Index]
    numbers: list[Tensor]

    @classmethod
    def of(cls, rows: Sequence[Row], cache: PagedCache, begins: Sequence[int]) -> _Written:
        """The tokens of rows from a position of each on."""
        first = 0
        some = list[slice]()
        all_ = True
        found: list[list[slice]] = [[] for _ in cache.windows]
        for row, begin in zip(rows, begins, strict=True):
            end = row.start + len(row.tokens)
            left_out = min(max(0, begin - row.start), len(row.tokens))
            some += [slice(first + left_out, first + len(row.tokens))] if left_out < len(row.tokens) else []
            for places, runs in zip(found, row.runs, strict=True):
                places.extend(stretches(runs, row.start + left_out, end))
            first = first + len(row.tokens)
            all_ = all_ and not left_out
        indexes = [as_index(places, cache.device) for places in found]
        by_kernels = cache.kernels is not None or cache.triton is not None
        numbers = [_numbers(index, cache.device) for index in indexes] if by_kernels else []
        return cls(None if all_ else as_index(some, cache.device), indexes, numbers)


class _Singles:
    """Rows of a pass, one after another, that have one token each: texts that are being continued."""

    def __init__(self, first: int, row: Row, cache: PagedCache, angles: AllAngles) -> None:
        self._first = first
        self._sequences = [_Cached(row, cache, angles)]
        self._cache = cache
        self._angles = angles
        self._runs: dict[tuple[int, Window | None], Runs] = {}
        self._tables: dict[int, TextBlocks] = {}

    def add(self, row: Row) -> None:
        self._sequences.append(_Cached(row, self._cache, self._angles))

    def attend(self, slot: int, queries: Tensor, _: Tensor, weighting: Weighting) -> Tensor:
        """Attended values of these rows, (rows, H * D), given queries of the whole pass and what it keeps."""
        heads = queries.shape[1]
        head_dim = queries.shape[2]
        kv_heads = self._cache.kv_heads[slot]
        count = len(self._sequences)
        own = queries[self._first : self._first + count]
        if self._cache.triton is not None and slot not in self._cache.rebuilds:
            return self._cache.attend(slot, own, self._blocks(self._cache.group_of[slot]), weighting)
        if self._cache.kernels is not None and slot not in self._cache.rebuilds:
            read = self._read(self._cache.group_of[slot], weighting.window)
            return self._cache.kernels.attend(own, self._cache.pairs[slot], read, weighting)
        # The heads of one KV group are like several tokens that may look at everything: no copies of keys.
        grouped = own.view(count, 1, kv_heads, heads // kv_heads, head_dim).unbind()
        attended = [
            attention(query, *sequence.read(slot, weighting.window), weighting)
            for query, sequence in zip(grouped, self._sequences, strict=True)
        ]
        together = attended[0] if count == 1 else torch.cat(attended)
        return together.reshape(count, heads * head_dim)

    def _blocks(self, group: int) -> TextBlocks:
        if group not in self._tables:
            rows = [sequence.row for sequence in self._sequences]
            ends = [row.start + len(row.tokens) for row in rows]
            inputs = torch.zeros(len(rows), 1 + blocks_for(max(ends)), dtype=torch.long)
            for line, row, end in zip(inputs.numpy(), rows, ends, strict=True):
                line[0] = end - 1
                write_table(line[1:], row.runs[group], 0)
            inputs = inputs.to(self._cache.device)
            self._tables[group] = TextBlocks(inputs[:, 1:], inputs[:, 0], self._cache.counters(len(rows)))
        return self._tables[group]

    def _read(self, group: int, window: Window | None) -> Runs:
        """Where attentions of a group with such a window read."""
        key = group, window
        if key not in self._runs:
            runs, ends = runs_of([sequence.row for sequence in self._sequences], group, window)
            self._runs[key] = Runs(torch.tensor(runs), torch.tensor(ends))
        return self._runs[key]


class _Chunk:
    """A row of several tokens: a prompt, or a part of one."""

    def __init__(self, first: int, row: Row, cache: PagedCache, angles: AllAngles) -> None:
        self._tokens = len(row.tokens)
        self._end = row.start + self._tokens
        self._own = slice(first, first + self._tokens)
        self._cache = cache
        self._angles = angles
        self._whole = not row.start  # a whole prompt: all that is read comes with the pass itself
        self._known = row.known > 0  # or has been read by another program, in slots of which it is in the cache
        self._cached = _Cached(row, cache, angles)
        self._texts: dict[tuple[int, Window | None, int], TextKeys] = {}
        self._masks: dict[tuple[int, int, Window | None], Tensor] = {}

    def attend(self, slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
        """Attended values of this row, (tokens, H * D), given queries of the whole pass and what it keeps."""
        own = queries[self._own]
        window = Window.within(weighting.window, self._end)
        by_kernels = self._cache.kernels is not None and slot not in self._cache.rebuilds
        comes = self._whole and not (self._known and slot in self._cache.borrowed)
        fresh = self._fresh(slot, kept[self._own]) if comes and not by_kernels else None
        start = self._end - self._tokens
        attended = []
        for part in self._parts(window):
            asked = own[part.start - start : part.stop - start]
            if self._cache.kernels is not None and by_kernels:
                text = self._text(self._cache.group_of[slot], window, part)
                attended.append(self._cache.kernels.attend_text(asked, self._cache.pairs[slot], text, weighting))
                continue
            first = _first_key(window, part)
            keys, values = self._cached.read_from(slot, first) if fresh is None else fresh
            there = slice(0 if fresh is None else first, part.stop - (first if fresh is None else 0))
            keys = keys[:, :, there]
            values = values[:, :, there]
            causal = part.start == first and (window is None or window.chunked)
            mask = None if causal else self._mask(len(asked), keys.shape[2], window)
            found = attention(asked.transpose(0, 1)[None], keys, values, weighting, mask, causal)
            attended.append(found.transpose(1, 2).flatten(2)[0])
        if len(attended) == 1:
            return attended[0]
        return torch.cat(attended)

    def _parts(self, window: Window | None) -> list[slice]:
        """The row's positions; where there are chunks, those of each chunk, whose tokens look at the same first one."""
        start = self._end - self._tokens
        size = 0 if window is None else window.tokens
        borders = range((start // size + 1) * size, self._end, size) if window is not None and window.chunked else ()
        return [slice(*part) for part in pairwise((start, *borders, self._end))]

    def _text(self, group: int, window: Window | None, part: slice) -> TextKeys:
        """What tokens at some positions read in attentions of a group with such a window."""
        key = group, window, part.start
        if key not in self._texts:
            first = _first_key(window, part)
            places = stretches(self._cached.row.runs[group], first, part.stop)
            runs = torch.tensor([(place.start, place.stop - place.start) for place in places])
            sliding = None if window is None or window.chunked else window.tokens
            self._texts[key] = TextKeys(runs, first, part.start, sliding)
        return self._texts[key]

    def _fresh(self, slot: int, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, (1, K, tokens, D) each, of a whole prompt."""
        if slot in self._cache.rebuilds:
            return by_head(self._cache.rebuild(slot, kept, angles_at(self._angles, slice(0, self._end))))
        keys, values = kept.transpose(0, 1)[None].chunk(2, 1)
        return keys, values

    def _mask(self, tokens: int, keys: int, window: Window | None) -> Tensor:
        """Which of so many keys each of as many tokens as end with the last of them looks at, (tokens, keys)."""
        key = tokens, keys, window
        if key not in self._masks:
            before = keys - tokens
            seen = torch.ones(tokens, keys, dtype=torch.bool, device=self._cache.device).tril(before)
            sliding = window is not None and not window.chunked
            self._masks[key] = seen.triu(before - window.tokens + 1) if sliding and window is not None else seen
        return self._masks[key]


def _first_key(window: Window | None, tokens: slice) -> int:
    """The first position that some of a text's tokens look at; the first of them looks back the furthest."""
    if window is None:
        return 0
    return window.first(tokens.start + 1)


class _Cached:
    """The keys and values of one sequence up to the end of its row."""

    def __init__(self, row: Row, cache: PagedCache, angles: AllAngles) -> None:
        self.row = row
        self._end = row.start + len(row.tokens)
        self._cache = cache
        self._angles = angles
        self._found: dict[tuple[int, int], Sequence[Tensor] | Tensor] = {}

    def read(self, slot: int, window: Window | None) -> tuple[Tensor, Tensor]:
        """Those of a slot that its last token looks at, as of `read_from`."""
        return self.read_from(slot, 0 if window is None else window.first(self._end))

    def read_from(self, slot: int, first: int) -> tuple[Tensor, Tensor]:
        """Those of a slot from a token on, (1, K, N, D) each: views where they lie in one run of blocks, else copies.

        Where they have to be rebuilt they last until the next ones.
        """
        if slot in self._cache.rebuilds:
            return by_head(self._rebuilt(slot, first))
        key = self._cache.group_of[slot], first
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._find(*key)
        if isinstance(found, Tensor):
            keys, values = self._cache.pairs[slot].index_select(1, found)[None].chunk(2, 1)
            return keys, values
        place = self._cache.places_in_group[slot]
        return found[2 * place], found[2 * place + 1]

    def _rebuilt(self, slot: int, first: int) -> tuple[Tensor, Tensor]:
        """Those of a slot in rank space from a token on, (N, K, D) each."""
        cache = self._cache
        own = self.row.runs[cache.group_of[slot]]
        runs = [cache.low_rank[slot][run] for run in stretches(own, first, self._end)]
        kept = runs[0]
        if len(runs) > 1:
            kept = torch.cat(runs, out=cache.buffers.for_kept(cache.rebuilds[slot], self._end - first))
        return cache.rebuild(slot, kept, angles_at(self._angles, slice(first, self._end)))

    def _find(self, group: int, first: int) -> Sequence[Tensor] | Tensor:
        """Views of a group's keys and values from a token on, or the places where they lie scattered."""
        cache = self._cache
        places = as_index(stretches(self.row.runs[group], first, self._end), cache.device)
        if isinstance(places, Tensor):
            return places
        halves = cache.halves[group]
        return cache.stored[:, : sum(halves), places].split_with_sizes(halves, 1)


def _numbers(index: Index, device: torch.device) -> Tensor:
    if isinstance(index, slice):
        return torch.arange(index.start, index.stop, device=device)
    return index


def by_head(keys_values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence by token, (N, K, D), as (1, K, N, D)."""
    keys, values = keys_values
    return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def as_index(parts: Sequence[slice], device: torch.device) -> Index:
    """What indexes all of these, one after the other: a slice (whose result is a view) where there is one only."""
    if len(parts) == 1:
        return parts[0]
    places = [place for part in parts for place in range(part.start, part.stop)]
    return torch.tensor(places, dtype=torch.long, device=device)
