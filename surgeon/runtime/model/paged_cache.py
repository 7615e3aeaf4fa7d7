"""The keys and values a rank keeps, in blocks, and attention over them for sequences of any lengths at once.

The tokens of one forward pass lie one after another, whichever sequences they belong to. All but attention treats
every token alike; attention goes through the sequences one by one. On a CPU that is faster than padding them to one
length: a sequence in one run of blocks is read where it lies, as a view; for one in several runs they are gathered
first, which costs about a fifth more time than a view (padding costs several times as much).

An attention with a window reads the window's keys only: for one more token of a sequence a shorter view. Blocks that no
window reaches any more stay with their sequence.

Shapes: T tokens of the pass, D head_dim, H heads and K KV heads of a slice, N tokens of a sequence so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surgeon.runtime.batching.blocks import BLOCK_TOKENS, BlockRun
from surgeon.runtime.batching.sequence import Row
from surgeon.runtime.model.ends import Index
from surgeon.runtime.model.layers import Weighting, attention


class PagedCache:
    """Room for keys and values of every attention of one rank's work.

    Attributes:
        kv_heads: of each attention.
        stored: keys and behind them values of one attention after the other, (1, 2 * sum of K, places, D); a place
            holds one token.
        pairs: the part of each attention, (2 * K, places, D).
        slots: its keys and its values, (K, places, D).
    """

    def __init__(self, kv_heads: list[int], blocks: int, head_dim: int, like: Tensor) -> None:
        self.kv_heads = kv_heads
        self.device = like.device
        self.stored = like.new_empty(1, 2 * sum(kv_heads), blocks * BLOCK_TOKENS, head_dim)
        self.pairs = self.stored[0].split([2 * heads for heads in kv_heads])
        self.slots = [pair.chunk(2) for pair in self.pairs]
        self.halves = [heads for heads in kv_heads for _ in range(2)]

    @property
    def tokens(self) -> int:
        """How many it has places for."""
        return self.stored.shape[2]

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return self.stored.nbytes


class PagedLayout:
    """Where the tokens of one pass are, in the stream and in the cache.

    Attributes:
        positions: of the tokens, each in its sequence.
        last: which tokens of the pass are the last of their rows.
    """

    def __init__(self, rows: Sequence[Row], cache: PagedCache) -> None:
        self.cache = cache
        self.last: list[int] = []
        self._parts: list[_Singles | _Chunk] = []
        positions, places, first = [], [], 0
        for row in rows:
            end = row.start + len(row.tokens)
            positions.append(slice(row.start, end))
            places += stretches(row.runs, row.start, end)
            if len(row.tokens) > 1:
                self._parts.append(_Chunk(first, row, cache))
            elif self._parts and isinstance(self._parts[-1], _Singles):
                self._parts[-1].add(row)
            else:
                self._parts.append(_Singles(first, row, cache))
            first += len(row.tokens)
            self.last.append(first - 1)
        self.positions = as_index(positions, cache.device)
        self.places = as_index(places, cache.device)

    def attend(self, slot: int, queries: Tensor, keys_values: Tensor, weighting: Weighting) -> Tensor:
        """Put new keys and values, (T, 2 * K, D), into a slot; queries (T, H, D) to attended values (T, H * D)."""
        self.cache.pairs[slot][:, self.places] = keys_values.transpose(0, 1)
        attended = [part.attend(slot, queries, keys_values, weighting) for part in self._parts]
        return attended[0] if len(attended) == 1 else torch.cat(attended)


class _Singles:
    """Rows of a pass, one after another, that have one token each: texts that are being continued."""

    def __init__(self, first: int, row: Row, cache: PagedCache) -> None:
        self._first = first
        self._sequences = [_Cached(row, cache)]
        self._cache = cache

    def add(self, row: Row) -> None:
        """Take in the row behind."""
        self._sequences.append(_Cached(row, self._cache))

    def attend(self, slot: int, queries: Tensor, keys_values: Tensor, weighting: Weighting) -> Tensor:
        """Attended values of these rows, (rows, H * D), given queries, keys and values of the whole pass."""
        heads, head_dim, kv_heads = queries.shape[1], queries.shape[2], keys_values.shape[1] // 2
        count = len(self._sequences)
        own = queries[self._first : self._first + count]
        # The heads of one KV group are like several tokens that may look at everything: no copies of keys.
        grouped = own.view(count, 1, kv_heads, heads // kv_heads, head_dim).unbind()
        attended = [
            attention(query, *sequence.read(slot, weighting.window), weighting)
            for query, sequence in zip(grouped, self._sequences, strict=True)
        ]
        together = attended[0] if count == 1 else torch.cat(attended)
        return together.reshape(count, heads * head_dim)


class _Chunk:
    """A row of several tokens: a prompt, or a part of one."""

    def __init__(self, first: int, row: Row, cache: PagedCache) -> None:
        self._tokens = len(row.tokens)
        self._end = row.start + self._tokens
        self._own = slice(first, first + self._tokens)
        self._device = cache.device
        # Of a whole prompt, all that is read comes with the pass itself.
        self._cached = _Cached(row, cache) if row.start else None
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, slot: int, queries: Tensor, keys_values: Tensor, weighting: Weighting) -> Tensor:
        """Attended values of this row, (tokens, H * D), given queries, keys and values of the whole pass."""
        own, window = self._own, weighting.window
        if window is not None and window >= self._end:
            window = None
        if self._cached is None:
            all_keys, all_values = keys_values[own].transpose(0, 1)[None].chunk(2, 1)
        else:
            # The first of these tokens looks back the furthest.
            all_keys, all_values = self._cached.read(slot, None if window is None else window + self._tokens - 1)
        causal = self._cached is None and window is None
        mask = None if causal else self._mask(all_keys.shape[2], window)
        attended = attention(queries[own].transpose(0, 1)[None], all_keys, all_values, weighting, mask, causal)
        return attended.transpose(1, 2).flatten(2)[0]

    def _mask(self, keys: int, window: int | None) -> Tensor:
        """Which of the last so many tokens up to the row's end each token of the row looks at, (tokens, keys)."""
        if window not in self._masks:
            before = keys - self._tokens
            seen = torch.ones(self._tokens, keys, dtype=torch.bool, device=self._device).tril(before)
            self._masks[window] = seen if window is None else seen.triu(before - window + 1)
        return self._masks[window]


class _Cached:
    """The keys and values of one sequence up to the end of its row."""

    def __init__(self, row: Row, cache: PagedCache) -> None:
        self._row = row
        self._end = row.start + len(row.tokens)
        self._cache = cache
        self._found: dict[int, Sequence[Tensor] | Tensor] = {}

    def read(self, slot: int, last: int | None) -> tuple[Tensor, Tensor]:
        """Those of a slot, (1, K, N, D) each: views where they lie in one run of blocks, copies otherwise.

        Args:
            last: how many of them, from the end; None for all.
        """
        first = 0 if last is None else max(0, self._end - last)
        found = self._found.get(first)
        if found is None:
            found = self._found[first] = self._find(first)
        if isinstance(found, Tensor):
            keys, values = self._cache.pairs[slot].index_select(1, found)[None].chunk(2, 1)
            return keys, values
        return found[2 * slot], found[2 * slot + 1]

    def _find(self, first: int) -> Sequence[Tensor] | Tensor:
        """Views of all slots' keys and values from a token on, or the places where they lie scattered."""
        cache = self._cache
        places = as_index(stretches(self._row.runs, first, self._end), cache.device)
        if isinstance(places, Tensor):
            return places
        return cache.stored[:, :, places].split_with_sizes(cache.halves, 1)


def stretches(runs: Sequence[BlockRun], first: int, end: int) -> list[slice]:
    """The places in the cache of a sequence's tokens from `first` up to `end`, as few slices as there can be."""
    found, before = [], 0
    for first_block, blocks in runs:
        offset = first_block * BLOCK_TOKENS - before
        after = before + blocks * BLOCK_TOKENS
        if first < after and before < end:
            found.append(slice(max(first, before) + offset, min(end, after) + offset))
        before = after
    return found


def as_index(parts: Sequence[slice], device: torch.device) -> Index:
    """What indexes all of these, one after the other: a slice (whose result is a view) where there is one only."""
    if len(parts) == 1:
        return parts[0]
    places = [place for part in parts for place in range(part.start, part.stop)]
    return torch.tensor(places, dtype=torch.long, device=device)
