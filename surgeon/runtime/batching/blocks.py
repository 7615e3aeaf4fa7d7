"""Blocks of a cache and the sequences that they belong to: allocation, counted references, shared prefixes.

A sequence's `BlockTable` lists its blocks in order; a full, computed block can be read by every later sequence that
begins with the same tokens, and is never written again. A block that nobody uses stays known until its room is needed;
the least recently used go first, of one sequence the last before the first.

Attentions that look back through windows of different sizes are groups, and a sequence has a table for each; all take
their blocks from one pool, and give back those that no window reaches any more. A sequence shares a prefix where every
group knows what the next token looks at: of one with a window the last blocks.

Where it can, the pool hands out consecutive blocks: a new sequence starts in the middle of the widest gap, so that it
and the one before it can both grow. The keys of such a sequence are a view of the cache.

How many blocks texts hold is counted here as well. A group without a window (None) keeps all of a text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

BLOCK_TOKENS = 16
# Of prompts, that are computed in one pass. A GPU needs more of them until its products take longer than its launches.
PASS_TOKENS = {"cpu": 512, "cuda": 2048}

Windows = tuple[int | None, ...]  # by group: how many tokens a token looks at, itself the last of them


def blocks_for(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Count the blocks of so many tokens."""
    return -(-tokens // block_tokens)


def first_block(computed: int, window: int | None, block_tokens: int = BLOCK_TOKENS) -> int:
    """The first block that a text still needs when so many of its tokens are in the cache."""
    if window is None:
        return 0
    return max(0, computed - window + 1) // block_tokens


def most_held(tokens: int, window: int | None, block_tokens: int = BLOCK_TOKENS) -> int:
    """The most blocks of one group that a text holds at a time until it has so many tokens, one more in each pass."""
    whole = blocks_for(tokens, block_tokens)
    if window is None:
        return whole
    return min(whole, blocks_for(window - 1, block_tokens) + 1)


def text_blocks(tokens: int, windows: Windows, block_tokens: int = BLOCK_TOKENS) -> int:
    """The most blocks of all groups together."""
    return sum(most_held(tokens, window, block_tokens) for window in windows)


def pass_blocks(tokens: int, windows: Windows, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks that a pass over so many tokens of prompts needs beyond that, until it has ended."""
    return blocks_for(tokens, block_tokens) * sum(window is not None for window in windows)


def longest_text(blocks: int, windows: Windows, limit: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """The most tokens, up to a limit, of a text that has so many blocks for itself."""
    low = 0
    high = limit + 1
    while low < high - 1:
        middle = (low + high) // 2
        if text_blocks(middle, windows, block_tokens) <= blocks:
            low = middle
        else:
            high = middle
    return low


def power_of_two(least: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (least - 1).bit_length()


# The beginning without tokens; numbers below are others of that kind, whose texts share nothing with its.
ROOT = 0


class KnownPrefixes:
    """Beginnings of texts in whole blocks, each known under a number as long as somebody holds it.

    A beginning is found by exact comparison, without hashes that could collide: by the number of the one that is a
    block shorter, which it holds, and its last block's tokens.
    """

    def __init__(self) -> None:
        self._numbers = count(ROOT + 1)
        self._found: dict[tuple[int, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # the same, backwards
        self._holds: dict[int, int] = {}

    def find(self, before: int, tokens: tuple[int, ...]) -> int | None:
        """Find what goes on from a beginning with a block of these tokens; None if it is not known."""
        return self._found.get((before, tokens))

    def add(self, before: int, tokens: tuple[int, ...]) -> int:
        """Find it or make it known; it must be held before anything is let go."""
        key = before, tokens
        number = self._found.get(key)
        if number is None:
            number = next(self._numbers)
            self._found[key] = number
            self._keys[number] = key
            self._holds[number] = 0
            self.hold(before)
        return number

    def hold(self, number: int) -> None:
        """Keep it known until it is let go as often as it was held."""
        if number > ROOT:
            self._holds[number] += 1

    def let_go(self, number: int) -> None:
        """Undo one `hold`; what nobody holds any more is forgotten, and with it what only this held."""
        while number > ROOT:
            self._holds[number] -= 1
            if self._holds[number]:
                return
            key = self._keys.pop(number)
            del self._found[key], self._holds[number]
            number = key[0]

    def path(self, number: int) -> Iterator[int]:
        """A beginning and all shorter ones, from the longest on, but the one without tokens."""
        while number > ROOT:
            yield number
            number, _ = self._keys[number]


BlockRun = tuple[int, int]  # first block, number of blocks

GONE = -1  # in place of the first block: so many blocks were given back, and nobody reads there
# One in so many known blocks goes at a time, because single ones would scatter a sequence.
_EVICTED_SHARE = 8


class BlockTable:
    """The blocks of one sequence in one group, in the order of its tokens.

    Attributes:
        gone: how many were given back, from the first on; blocks: those behind them.
        runs: all of them as stretches of consecutive blocks; those that are `GONE` are the first one.
    """

    def __init__(self, gone: int = 0) -> None:
        self.gone = gone
        self.blocks: list[int] = []
        self.runs: list[BlockRun] = [(GONE, gone)] if gone else []

    @property
    def length(self) -> int:
        """Count the blocks of all tokens, those that are gone among them."""
        return self.gone + len(self.blocks)

    def cut(self, length: int) -> list[int]:
        """Take off and return the blocks behind the first so many."""
        kept = max(0, length - self.gone)
        return self._keep(self.gone, self.blocks[:kept], self.blocks[kept:])

    def leave(self, gone: int) -> list[int]:
        """Take off and return the blocks before the one of this number."""
        return self._keep(gone, self.blocks[gone - self.gone :], self.blocks[: gone - self.gone])

    def _keep(self, gone: int, kept: list[int], taken: list[int]) -> list[int]:
        self.gone = gone
        self.blocks = []
        self.runs = [(GONE, gone)] if gone else []
        self.extend(kept)
        return taken

    def extend(self, blocks: Sequence[int]) -> None:
        """Add blocks behind the last one."""
        for block in blocks:
            first, length = self.runs[-1] if self.runs else (GONE, 0)
            if first != GONE and first + length == block:
                self.runs[-1] = first, length + 1
            else:
                self.runs.append((block, 1))
        self.blocks.extend(blocks)


class SequenceBlocks:
    """The blocks of one sequence.

    Attributes:
        tables: by group.
        known: how many blocks' tokens, from the first on, are known to others, as prefix `number`.
    """

    def __init__(self, tables: Sequence[BlockTable] = (), known: int = 0, number: int = ROOT) -> None:
        self.tables = tuple(tables)
        self.known = known
        self.number = number

    @property
    def runs(self) -> tuple[list[BlockRun], ...]:
        """Runs of blocks of every table."""
        return tuple(table.runs for table in self.tables)


class Prefix(NamedTuple):
    """A beginning of so many blocks that a sequence can share.

    Attributes:
        shared: the last of them, by group: all that the sequence will look at.
    """

    blocks: int
    number: int
    shared: tuple[list[int], ...]


class Gaps:
    """Stretches of blocks that hold nothing."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._end_of = {0: blocks} if blocks else {}
        self._start_of = {blocks: 0} if blocks else {}

    def give(self, block: int) -> None:
        """Put a block back; it joins the gaps that end and begin there."""
        start = self._start_of.pop(block, block)
        end = self._end_of.pop(block + 1, block + 1)
        self._end_of.pop(start, None)
        self._start_of.pop(end, None)
        self._add(start, end)
        self.total += 1

    def take(self, start: int, length: int, offset: int = 0) -> list[int]:
        """Take blocks of the gap that starts at `start`, leaving out the first `offset` of it."""
        end = self._end_of.pop(start)
        del self._start_of[end]
        first = start + offset
        assert first + length <= end, (
            f"{length} blocks from {first} on do not lie in the gap {start}..{end}"
        )
        self._add(start, first)
        self._add(first + length, end)
        self.total -= length
        return list(range(first, first + length))

    def length_at(self, start: int) -> int:
        """The length of the gap that starts there, or 0."""
        return self._end_of.get(start, start) - start

    def widest(self) -> int:
        """The start of the longest gap; there must be one."""
        return max(self._end_of, key=self.length_at)

    def _add(self, start: int, end: int) -> None:
        if start < end:
            self._end_of[start] = end
            self._start_of[end] = start


class BlockPool:
    """All blocks of a cache.

    Attributes:
        windows: of the groups.
        releases: how often blocks have been given back; while it stays the same, no more have become free.
    """

    def __init__(
        self, blocks: int, block_tokens: int = BLOCK_TOKENS, windows: Windows = (None,)
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.windows = windows
        self.releases = 0
        self._gaps = Gaps(blocks)
        self._users = [0] * blocks
        self._prefixes = KnownPrefixes()
        self._known: dict[tuple[int, int], int] = {}  # (group, number of a prefix) to its last block
        self._key: dict[int, tuple[int, int]] = {}  # the same, backwards
        self._idle: OrderedDict[int, None] = OrderedDict()  # known and not in use, the next to go first

    @property
    def free(self) -> int:
        """Count the blocks that nobody uses."""
        return self._gaps.total + len(self._idle)

    def match(self, tokens: Sequence[int], most: int | None = None, root: int = ROOT) -> Prefix:
        """Find the prefix that a sequence can share, of `most` blocks; at least its last token is left to compute.

        Sequences with a root below ROOT share among themselves only.
        """
        size = self.block_tokens
        path = []
        number = root
        end = (len(tokens) - 1) // size
        for block in range(end if most is None else min(end, most)):
            found = self._prefixes.find(number, tuple(tokens[block * size : (block + 1) * size]))
            if found is None:
                break
            path.append(number := found)
        lengths = [self._shareable(group, path) for group in range(len(self.windows))]
        length = max(set.intersection(*lengths))
        shared = tuple(
            [self._known[group, one] for one in path[first_block(length * size, window, size) : length]]
            for group, window in enumerate(self.windows)
        )
        return Prefix(length, path[length - 1] if length else root, shared)

    def _shareable(self, group: int, path: Sequence[int]) -> set[int]:
        """Count a path's blocks that a sequence can share, as far as one group goes."""
        size = self.block_tokens
        window = self.windows[group]
        in_a_row = 0
        found = {0}
        for length, number in enumerate(path, start=1):
            in_a_row = in_a_row + 1 if (group, number) in self._known else 0
            if in_a_row >= length - first_block(length * size, window, size):
                found.add(length)
        return found

    def open(self, prefix: Prefix) -> SequenceBlocks:
        """Open the blocks of a sequence that shares a prefix, as `match` gave it just now."""
        tables = [BlockTable(prefix.blocks - len(blocks)) for blocks in prefix.shared]
        for table, blocks in zip(tables, prefix.shared, strict=True):
            for block in blocks:
                self._users[block] += 1
                self._idle.pop(block, None)
            table.extend(blocks)
        self._prefixes.hold(prefix.number)
        return SequenceBlocks(tables, prefix.blocks, prefix.number)

    def count_lacking(self, own: SequenceBlocks, end: int, whole: int = 0) -> int:
        """Count the blocks that a sequence lacks for its tokens up to `end`."""
        return sum(max(0, length) for length in self._missing_blocks(own, end, whole))

    def _missing_blocks(self, own: SequenceBlocks, end: int, whole: int) -> list[int]:
        ends = [max(end, whole) if window is None else end for window in self.windows]
        needed = (blocks_for(end, self.block_tokens) for end in ends)
        return [count - table.length for count, table in zip(needed, own.tables, strict=True)]

    def still_to_come(self, own: SequenceBlocks, tokens: int) -> int:
        """Count the blocks that a sequence will take besides those it has, at most, until it has so many tokens."""
        most = (most_held(tokens, window, self.block_tokens) for window in self.windows)
        return sum(
            max(0, all_ - len(table.blocks)) for all_, table in zip(most, own.tables, strict=True)
        )

    def reach(
        self, own: SequenceBlocks, begin: int, end: int, whole: int = 0, free: int | None = None
    ) -> int:
        """Find the token, from `begin` to `end`, up to which there are blocks for a sequence, its own and free ones."""
        free = self.free if free is None else free
        while end > begin and self.count_lacking(own, end, whole) > free:
            end = max(begin, (end - 1) // self.block_tokens * self.block_tokens)
        return end

    def grow(self, own: SequenceBlocks, end: int, whole: int = 0) -> None:
        """Give a sequence the blocks that it lacks (`count_lacking`); there must be as many free."""
        for table, missing in zip(own.tables, self._missing_blocks(own, end, whole), strict=True):
            new = max(0, missing)
            assert new <= self.free, f"{new} blocks are wanted and {self.free} are free"
            if new > self._gaps.total:
                for _ in range(max(new - self._gaps.total, len(self._idle) // _EVICTED_SHARE)):
                    block, _ = self._idle.popitem(last=False)
                    self._unlearn(block)
                    self._gaps.give(block)
            while new:
                behind = table.blocks[-1] + 1 if table.blocks else -1
                if room := self._gaps.length_at(behind):
                    taken = self._gaps.take(behind, min(new, room))
                else:
                    taken = self._begin(new)
                for block in taken:
                    self._users[block] = 1
                table.extend(taken)
                new -= len(taken)

    def shrink(self, own: SequenceBlocks, tokens: int) -> None:
        """Give back a sequence's blocks behind its first so many tokens: room for some that did not come."""
        length = blocks_for(tokens, self.block_tokens)
        assert own.known <= length, f"{length} blocks are to stay and {own.known} are known"
        for table in own.tables:
            if length < table.length:
                self._give_back(table.cut(length))

    def leave_behind(self, own: SequenceBlocks, computed: int) -> None:
        """Give back what no window reaches when so many tokens have been computed, and made known."""
        for table, window in zip(own.tables, self.windows, strict=True):
            first = first_block(computed, window, self.block_tokens)
            if first > table.gone:
                self._give_back(reversed(table.leave(first)))  # later ones are shared further on

    def _give_back(self, blocks: Iterable[int]) -> None:
        """Take blocks from one who used them; the last ones are the first to go."""
        self.releases += 1
        for block in reversed(list(blocks)):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._key:
                self._idle[block] = None
            else:
                self._gaps.give(block)

    def _begin(self, new: int) -> list[int]:
        """Take up to so many blocks in the widest gap; in its middle if a sequence before it may want to grow."""
        start = self._gaps.widest()
        room = self._gaps.length_at(start)
        if new >= room:
            return self._gaps.take(start, room)
        offset = (room - new) // 2 if start and self._users[start - 1] else 0
        return self._gaps.take(start, new, offset)

    def _unlearn(self, block: int) -> None:
        key = self._key.pop(block)
        del self._known[key]
        self._prefixes.let_go(key[1])

    def learn(self, own: SequenceBlocks, tokens: Sequence[int], computed: int) -> None:
        """Let others share the blocks of a sequence that the first `computed` tokens fill."""
        size = self.block_tokens
        while (own.known + 1) * size <= computed:
            start = own.known * size
            number = self._prefixes.add(own.number, tuple(tokens[start : start + size]))
            self._prefixes.hold(number)
            for group, table in enumerate(own.tables):
                if (group, number) not in self._known:
                    block = table.blocks[own.known - table.gone]
                    self._known[group, number] = block
                    self._key[block] = (group, number)
                    self._prefixes.hold(number)
            self._prefixes.let_go(own.number)
            own.number = number
            own.known += 1

    def forget(self, own: SequenceBlocks) -> None:
        """Let no further sequence share what one has shared or made known, those it has given back among them."""
        for number in list(self._prefixes.path(own.number)):
            for group in range(len(self.windows)):
                block = self._known.get((group, number))
                if block is None:
                    continue
                self._unlearn(block)
                if not self._users[block]:
                    del self._idle[block]
                    self._gaps.give(block)

    def close(self, own: SequenceBlocks) -> None:
        """Give back all blocks of a sequence, which is not to use them again."""
        for table in own.tables:
            self._give_back(table.blocks)
        self._prefixes.let_go(own.number)
        own.tables = ()
        own.known = 0
        own.number = ROOT
