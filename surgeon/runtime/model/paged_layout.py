"""Attention over a paged cache for sequences of any lengths at once.

The tokens of one forward pass lie one after another. In float32 on CPUs the kernels (runtime/kernels) read blocks where
they lie, those of all sequences that add one token in one call; those for GPUs do the latter. Elsewhere attention goes
through the sequences one by one, which on a CPU is faster than padding them to one length: one run of blocks is a view;
several are gathered first, which costs about a fifth more time (padding several times as much).

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
    """The places of one pass's tokens, in the stream and in the cache.

    Attributes:
        positions: of the tokens, each in its sequence.
    """

    def __init__(self, rows: Sequence[Row], cache: PagedCache, angles: AllAngles = ()) -> None:
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
        self._keep(slot, kept)
        attended = [part.attend(slot, queries, kept, weighting) for part in self._parts]
        if len(attended) == 1:
            return attended[0]
        return torch.cat(attended)

    def _keep(self, slot: int, kept: Tensor) -> None:
        cache = self.cache
        group = self.cache.group_of[slot]
        if slot in cache.borrowed:
            written = self._newly
        else:
            written = self._written
        if written.tokens is not None:
            kept = kept[written.tokens]
        if slot in cache.rebuilds:
            cache.low_rank[slot][written.places[group]] = kept
        elif self._keeping is not None:
            self._keeping.keep(kept, written.numbers[group], cache.pairs[slot])
        else:
            cache.pairs[slot][:, written.places[group]] = kept.transpose(0, 1)


class _Written(NamedTuple):
    """The tokens of a pass that are put into the cache (None for all), and their places in each group."""

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
            end = row.end
            left_out = min(max(0, begin - row.start), len(row.tokens))
            if left_out < len(row.tokens):
                some += [slice(first + left_out, first + len(row.tokens))]
            for places, runs in zip(found, row.runs, strict=True):
                places.extend(stretches(runs, row.start + left_out, end))
            first = first + len(row.tokens)
            all_ = all_ and not left_out
        indexes = [as_index(places, cache.device) for places in found]
        by_kernels = cache.kernels is not None or cache.triton is not None
        numbers = [_numbers(index, cache.device) for index in indexes] if by_kernels else []
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
            return cache.attend(slot, own, self._blocks(group), weighting)
        assert cache.kernels is not None
        key = group, weighting.window
        if key not in self._runs:
            runs, ends = runs_of([text.row for text in self.texts], *key)
            self._runs[key] = Runs(torch.tensor(runs), torch.tensor(ends))
        return cache.kernels.attend(own, cache.pairs[slot], self._runs[key], weighting)

    def _blocks(self, group: int) -> TextBlocks:
        if group not in self._tables:
            rows = [text.row for text in self.texts]
            inputs = torch.zeros(
                len(rows), 1 + blocks_for(max(row.start for row in rows) + 1), dtype=torch.long
            )
            for line, row in zip(inputs.numpy(), rows, strict=True):
                line[0] = row.start
                write_table(line[1:], row.runs[group], 0)
            inputs = inputs.to(self._cache.device)
            self._tables[group] = TextBlocks(
                inputs[:, 1:], inputs[:, 0], self._cache.counters(len(rows))
            )
        return self._tables[group]


class _Text:
    """A row, and the keys and values of its sequence up to its end."""

    def __init__(self, first: int, row: Row, cache: PagedCache, angles: AllAngles) -> None:
        self.row = row
        self._own = slice(first, first + len(row.tokens))
        self._cache = cache
        self._angles = angles
        self._texts: dict[tuple[int, Window | None, int], TextKeys] = {}
        self._masks: dict[tuple[int, int, Window | None], Tensor] = {}
        self._found: dict[tuple[int, int], Sequence[Tensor] | Tensor] = {}

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
            places = as_index(stretches(self.row.runs[group], first, self.row.end), cache.device)
            if isinstance(places, Tensor):
                self._found[group, first] = places
            else:
                halves = cache.halves[group]
                self._found[group, first] = cache.stored[:, : sum(halves), places].split_with_sizes(
                    halves, 1
                )
        found = self._found[group, first]
        if isinstance(found, Tensor):
            keys, values = cache.pairs[slot].index_select(1, found)[None].chunk(2, 1)
            return keys, values
        place = cache.places_in_group[slot]
        return found[2 * place], found[2 * place + 1]


def _numbers(index: Index, device: torch.device) -> Tensor:
    if isinstance(index, slice):
        return torch.arange(index.start, index.stop, device=device)
    return index


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
