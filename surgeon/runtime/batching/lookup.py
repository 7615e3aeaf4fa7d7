"""Drafts that a text has in itself: what came behind its last few tokens when these came before.

Prompt lookup decoding (Saxena 2023) takes no pass of anything, and is right where a text repeats itself or its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

# How many tokens have to be the same
LONGEST = 3
SHORTEST = 2


class Lookup:
    """The places of a text's tokens, by the few before them; of some that came several times, the last one."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}
        self._known = 0  # of the text's tokens, how many were looked at

    def drafts(self, text: Sequence[int], most: int) -> list[int]:
        """Up to so many tokens that may come next, perhaps none.

        Args:
            text: prompt and output so far; it begins as it did before.
        """
        for end in range(self._known, len(text)):  # what comes at `end` is known, unlike what comes next
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._behind[tuple(text[end - length : end])] = end
        self._known = len(text)
        for length in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
            found = self._behind.get(tuple(text[len(text) - length :]))
            if found is not None:
                # Where it repeats what it is just writing, it goes on to do so.
                period = len(text) - found
                return [text[found + place % period] for place in range(most)]
        return []
