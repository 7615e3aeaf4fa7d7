"""Attention over a cache in blocks against plain attention of each sequence, whatever a pass is made of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgeon.runtime.batching.blocks import BLOCK_TOKENS, BlockTable
from surgeon.runtime.batching.request import Row, Wanted, asked_of
from surgeon.runtime.kernels.functions import Weighting, Window
from surgeon.runtime.model.paged_cache import PagedCache, PagedLayout, as_index, stretches

HEAD_DIM = 8
BLOCKS = 24
PLAIN = Weighting()
SEEN = st.none() | st.builds(Window, st.sampled_from([1, 8, 17, 40]), st.booleans())


def plain_attention(queries: Tensor, keys: Tensor, values: Tensor, rule: Weighting) -> Tensor:
    """Of one sequence: queries (Q, H, D) of its last tokens, keys and values (N, K, D) of all, to (Q, H * D)."""
    shared = queries.shape[1] // keys.shape[1]
    found = []
    for row, query in enumerate(queries):
        end = len(keys) - len(queries) + row + 1
        seen = slice(0, end)
        if rule.window is not None:
            size, chunked = rule.window
            seen = slice((end - 1) - (end - 1) % size if chunked else max(0, end - size), end)
        for head in range(queries.shape[1]):
            scores = keys[seen, head // shared] @ query[head] * (rule.scale or HEAD_DIM**-0.5)
            if rule.softcap is not None:
                scores = rule.softcap * (scores / rule.softcap).tanh()
            weights = scores.exp()
            found.append(weights @ values[seen, head // shared] / weights.sum())
    return torch.stack(found).view(len(queries), -1)


def places_of(blocks: list[int], tokens: int) -> list[int]:
    return [
        blocks[token // BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS for token in range(tokens)
    ]


def row_of(before: int, new: int, blocks: list[int]) -> Row:
    table = BlockTable()
    table.extend(blocks)
    return Row(before, [0] * new, (table.runs,), Wanted.BEST)


def check(
    rows: list[tuple[int, int]],
    blocks: list[list[int]],
    heads: list[tuple[int, int]],
    rules: list[Weighting] | None = None,
) -> None:
    """Attend one pass of rows (tokens before, new tokens) with these blocks; heads, KV heads and rule by slot."""
    cache = PagedCache([kv_heads for _, kv_heads in heads], BLOCKS, HEAD_DIM, torch.empty(0))
    layout = PagedLayout([row_of(*row, own) for row, own in zip(rows, blocks, strict=True)], cache)
    for slot, ((number, kv_heads), rule) in enumerate(
        zip(heads, rules or [PLAIN] * len(heads), strict=True)
    ):
        texts = [torch.randn(2, before + new, kv_heads, HEAD_DIM) for before, new in rows]
        for (before, _), own, text in zip(rows, blocks, texts, strict=True):
            for kept, given_ in zip(cache.pairs[slot].chunk(2), text, strict=True):
                kept[:, places_of(own, before)] = given_[:before].transpose(0, 1)
        queries = [torch.randn(new, number, HEAD_DIM) for _, new in rows]
        fresh = torch.cat([text[:, before:] for (before, _), text in zip(rows, texts, strict=True)], 1)
        found = layout.attend(slot, torch.cat(queries), torch.cat(list(fresh), 1), rule)
        expected = [plain_attention(q, *kv, rule) for q, kv in zip(queries, texts, strict=True)]
        assert torch.allclose(found, torch.cat(expected), atol=1e-5)
        for own, text in zip(blocks, texts, strict=True):  # the new ones are in the cache now
            for kept, given_ in zip(cache.pairs[slot].chunk(2), text, strict=True):
                assert torch.equal(kept[:, places_of(own, text.shape[1])], given_.transpose(0, 1))


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 5, 20])), min_size=1, max_size=5
    ),
    st.permutations(range(BLOCKS)),
    st.booleans(),
)
def test_any_pass_over_any_blocks(
    rows: list[tuple[int, int]], order: list[int], scattered: bool
) -> None:
    free = iter(order if scattered else range(BLOCKS))
    blocks = [[next(free) for _ in range(-(-(before + new) // BLOCK_TOKENS))] for before, new in rows]
    check(rows, blocks, [(4, 2), (2, 2), (3, 1)])


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 5, 20])), min_size=1, max_size=5
    ),
    st.permutations(range(BLOCKS)),
    st.booleans(),
    st.tuples(*[st.builds(Weighting, st.none(), SEEN, st.sampled_from([None, 2.0]))] * 3),
)
def test_windows_and_caps_of_several_slots(
    rows: list[tuple[int, int]], order: list[int], scattered: bool, rules: tuple[Weighting, ...]
) -> None:
    free = iter(order if scattered else range(BLOCKS))
    blocks = [[next(free) for _ in range(-(-(before + new) // BLOCK_TOKENS))] for before, new in rows]
    check(rows, blocks, [(4, 2), (2, 2), (3, 1)], list(rules))


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("rows", [[(0, 1)], [(0, 7)], [(30, 1)], [(30, 2)]])
def test_a_scale_of_ones_own(rows: list[tuple[int, int]], softcap: float | None) -> None:
    check(rows, [[3, 1, 2]], [(4, 2)], [Weighting(1.0, None, softcap)])


@pytest.mark.parametrize(
    ("runs", "last", "seen", "place"),
    [
        ([(3, 2)], None, 21, 3 * BLOCK_TOKENS),
        ([(3, 2)], 30, 21, 3 * BLOCK_TOKENS),
        ([(3, 2)], 8, 8, 3 * BLOCK_TOKENS + 13),
        ([(9, 1), (3, 1)], 5, 5, 3 * BLOCK_TOKENS),  # what lies in other runs is out of the window
    ],
)
def test_a_sequence_in_one_run_is_read_where_it_lies(
    runs: list[tuple[int, int]], last: int | None, seen: int, place: int
) -> None:
    cache = PagedCache([2], BLOCKS, HEAD_DIM, torch.empty(0))
    cache.stored.zero_()
    layout = PagedLayout([Row(20, [0], (runs,), Wanted.BEST)], cache)
    first = 0 if last is None else Window(last).first(21)
    keys, _ = layout._parts[0].texts[0].read_from(0, first)
    assert keys.shape == (1, 2, seen, HEAD_DIM)
    assert keys.untyped_storage().data_ptr() == cache.stored.untyped_storage().data_ptr()
    assert keys.data_ptr() == cache.pairs[0].chunk(2)[0][:, place].data_ptr()


def test_a_rank_without_attentions() -> None:
    cache = PagedCache([], 2, HEAD_DIM, torch.empty(0))
    assert cache.stored.nbytes == 0
    rows = [Row(0, [1, 2], ([(0, 1)],), Wanted.BEST), Row(3, [1], ([(1, 1)],), Wanted.BEST)]
    assert PagedLayout(rows, cache).positions.tolist() == [0, 1, 3]
    assert asked_of(rows) == [1, 2]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 4)), min_size=1, max_size=4), st.data())
def test_stretches_are_the_blocks_places(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    size = BLOCK_TOKENS
    places = [place for first, count in runs for place in range(first * size, (first + count) * size)]
    first = data.draw(st.integers(0, len(places) - 1))
    end = data.draw(st.integers(first + 1, len(places)))
    index = as_index(stretches(runs, first, end), torch.device("cpu"))
    numbers = torch.arange(60 * size)
    assert numbers[index].tolist() == places[first:end]
