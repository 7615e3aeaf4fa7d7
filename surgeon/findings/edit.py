"""Edits: the elementary changes that a search combines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from surgeon.language.operations.base import show_range

# Where a trial comes from.
WINDOW = "window"  # one unbroken stretch, as papers choose it
ADDITIVE = "additive"  # least sum of what edits do alone
SECOND_ORDER = "second-order"  # the same with what every two of them do together
REGRESSION = "regression"  # the same with terms corrected by the trials so far
NEIGHBOUR = "neighbour"  # one of the best so far with one edit moved
SOURCES = (WINDOW, ADDITIVE, SECOND_ORDER, REGRESSION, NEIGHBOUR)

_TEXT = re.compile(r"(?P<space>[a-z-]+) (?P<first>\d+):(?P<stop>\d+)(?: (?P<option>\S+))?")


@dataclass(frozen=True, order=True)
class Edit:
    """One change of some layers that a space knows, such as "pair 4:6 lp".

    Attributes:
        first, stop: the layers, as Python slices them.
        option: in the space's own words; empty where there is one way.
    """

    first: int
    stop: int
    space: str
    option: str = ""

    def __str__(self) -> str:
        return f"{self.space} {show_range(self.layers)} {self.option}".rstrip()

    @classmethod
    def parse(cls, text: str) -> Edit:
        """The inverse of `str`; a ValueError shows text that is no edit."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is no edit; it should be a space, its layers and an option: pair 4:6 lp"
            )
        return cls(int(match["first"]), int(match["stop"]), match["space"], match["option"] or "")

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)


Choice = tuple[Edit, ...]  # in ascending order, each once: a point of a search


def as_choice(edits: Iterable[Edit]) -> Choice:
    """Sort edits into a choice."""
    return tuple(sorted(set(edits)))
