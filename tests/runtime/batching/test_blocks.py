"""Allocation of cache blocks: who may share what, where new ones lie, and that none is lost or given twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from surgeon.runtime.batching.blocks import GONE, BlockPool, Gaps, SequenceBlocks


def opened(pool: BlockPool, tokens: list[int]) -> SequenceBlocks:
    """A sequence that has been let in and computed to the end."""
    held = pool.open(pool.match(tokens))
    pool.grow(held, len(tokens))
    pool.learn(held, tokens, len(tokens))
    pool.leave_behind(held, len(tokens))
    return held


def empty(pool: BlockPool, blocks: int) -> SequenceBlocks:
    """A sequence that has room for so many blocks of tokens."""
    held = pool.open(pool.match([0]))
    pool.grow(held, blocks * pool.block_tokens)
    return held


def own(held: SequenceBlocks) -> list[int]:
    return held.tables[0].blocks


def shared(pool: BlockPool, tokens: list[int]) -> list[int]:
    return pool.match(tokens).shared[0]


def test_a_sequence_grows_in_one_run_beside_others() -> None:
    pool = BlockPool(64, 4)
    held = [opened(pool, [number] * 8) for number in range(4)]
    for length in range(3, 8):
        for one in held:
            pool.grow(one, 4 * length)
    assert [len(one.tables[0].runs) for one in held] == [1] * 4
    assert pool.free == 64 - 4 * 7


def test_where_nothing_consecutive_is_left_runs_are_several() -> None:
    pool = BlockPool(6, 4)
    held = [opened(pool, [number] * 4) for number in range(6)]
    for one in sorted(held, key=own)[::2]:
        pool.close(one)
    one = empty(pool, 3)
    assert sorted(own(one)) == [0, 2, 4]
    assert len(one.tables[0].runs) == 3


def test_full_blocks_are_shared_up_to_the_last_token() -> None:
    pool = BlockPool(16, 4)
    tokens = list(range(10))
    first = opened(pool, tokens)
    assert shared(pool, tokens) == own(first)[:2]
    assert pool.match(tokens).blocks == 2
    assert pool.match(tokens, 1).shared == (own(first)[:1],)
    assert shared(pool, tokens[:8]) == own(first)[:1]  # the last token has to be computed by somebody
    assert shared(pool, tokens[:9]) == own(first)[:2]
    assert shared(pool, [0, 1, 2, 9, *tokens[4:]]) == []
    assert shared(pool, [*tokens[:4], 9, *tokens[5:]]) == own(first)[:1]
    assert shared(pool, tokens[4:]) == []  # the same tokens at another place are not the same block
    second = opened(pool, tokens)
    assert own(second)[:2] == own(first)[:2]
    assert pool.free == 16 - 4


def test_blocks_are_shared_only_once_they_are_computed() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(12))
    held = empty(pool, 3)
    pool.learn(held, tokens, 7)
    assert shared(pool, tokens) == own(held)[:1]
    pool.learn(held, tokens, 12)
    assert shared(pool, [*tokens, 0]) == own(held)


def test_two_who_compute_the_same_keep_one_chain() -> None:
    pool = BlockPool(16, 4)
    tokens = list(range(9))
    first, second = empty(pool, 3), empty(pool, 3)
    pool.learn(first, tokens, 4)
    pool.learn(second, tokens, 8)  # its second block follows the first one's first
    assert shared(pool, tokens) == [own(first)[0], own(second)[1]]
    pool.close(second)
    assert pool.free == 16 - 3
    assert len(pool._idle) == 1
    pool.close(first)
    assert (pool.free, len(pool._idle)) == (16, 2)


def test_the_least_recently_used_go_first_and_the_end_before_the_beginning() -> None:
    pool = BlockPool(6, 4)
    old, new = list(range(8)), list(range(10, 18))
    for tokens in (old, new):
        pool.close(opened(pool, tokens))
    assert (pool.free, len(pool._idle)) == (6, 4)
    empty(pool, 3)  # two empty ones and one more
    assert shared(pool, [*old, 0]) == shared(pool, old[:5])
    assert len(shared(pool, old)) == 1
    assert len(shared(pool, [*new, 0])) == 2
    empty(pool, 1)
    assert shared(pool, old) == []
    assert len(shared(pool, [*new, 0])) == 2


def test_what_is_forgotten_is_shared_with_nobody_new() -> None:
    pool = BlockPool(6, 4)
    tokens = list(range(9))
    first = empty(pool, 3)
    pool.learn(first, tokens, 9)
    second = opened(pool, tokens)
    pool.forget(second)
    pool.close(second)
    assert (shared(pool, tokens), pool.free, len(pool._idle)) == ([], 3, 0)
    pool.close(first)
    assert (pool.free, len(pool._idle)) == (6, 0)


def test_what_a_window_has_left_is_forgotten_too() -> None:
    pool = BlockPool(6, 4, (2,))
    tokens = list(range(12))
    held = opened(pool, tokens)
    assert (held.tables[0].gone, len(pool._idle)) == (2, 2)
    pool.forget(held)
    assert (pool.free, len(pool._idle)) == (5, 0)
    pool.close(held)
    assert pool.match([*tokens, 0]).blocks == 0
    assert (pool.free, len(pool._idle), len(pool._prefixes._keys)) == (6, 0, 0)


def test_used_again_means_recently_used() -> None:
    pool = BlockPool(4, 4)
    old, new = list(range(5)), list(range(10, 15))
    for tokens in (old, new, old):
        pool.close(opened(pool, tokens))
    empty(pool, 3)
    assert len(shared(pool, old)) == 1
    assert shared(pool, new) == []


def test_how_far_free_blocks_reach() -> None:
    pool = BlockPool(4, 4)
    tokens = list(range(9))
    pool.close(opened(pool, tokens))
    held = pool.open(pool.match(tokens))  # the two known ones are among the four that are free
    assert (pool.free, pool.count_lacking(held, 17)) == (2, 3)
    assert pool.reach(held, 8, 17) == 16
    assert pool.reach(held, 8, 13) == 13
    assert pool.reach(held, 8, 13, whole=17) == 8
    pool.grow(held, 16)
    assert pool.free == 0


def test_a_window_shares_the_last_blocks_of_a_prefix() -> None:
    """Of 24 tokens a window of 6 looks at two blocks before the next token; the blocks before these may be lost."""
    pool = BlockPool(8, 4, (6,))
    tokens = list(range(24))
    held = opened(pool, [*tokens, 0])
    assert (held.tables[0].gone, len(own(held)), len(pool._idle)) == (5, 2, 5)
    pool.close(held)
    empty(pool, 6)  # two empty ones, and the first four known ones
    found = pool.match([*tokens, 1])
    assert (found.blocks, len(found.shared[0])) == (6, 2)
    sharer = pool.open(found)
    assert sharer.tables[0].runs[0] == (GONE, 4)
    assert pool.match(tokens[:17]).blocks == 0  # its last block is there, the one before is not


def test_groups_share_what_all_of_them_know() -> None:
    pool = BlockPool(16, 4, (None, 5))
    tokens = list(range(16))
    held = opened(pool, [*tokens, 0])
    assert [len(table.blocks) for table in held.tables] == [5, 2]
    found = pool.match([*tokens, 1])
    assert [len(blocks) for blocks in found.shared] == [4, 1]


@given(st.lists(st.integers(0, 11), max_size=40))
def test_gaps_are_the_free_blocks_merged(blocks: list[int]) -> None:
    """Every block is taken if it is free and given back if it is not, against a plain set."""
    gaps, free = Gaps(12), set(range(12))
    for block in blocks:
        if block in free:
            start = max(first for first in range(block + 1) if gaps.length_at(first))
            assert gaps.take(start, 1, block - start) == [block]
            free.remove(block)
        else:
            gaps.give(block)
            free.add(block)
        starts = {first for first in free if first - 1 not in free}
        lengths = {first: next(n for n in range(1, 14) if first + n not in free) for first in starts}
        assert {first: gaps.length_at(first) for first in range(12) if gaps.length_at(first)} == lengths
        assert gaps.total == len(free)
        if free:
            assert gaps.length_at(gaps.widest()) == max(lengths.values())
