"""The keys and values a rank keeps, in blocks, and attention over them for sequences of any lengths at once.

The tokens of one forward pass lie one after another, whichever sequences they belong to. All but attention treats
every token alike. In float32 on CPUs the kernels (runtime/kernels) read blocks where they lie, those of all sequences
that add one token in one call. Elsewhere attention goes through the sequences one by one, which on a CPU is faster than
padding them to one length: a sequence in one run of blocks is read where it lies, as a view; for one in several runs
they are gathered first, which costs about a fifth more time than a view (padding costs several times as much).

An attention with a window reads the window's keys only: for one more token of a sequence a shorter view. Attentions of
one window are a group of slots where that saves memory (plan/groups.py), and a sequence has blocks of its own in each
group. A block is as wide as the widest group: those of all groups lie in one tensor, and what a block holds depends on
whose it is.

Where k and v are two factors each, a slot may hold what the first ones give: fewer numbers, of which keys and values
are made whenever they are read. That takes two buffers, allocated once (DeInfer, section 4.2): runs of blocks are
copied into one side by side, unless there is only one run, and the second factors write to the other one what attention
reads then.

Shapes: T tokens of the pass, D head_dim, H heads and K KV heads of a slice, N tokens of a sequence so far, R the ranks
of k and v together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surgeon.runtime.batching.blocks import BlockRun
from surgeon.runtime.batching.sequence import Row
from surgeon.runtime.batching.windows import BLOCK_TOKENS, Windows
from surgeon.runtime.kernels.functions import Runs, TextKeys, kernels_for
from surgeon.runtime.model.ends import Index
from surgeon.runtime.model.layers import Angles, Rebuild, Weighting, attention


class Buffers:
    """Room for what an attention reads of a cache in rank space, and for the keys and values made of it.

    All attentions use the same two buffers, one after the other.
    """

    def __init__(self, rebuilds: Sequence[Rebuild], like: Tensor) -> None:
        """Start without any room."""
        self._kept_width = max((sum(one.ranks) for one in rebuilds), default=0)
        self._rebuilt_width = max((2 * one.width for one in rebuilds), default=0)
        self.kept = self.rebuilt = like.new_empty(0)

    @property
    def nbytes(self) -> int:
        """Memory of both."""
        return self.kept.nbytes + self.rebuilt.nbytes

    def reserve(self, tokens: int) -> None:
        """See that there is room for so many tokens; what has the buffers of before goes on having them."""
        if tokens * self._kept_width > self.kept.numel():
            self.kept = self.kept.new_empty(tokens * self._kept_width)
            self.rebuilt = self.rebuilt.new_empty(tokens * self._rebuilt_width)

    def for_kept(self, rebuild: Rebuild, tokens: int) -> Tensor:
        """Room for what is kept of so many tokens, (N, R)."""
        self.reserve(tokens)
        return self.kept[: tokens * sum(rebuild.ranks)].view(tokens, -1)

    def for_rebuilt(self, rebuild: Rebuild, tokens: int) -> Tensor:
        """Room for their keys and values, (2, N, K * D)."""
        self.reserve(tokens)
        return self.rebuilt[: 2 * tokens * rebuild.width].view(2, tokens, -1)


class PagedCache:
    """Room for keys and values of every attention of one rank's work, or for what these are rebuilt of.

    Attributes:
        kv_heads: of each attention.
        group_of: the group of each attention.
        windows: of the groups.
        stored: keys and behind them values of one attention of a group after the other, (1, 2 * sum of K, places, D); a
            place holds one token. Of attentions in rank space there are no heads in it.
        pairs: the part of each attention, (2 * K, places, D).
        slots: its keys and its values, (K, places, D).
        rebuilds: of attentions in rank space, by slot.
        low_rank: what is stored of these instead, (places, R), by slot.
        kernels: that attend over what is stored, and put it there, if they can.
        buffers: for reading that.
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
        self.rebuilds = rebuilds or {}
        self.device = like.device
        self.kernels = kernels_for(like)
        places = blocks * BLOCK_TOKENS
        stored = [0 if slot in self.rebuilds else heads for slot, heads in enumerate(kv_heads)]
        groups = [[slot for slot, own in enumerate(self.group_of) if own == group] for group in range(len(windows))]
        width = max(sum(2 * stored[slot] for slot in slots) for slots in groups)
        self.stored = like.new_empty(1, width, places, head_dim)
        self.pairs = list[Tensor]([self.stored[0, :0]] * len(kv_heads))
        self.places_in_group = [0] * len(kv_heads)
        for slots in groups:
            sizes = [2 * stored[slot] for slot in slots]
            for place, (slot, pair) in enumerate(zip(slots, self.stored[0, : sum(sizes)].split(sizes), strict=True)):
                self.pairs[slot], self.places_in_group[slot] = pair, place
        self.slots = [pair.chunk(2) for pair in self.pairs]
        self.halves = [[stored[slot] for slot in slots for _ in range(2)] for slots in groups]
        self.low_rank = {slot: like.new_empty(places, sum(one.ranks)) for slot, one in self.rebuilds.items()}
        self.buffers = Buffers(list(self.rebuilds.values()), like)

    @property
    def tokens(self) -> int:
        """How many it has places for."""
        return self.stored.shape[2]

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return self.stored.nbytes + sum(slot.nbytes for slot in self.low_rank.values())

    def rebuild(self, slot: int, kept: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor]:
        """Keys and values, (N, K, D) each, of what is kept of N tokens, (N, R); they last until the next ones.

        Args:
            angles: of the tokens' positions, if there are rotary ones.
        """
        rebuild = self.rebuilds[slot]
        return rebuild(kept, angles, self.buffers.for_rebuilt(rebuild, len(kept)))


class PagedLayout:
    """Where the tokens of one pass are, in the stream and in the cache.

    Attributes:
        positions: of the tokens, each in its sequence.
    """

    def __init__(self, rows: Sequence[Row], cache: PagedCache, angles: Angles | None = None) -> None:
        """Find the places.

        Args:
            angles: of all positions up to the last one, if there are rotary ones.
        """
        self.cache = cache
        self._parts: list[_Singles | _Chunk] = []
        positions, first = [], 0
        places: list[list[slice]] = [[] for _ in cache.windows]
        for row in rows:
            end = row.start + len(row.tokens)
            positions.append(slice(row.start, end))
            for found, runs in zip(places, row.runs, strict=True):
                found.extend(stretches(runs, row.start, end))
            if len(row.tokens) > 1:
                self._parts.append(_Chunk(first, row, cache, angles))
            elif self._parts and isinstance(self._parts[-1], _Singles):
                self._parts[-1].add(row)
            else:
                self._parts.append(_Singles(first, row, cache, angles))
            first += len(row.tokens)
        self.positions = as_index(positions, cache.device)
        self.places = [as_index(found, cache.device) for found in places]
        self._numbers = [numbers_of(place) for place in self.places] if cache.kernels is not None else []

    def attend(self, slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
        """Put new keys and values into a slot; queries (T, H, D) to attended values (T, H * D).

        Args:
            kept: keys and, behind them, values, (T, 2 * K, D), or what they are rebuilt of, (T, R).
        """
        self._keep(slot, kept)
        attended = [part.attend(slot, queries, kept, weighting) for part in self._parts]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _keep(self, slot: int, kept: Tensor) -> None:
        """Put what is new into its places."""
        cache, group = self.cache, self.cache.group_of[slot]
        if slot in cache.rebuilds:
            cache.low_rank[slot][self.places[group]] = kept
        elif cache.kernels is not None:
            cache.kernels.keep(kept, self._numbers[group], cache.pairs[slot])
        else:
            cache.pairs[slot][:, self.places[group]] = kept.transpose(0, 1)


class _Singles:
    """Rows of a pass, one after another, that have one token each: texts that are being continued."""

    def __init__(self, first: int, row: Row, cache: PagedCache, angles: Angles | None) -> None:
        self._first = first
        self._sequences = [_Cached(row, cache, angles)]
        self._cache = cache
        self._angles = angles
        self._runs: dict[tuple[int, int | None], Runs] = {}

    def add(self, row: Row) -> None:
        """Take in the row behind."""
        self._sequences.append(_Cached(row, self._cache, self._angles))

    def attend(self, slot: int, queries: Tensor, _: Tensor, weighting: Weighting) -> Tensor:
        """Attended values of these rows, (rows, H * D), given queries of the whole pass and what it keeps."""
        heads, head_dim, kv_heads = queries.shape[1], queries.shape[2], self._cache.kv_heads[slot]
        count = len(self._sequences)
        own = queries[self._first : self._first + count]
        if self._cache.kernels is not None and slot not in self._cache.rebuilds:
            read = self._read(self._cache.group_of[slot], weighting.window)
            return self._cache.kernels.attend(own, self._cache.pairs[slot], read, weighting.scale, weighting.softcap)
        # The heads of one KV group are like several tokens that may look at everything: no copies of keys.
        grouped = own.view(count, 1, kv_heads, heads // kv_heads, head_dim).unbind()
        attended = [
            attention(query, *sequence.read(slot, weighting.window), weighting)
            for query, sequence in zip(grouped, self._sequences, strict=True)
        ]
        together = attended[0] if count == 1 else torch.cat(attended)
        return together.reshape(count, heads * head_dim)

    def _read(self, group: int, window: int | None) -> Runs:
        """Where attentions of a group with such a window read."""
        key = group, window
        if key not in self._runs:
            runs, ends = runs_of([sequence.row for sequence in self._sequences], group, window)
            self._runs[key] = Runs(torch.tensor(runs), torch.tensor(ends))
        return self._runs[key]


class _Chunk:
    """A row of several tokens: a prompt, or a part of one."""

    def __init__(self, first: int, row: Row, cache: PagedCache, angles: Angles | None) -> None:
        self._tokens = len(row.tokens)
        self._end = row.start + self._tokens
        self._own = slice(first, first + self._tokens)
        self._cache = cache
        self._angles = angles
        self._whole = not row.start  # a whole prompt: all that is read comes with the pass itself
        self._cached = _Cached(row, cache, angles)
        self._texts: dict[tuple[int, int | None], TextKeys] = {}
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
        """Attended values of this row, (tokens, H * D), given queries of the whole pass and what it keeps."""
        own, window = self._own, weighting.window
        if window is not None and window >= self._end:
            window = None
        if self._cache.kernels is not None and slot not in self._cache.rebuilds:
            text = self._text(self._cache.group_of[slot], window)
            return self._cache.kernels.attend_text(
                queries[own], self._cache.pairs[slot], text, weighting.scale, weighting.softcap
            )
        if self._whole:
            all_keys, all_values = self._fresh(slot, kept[own])
        else:
            # The first of these tokens looks back the furthest.
            all_keys, all_values = self._cached.read(slot, None if window is None else window + self._tokens - 1)
        causal = self._whole and window is None
        mask = None if causal else self._mask(all_keys.shape[2], window)
        attended = attention(queries[own].transpose(0, 1)[None], all_keys, all_values, weighting, mask, causal)
        return attended.transpose(1, 2).flatten(2)[0]

    def _text(self, group: int, window: int | None) -> TextKeys:
        """What attentions of a group with such a window read."""
        key = group, window
        if key not in self._texts:
            last = None if window is None else window + self._tokens - 1
            first_key, runs = self._cached.stretches(group, last)
            self._texts[key] = TextKeys(as_runs(runs), first_key, self._end - self._tokens, window)
        return self._texts[key]

    def _fresh(self, slot: int, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, (1, K, tokens, D) each, of a whole prompt."""
        if slot in self._cache.rebuilds:
            return by_head(self._cache.rebuild(slot, kept, angles_at(self._angles, slice(0, self._end))))
        keys, values = kept.transpose(0, 1)[None].chunk(2, 1)
        return keys, values

    def _mask(self, keys: int, window: int | None) -> Tensor:
        """Which of the last so many tokens up to the row's end each token of the row looks at, (tokens, keys)."""
        if window not in self._masks:
            before = keys - self._tokens
            seen = torch.ones(self._tokens, keys, dtype=torch.bool, device=self._cache.device).tril(before)
            self._masks[window] = seen if window is None else seen.triu(before - window + 1)
        return self._masks[window]


class _Cached:
    """The keys and values of one sequence up to the end of its row."""

    def __init__(self, row: Row, cache: PagedCache, angles: Angles | None) -> None:
        self.row = row
        self._end = row.start + len(row.tokens)
        self._cache = cache
        self._angles = angles
        self._found: dict[tuple[int, int], Sequence[Tensor] | Tensor] = {}

    def read(self, slot: int, last: int | None) -> tuple[Tensor, Tensor]:
        """Those of a slot, (1, K, N, D) each: views where they lie in one run of blocks, copies otherwise.

        Where they have to be rebuilt they last until the next ones.

        Args:
            last: how many of them, from the end; None for all.
        """
        first = self._first(last)
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

    def stretches(self, group: int, last: int | None) -> tuple[int, list[slice]]:
        """The first of the last so many of them, or of all, and where these lie in the places of a group."""
        first = self._first(last)
        return first, stretches(self.row.runs[group], first, self._end)

    def _first(self, last: int | None) -> int:
        return 0 if last is None else max(0, self._end - last)

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


def runs_of(rows: Sequence[Row], group: int, window: int | None) -> tuple[list[tuple[int, int]], list[int]]:
    """Where the last token of each row looks, in a group of the cache, with such a window or without one.

    Returns:
        First place and number of places of each run, and how many runs there are up to the end of each row.
    """
    runs, ends = list[tuple[int, int]](), list[int]()
    for row in rows:
        end = row.start + len(row.tokens)
        parts = stretches(row.runs[group], 0 if window is None else max(0, end - window), end)
        runs += [(part.start, part.stop - part.start) for part in parts]
        ends.append(len(runs))
    return runs, ends


def by_head(keys_values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence by token, (N, K, D), as (1, K, N, D)."""
    keys, values = keys_values
    return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def angles_at(angles: Angles | None, positions: Index) -> Angles | None:
    """The angles of some positions."""
    if angles is None:
        return None
    kernels = kernels_for(angles[0])
    if kernels is None or isinstance(positions, slice):
        return angles[0][positions], angles[1][positions]
    cosine, sine = (kernels.rows(angle.flatten(1), positions)[:, None] for angle in angles)
    return cosine, sine


def as_index(parts: Sequence[slice], device: torch.device) -> Index:
    """What indexes all of these, one after the other: a slice (whose result is a view) where there is one only."""
    if len(parts) == 1:
        return parts[0]
    places = [place for part in parts for place in range(part.start, part.stop)]
    return torch.tensor(places, dtype=torch.long, device=device)


def as_runs(parts: Sequence[slice]) -> Tensor:
    """First place and number of places of each of these, (parts, 2)."""
    return torch.tensor([(part.start, part.stop - part.start) for part in parts])


def numbers_of(index: Index) -> Tensor:
    """The numbers that an index stands for."""
    return torch.arange(index.start, index.stop) if isinstance(index, slice) else index
