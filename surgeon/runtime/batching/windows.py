"""Counts of cache blocks that texts hold, where some attentions look back through a window only.

Attentions with the same window are a group (or several), and a text has a table of blocks for each; blocks behind the
window are given back. A group without a window (None) keeps all of a text.
"""

from __future__ import annotations

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
