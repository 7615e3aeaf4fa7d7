"""Branches that each compute one slice of the same steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from surgeon.language.program import Fork, Node, Step, steps_of

MOST_SLICES = 1024  # a number beyond is a mistake, which would fill the memory


def fork_of_slices(nodes: Iterable[Node], count: int) -> Fork:
    """A fork in which branch i computes slice i of `count` of every step; the slices keep streams of their own.

    Raises:
        ValueError: if `count` is below 2 or above MOST_SLICES.
    """
    if not 2 <= count <= MOST_SLICES:
        raise ValueError(f"count must be at least 2 slices and at most {MOST_SLICES}, not {count}")
    steps = tuple(steps_of(tuple(nodes)))
    return Fork(tuple(tuple(_slice(step, index, count) for step in steps) for index in range(count)))


def _slice(step: Step, index: int, count: int) -> Step:
    return replace(
        step, sublayers=tuple(replace(whole, piece=(index, count)) for whole in step.sublayers)
    )
