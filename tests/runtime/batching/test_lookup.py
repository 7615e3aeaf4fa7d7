"""Drafts of a text's own tokens, against a search through all of it."""

from __future__ import annotations

from random import Random

from surgeon.runtime.batching.request import LONGEST, SHORTEST, Lookup


def searched(text: list[int], most: int) -> list[int]:
    """The same by looking everywhere for the last few tokens, from the end."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if len(text) >= length and text[end - length : end] == text[-length:]:
                found = text[end:]
                while len(found) < most:
                    found = found + text[end:]
                return found[:most]
    return []


def test_what_came_before_comes_again() -> None:
    lookup = Lookup()
    assert lookup.drafts([1, 2, 3], 4) == []
    assert lookup.drafts([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert lookup.drafts([1, 2, 3, 4, 1, 2, 9, 9, 9], 3) == [9, 9, 9]


def test_texts_that_grow() -> None:
    random = Random(3)
    for _ in range(50):
        text, lookup = [random.randrange(4) for _ in range(random.randrange(1, 9))], Lookup()
        for _ in range(12):
            most = random.randrange(1, 6)
            assert lookup.drafts(text, most) == searched(text, most)
            text += [random.randrange(4) for _ in range(random.randrange(1, 3))]
