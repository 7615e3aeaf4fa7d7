"""How many blocks a text holds, against texts that grow by one token at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgeon.runtime.batching.blocks import (
    BLOCK_TOKENS,
    Windows,
    blocks_for,
    first_block,
    longest_text,
    most_held,
    pass_blocks,
    text_blocks,
)

tokens_of_a_text = st.integers(0, 150)
window_sizes = st.none() | st.integers(1, 60)
block_sizes = st.sampled_from((1, 3, 4, 16))
windows_of_groups = st.lists(window_sizes, min_size=1, max_size=3).map(tuple)


def looked_at(token: int, window: int | None) -> range:
    """The tokens that a token looks at, itself the last of them."""
    return range(0 if window is None else max(0, token - window + 1), token + 1)


def blocks_of(tokens: range, size: int) -> set[int]:
    return {token // size for token in tokens}


def most_at_once(tokens: int, window: int | None, size: int) -> int:
    """The most blocks that any pass needs, of those that add a token each."""
    return max((len(blocks_of(looked_at(token, window), size)) for token in range(tokens)), default=0)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_of_a_text(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks
    assert BLOCK_TOKENS == 16


@given(tokens_of_a_text, window_sizes, block_sizes)
def test_the_first_block_that_the_next_token_looks_at(
    computed: int, window: int | None, size: int
) -> None:
    assert first_block(computed, window, size) == min(blocks_of(looked_at(computed, window), size))


@given(tokens_of_a_text, window_sizes, block_sizes)
def test_the_most_that_a_growing_text_holds(tokens: int, window: int | None, size: int) -> None:
    assert most_held(tokens, window, size) == most_at_once(tokens, window, size)


@given(tokens_of_a_text, windows_of_groups, block_sizes)
def test_groups_hold_blocks_of_their_own(tokens: int, windows: Windows, size: int) -> None:
    assert text_blocks(tokens, windows, size) == sum(
        most_at_once(tokens, window, size) for window in windows
    )


@given(st.integers(0, 100), st.integers(1, 50), windows_of_groups, block_sizes)
def test_a_chunk_of_a_prompt_fits_beside_it(
    computed: int, chunk: int, windows: Windows, size: int
) -> None:
    """Until a pass has ended nothing that its first token looks at is given back."""
    end = computed + chunk
    held = sum(len(blocks_of(range(looked_at(computed, window)[0], end), size)) for window in windows)
    assert held <= text_blocks(end, windows, size) + pass_blocks(chunk, windows, size)


def test_a_pass_needs_room_in_groups_with_a_window_only() -> None:
    assert pass_blocks(40, (None, 20, None, 5)) == 2 * 3
    assert pass_blocks(40, (None,)) == 0


@given(st.integers(0, 40), windows_of_groups, st.integers(0, 120), block_sizes)
def test_the_longest_text_that_has_all_blocks_for_itself(
    blocks: int, windows: Windows, limit: int, size: int
) -> None:
    fits = [
        sum(most_at_once(tokens, one, size) for one in windows) <= blocks for tokens in range(limit + 1)
    ]
    # A text without tokens fits always.
    assert longest_text(blocks, windows, limit, size) == sum(fits) - 1
