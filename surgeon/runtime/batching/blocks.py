"""Which blocks of a cache belong to which sequence: allocation, counted references, reuse of what prefixes share.

A cache for keys and values is cut into blocks of as many tokens each. A sequence's `BlockTable` lists its blocks in
order; a full block whose tokens have been computed can be read by every later sequence that begins with the same
tokens. Only full blocks are shared and nobody writes to them again, so nothing ever has to be copied.

Shared blocks are found by exact comparison: every one is numbered, and is known under the number of the block before
it and its own tokens. There are no hashes that could collide. A block that nobody uses stays known until its room is
needed; the least recently used go first, of one sequence the last before the first.

Where it can, the pool hands out consecutive blocks: a new sequence starts in the middle of the widest gap, so that it
and the one before it can both grow, and grows into the block behind its last one. The keys of such a sequence are a
view of the cache, and attention reads them where they lie. No tensors here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

BlockRun = tuple[int, int]  # first block, number of blocks

BLOCK_TOKENS = 16
_ROOT = 0  # what comes before a sequence's first block
_EVICTED_SHARE = 8  # one in so many known blocks goes at a time, because single ones would scatter a sequence


def blocks_for(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // block_tokens)


class BlockTable:
    """The blocks of one sequence, in the order of its tokens.

    Attributes:
        runs: the same as stretches of consecutive blocks.
        known: how many, from the first on, can be shared by others.
        last_known: the number of the last of these.
    """

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.runs: list[BlockRun] = []
        self.known = 0
        self.last_known = _ROOT

    def cut(self, length: int) -> list[int]:
        """Take off the blocks behind the first so many, which must not be shared ones; returns them."""
        assert self.known <= length, f"{length} blocks are to stay and {self.known} can be shared"
        kept, taken = self.blocks[:length], self.blocks[length:]
        self.blocks, self.runs = [], []
        self.extend(kept)
        return taken

    def extend(self, blocks: Sequence[int]) -> None:
        """Add blocks behind the last one."""
        for block in blocks:
            first, length = self.runs[-1] if self.runs else (-1, 0)
            if first + length == block and length:
                self.runs[-1] = first, length + 1
            else:
                self.runs.append((block, 1))
        self.blocks.extend(blocks)


class Gaps:
    """Stretches of blocks that hold nothing."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._end_of = {0: blocks} if blocks else {}
        self._start_of = {blocks: 0} if blocks else {}

    def give(self, block: int) -> None:
        """Put a block back."""
        self._add(self._remove_ending(block), self._remove_starting(block + 1))
        self.total += 1

    def take(self, start: int, length: int, offset: int = 0) -> list[int]:
        """Take blocks of the gap that starts at `start`, leaving out the first `offset` of it."""
        end = self._end_of.pop(start)
        del self._start_of[end]
        first = start + offset
        assert first + length <= end, f"{length} blocks from {first} on do not lie in the gap {start}..{end}"
        self._add(start, first)
        self._add(first + length, end)
        self.total -= length
        return list(range(first, first + length))

    def length_at(self, start: int) -> int:
        """The length of the gap that starts there, or 0."""
        return self._end_of.get(start, start) - start

    def widest(self) -> int:
        """Where the longest gap starts; there must be one."""
        return max(self._end_of, key=self.length_at)

    def _add(self, start: int, end: int) -> None:
        if start < end:
            self._end_of[start] = end
            self._start_of[end] = start

    def _remove_ending(self, end: int) -> int:
        """Where the gap started that ends there, which is taken out; `end` if there was none."""
        start = self._start_of.pop(end, None)
        if start is None:
            return end
        del self._end_of[start]
        return start

    def _remove_starting(self, start: int) -> int:
        end = self._end_of.pop(start, None)
        if end is None:
            return start
        del self._start_of[end]
        return end


class BlockPool:
    """All blocks of a cache.

    Attributes:
        blocks: how many there are.
        block_tokens: tokens of each.
        releases: how often blocks have been given back; while it stays the same, no more have become free.
    """

    def __init__(self, blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.releases = 0
        self._gaps = Gaps(blocks)
        self._users = [0] * blocks
        self._numbers = count(_ROOT + 1)
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}  # (number of the one before, tokens) to block
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}  # the same, backwards
        self._number: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known and not in use, the next to go first

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return self._gaps.total + len(self._idle)

    @property
    def idle(self) -> int:
        """Of these, the ones that a later sequence may still share."""
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return blocks_for(tokens, self.block_tokens)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Known blocks that begin a sequence like this one; at least its last token is left to compute."""
        size, found, number = self.block_tokens, [], _ROOT
        for start in range(0, (len(tokens) - 1) // size * size, size):
            block = self._known.get((number, tuple(tokens[start : start + size])))
            if block is None:
                break
            found.append(block)
            number = self._number[block]
        return found

    def open(self, shared: Sequence[int], new: int) -> BlockTable | None:
        """A table of shared blocks (as `match` gave them just now) and new ones; None if there are not enough free."""
        if new > self.free - sum(block in self._idle for block in shared):
            return None
        table = BlockTable()
        for block in shared:
            self._users[block] += 1
            self._idle.pop(block, None)
        table.extend(shared)
        table.known = len(shared)
        table.last_known = self._number[shared[-1]] if shared else _ROOT
        self.grow(table, new)
        return table

    def grow(self, table: BlockTable, new: int) -> None:
        """Add new blocks to a table; there must be as many free."""
        assert new <= self.free, f"{new} blocks are wanted and {self.free} are free"
        if new > self._gaps.total:
            self._evict(max(new - self._gaps.total, len(self._idle) // _EVICTED_SHARE))
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

    def shrink(self, table: BlockTable, length: int) -> None:
        """Give back what a table has behind its first so many blocks: room for tokens that did not come."""
        for block in reversed(table.cut(length) if length < len(table.blocks) else []):
            self._users[block] = 0
            self._gaps.give(block)
            self.releases += 1

    def _begin(self, new: int) -> list[int]:
        """Up to so many blocks in the widest gap; in its middle if a sequence before it may want to grow."""
        start = self._gaps.widest()
        room = self._gaps.length_at(start)
        if new >= room:
            return self._gaps.take(start, room)
        offset = (room - new) // 2 if start and self._users[start - 1] else 0
        return self._gaps.take(start, new, offset)

    def _evict(self, number: int) -> None:
        for _ in range(number):
            block, _ = self._idle.popitem(last=False)
            self._unlearn(block)
            self._gaps.give(block)

    def _unlearn(self, block: int) -> None:
        del self._known[self._key.pop(block)]
        del self._number[block]

    def learn(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Let others share the blocks of a sequence that the first `computed` tokens fill."""
        size = self.block_tokens
        while (table.known + 1) * size <= computed:
            start = table.known * size
            key = table.last_known, tuple(tokens[start : start + size])
            block = self._known.get(key)
            if block is None:
                block = table.blocks[table.known]
                self._known[key], self._key[block], self._number[block] = block, key, next(self._numbers)
            table.last_known = self._number[block]
            table.known += 1

    def forget(self, table: BlockTable) -> None:
        """Let no further sequence share the blocks of a table."""
        for block in table.blocks:
            if block in self._key:
                self._unlearn(block)

    def close(self, table: BlockTable) -> None:
        """Give back the blocks of a table, which is not to be used again."""
        self.releases += 1
        for block in reversed(table.blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._key:
                self._idle[block] = None
            else:
                self._gaps.give(block)
