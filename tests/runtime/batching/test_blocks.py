"""Allocation of cache blocks: who may share what, where new ones lie, and that none is lost or given twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from surgeon.runtime.batching.blocks import BlockPool, BlockTable, Gaps


def opened(pool: BlockPool, tokens: list[int]) -> BlockTable:
    """A sequence that has been let in and computed to the end."""
    shared = pool.match(tokens)
    table = pool.open(shared, pool.blocks_for(len(tokens)) - len(shared))
    assert table is not None
    pool.learn(table, tokens, len(tokens))
    return table


def test_a_sequence_grows_in_one_run_beside_others() -> None:
    pool = BlockPool(64, 4)
    tables = [opened(pool, [number] * 8) for number in range(4)]
    for _ in range(5):
        for table in tables:
            pool.grow(table, 1)
    assert [len(table.runs) for table in tables] == [1] * 4
    assert pool.free == 64 - 4 * 7


def test_where_nothing_consecutive_is_left_runs_are_several() -> None:
    pool = BlockPool(6, 4)
    tables = [opened(pool, [number] * 4) for number in range(6)]
    for table in sorted(tables, key=lambda table: table.blocks)[::2]:
        pool.close(table)
    table = pool.open([], 3)
    assert table is not None
    assert sorted(table.blocks) == [0, 2, 4]
    assert len(table.runs) == 3


def test_full_blocks_are_shared_up_to_the_last_token() -> None:
    pool = BlockPool(16, 4)
    tokens = list(range(10))
    first = opened(pool, tokens)
    assert pool.match(tokens) == first.blocks[:2]
    assert pool.match(tokens[:8]) == first.blocks[:1]  # the last token has to be computed by somebody
    assert pool.match(tokens[:9]) == first.blocks[:2]
    assert pool.match([0, 1, 2, 9, *tokens[4:]]) == []
    assert pool.match([*tokens[:4], 9, *tokens[5:]]) == first.blocks[:1]
    assert pool.match(tokens[4:]) == []  # the same tokens at another place are not the same block
    second = opened(pool, tokens)
    assert second.blocks[:2] == first.blocks[:2]
    assert pool.free == 16 - 4


def test_blocks_are_shared_only_once_they_are_computed() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(12))
    table = pool.open([], 3)
    assert table is not None
    pool.learn(table, tokens, 7)
    assert pool.match(tokens) == table.blocks[:1]
    pool.learn(table, tokens, 12)
    assert pool.match([*tokens, 0]) == table.blocks


def test_two_who_compute_the_same_keep_one_chain() -> None:
    pool = BlockPool(16, 4)
    tokens = list(range(9))
    first, second = pool.open([], 3), pool.open([], 3)
    assert first is not None
    assert second is not None
    pool.learn(first, tokens, 4)
    pool.learn(second, tokens, 8)  # its second block follows the first one's first
    assert pool.match(tokens) == [first.blocks[0], second.blocks[1]]
    pool.close(second)
    assert pool.free == 16 - 3
    assert pool.idle == 1
    pool.close(first)
    assert (pool.free, pool.idle) == (16, 2)


def test_the_least_recently_used_go_first_and_the_end_before_the_beginning() -> None:
    pool = BlockPool(6, 4)
    old, new = list(range(8)), list(range(10, 18))
    for tokens in (old, new):
        pool.close(opened(pool, tokens))
    assert (pool.free, pool.idle) == (6, 4)
    pool.open([], 3)  # two empty ones and one more
    assert pool.match([*old, 0]) == pool.match(old[:5])
    assert len(pool.match(old)) == 1
    assert len(pool.match([*new, 0])) == 2
    pool.open([], 1)
    assert pool.match(old) == []
    assert len(pool.match([*new, 0])) == 2


def test_what_is_forgotten_is_shared_with_nobody_new() -> None:
    pool = BlockPool(6, 4)
    tokens = list(range(9))
    first = pool.open([], 3)
    assert first is not None
    pool.learn(first, tokens, 9)
    second = pool.open(pool.match(tokens), 1)
    assert second is not None
    pool.forget(second)
    pool.close(second)
    assert (pool.match(tokens), pool.free, pool.idle) == ([], 3, 0)
    pool.close(first)
    assert (pool.free, pool.idle) == (6, 0)


def test_used_again_means_recently_used() -> None:
    pool = BlockPool(4, 4)
    old, new = list(range(5)), list(range(10, 15))
    for tokens in (old, new, old):
        pool.close(opened(pool, tokens))
    pool.open([], 3)
    assert len(pool.match(old)) == 1
    assert pool.match(new) == []


def test_what_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(4, 4)
    tokens = list(range(9))
    pool.close(opened(pool, tokens))
    shared = pool.match(tokens)
    assert pool.open(shared, 3) is None  # the shared ones are among the four that are free
    assert pool.free == 4
    assert pool.match(tokens) == shared
    assert pool.open(shared, 2) is not None
    assert pool.free == 0


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
