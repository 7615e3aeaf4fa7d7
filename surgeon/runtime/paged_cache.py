"""The keys and values a rank keeps, in blocks, and attention over them for sequences of any lengths at once.

The tokens of one forward pass lie one after another, whichever sequences they belong to. All but attention treats
every token alike; attention goes through the sequences one by one. On a CPU that is faster than padding them to one
length: a sequence in one run of blocks is read where it lies, as a view; for one in several runs they are gathered
first, which costs about a fifth more time than a view (padding costs several times as much).

Shapes: T tokens of the pass, D head_dim, H heads and K KV heads of a slice, N tokens of a sequence so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.runtime.blocks import BLOCK_TOKENS, Run
from surgeon.runtime.scheduler import Row

Index = slice | Tensor  # which of some places, in order


class PagedCache:
    """Room for keys and values of every attention of one rank's work.

    Attributes:
        slots: keys and values of each attention, (K, places, D); a place holds one token.
    """

    def __init__(self, kv_heads: list[int], blocks: int, head_dim: int, like: Tensor) -> None:
        self.kv_heads = kv_heads
        shape = 1, sum(kv_heads), blocks * BLOCK_TOKENS, head_dim
        self.keys, self.values = like.new_empty(shape), like.new_empty(shape)  # of all slots, one after the other
        self.slots = list(zip(self.keys[0].split(kv_heads), self.values[0].split(kv_heads), strict=True))

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return self.keys.nbytes + self.values.nbytes


class Layout:
    """Where the tokens of one pass are, in the stream and in the cache.

    Attributes:
        positions: of the tokens, each in its sequence.
        last: which tokens of the pass are the last of their rows.
    """

    def __init__(self, rows: Sequence[Row], cache: PagedCache) -> None:
        self.cache = cache
        device = cache.keys.device
        self.spans: list[_Span] = []
        positions, places, first = [], [], 0
        for row in rows:
            end = row.start + len(row.tokens)
            positions.append(slice(row.start, end))
            places += stretches(row.runs, row.start, end)
            self.spans.append(_Span(slice(first, first + len(row.tokens)), row, cache))
            first += len(row.tokens)
        self.positions = as_index(positions, device)
        self.places = as_index(places, device)
        self.last = [span.tokens.stop - 1 for span in self.spans]

    def attend(self, slot: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Put new keys and values, (T, K, D), into a slot; queries (T, H, D) to attended values (T, H * D)."""
        cached_keys, cached_values = self.cache.slots[slot]
        cached_keys[:, self.places] = keys.transpose(0, 1)
        cached_values[:, self.places] = values.transpose(0, 1)
        attended = [span.attend(slot, queries, keys, values, scale) for span in self.spans]
        return attended[0] if len(attended) == 1 else torch.cat(attended)


class _Span:
    """One sequence's share of a pass.

    Attributes:
        tokens: which of the pass's tokens these are.
    """

    def __init__(self, tokens: slice, row: Row, cache: PagedCache) -> None:
        self.tokens = tokens
        self._slots = cache.slots
        self._mask: Tensor | None = None
        self._views: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None
        self._index: Tensor | None = None
        count, device = len(row.tokens), cache.keys.device
        end = row.start + count
        if row.start == 0 and count > 1:
            return  # nothing is read but what the pass itself brings
        if count > 1:
            self._mask = torch.ones(count, end, dtype=torch.bool, device=device).tril(row.start)
        places = as_index(stretches(row.runs, 0, end), device)
        if isinstance(places, slice):
            views = cache.keys[:, :, places], cache.values[:, :, places]
            self._views = views[0].split(cache.kv_heads, 1), views[1].split(cache.kv_heads, 1)
        else:
            self._index = places

    def attend(self, slot: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Attended values of the own tokens, (tokens, H * D), given those of the whole pass."""
        _, heads, head_dim = queries.shape
        kv_heads = keys.shape[1]
        all_keys, all_values = self._read(slot, keys, values)
        own = queries[self.tokens]
        if len(own) == 1:
            # The heads of one KV group are like several tokens that may look at everything: no copies of keys.
            grouped = own.view(1, kv_heads, heads // kv_heads, head_dim)
            attended = F.scaled_dot_product_attention(grouped, all_keys, all_values, scale=scale)
        else:
            attended = F.scaled_dot_product_attention(
                own.transpose(0, 1)[None],
                all_keys,
                all_values,
                attn_mask=self._mask,
                is_causal=self._mask is None,
                scale=scale,
                enable_gqa=heads > kv_heads,
            ).transpose(1, 2)
        return attended.reshape(len(own), heads * head_dim)

    def _read(self, slot: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole sequence, (1, K, N, D) each."""
        if self._views is not None:
            return self._views[0][slot], self._views[1][slot]
        if self._index is not None:
            cached_keys, cached_values = self._slots[slot]
            return cached_keys.index_select(1, self._index)[None], cached_values.index_select(1, self._index)[None]
        return keys[self.tokens].transpose(0, 1)[None], values[self.tokens].transpose(0, 1)[None]


def stretches(runs: Sequence[Run], first: int, end: int) -> list[slice]:
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
