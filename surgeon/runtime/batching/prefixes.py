"""Beginnings of texts in whole blocks, each known under a number, as long as somebody holds it.

A beginning is found by exact comparison, without hashes that could collide: by the number of the one that is a block
shorter, and its last block's tokens. Every longer beginning holds the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

ROOT = 0  # the beginning without tokens; numbers below are others of that kind, whose texts share nothing with its


class KnownPrefixes:
    """Known beginnings."""

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
