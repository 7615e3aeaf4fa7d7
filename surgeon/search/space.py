"""The space of a pair search: which disjoint pairs of neighbouring layers run together.

A choice of pairs is written as the tuple of their first layers. A vector of scores, one for each possible pair,
stands for the choice of the wanted number of disjoint pairs with the greatest total score, so that every point of the
space is feasible, and so that a measured damage per pair is itself a point of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from surgeon.operations.pair import pair
from surgeon.program import Program
from surgeon.recipe import AppliedOperation

Pairs = tuple[int, ...]  # the first layer of each pair, ascending


def best_pairs(scores: Sequence[float], count: int) -> Pairs:
    """The `count` disjoint pairs with the greatest total score, by dynamic programming over layers.

    Args:
        scores: one per possible pair; entry k is for layers k and k + 1.

    Raises:
        ValueError: if so many disjoint pairs do not fit.
    """
    layers = len(scores) + 1
    if 2 * count > layers:
        raise ValueError(f"{count} disjoint pairs do not fit into {layers} layers")
    # best[n][c]: the greatest total of c pairs within the first n layers, and the choice that has it
    best: list[list[tuple[float, Pairs] | None]] = [[(0.0, ())] + [None] * count for _ in range(layers + 1)]
    for n in range(2, layers + 1):
        for c in range(1, count + 1):
            without, smaller = best[n - 1][c], best[n - 2][c - 1]
            best[n][c] = without
            if smaller is not None:
                total = smaller[0] + scores[n - 2]
                if without is None or total > without[0]:
                    best[n][c] = (total, (*smaller[1], n - 2))
    found = best[layers][count]
    assert found is not None
    return found[1]


def contiguous_windows(num_layers: int, count: int) -> list[Pairs]:
    """Every choice of `count` pairs in one unbroken stretch, those ending near the paper's best end index first.

    Figure 7 of Layer Parallelism has the best end index a few layers before the last (28 of 32, 25 of 28).
    """
    windows = [tuple(range(start, start + 2 * count, 2)) for start in range(num_layers - 2 * count + 1)]
    return sorted(windows, key=lambda window: abs(window[-1] + 1 - (num_layers - 4)))


def as_scores(pairs: Pairs, num_layers: int) -> list[float]:
    """A point of the space that stands for exactly these pairs."""
    return [1.0 if first in pairs else 0.0 for first in range(num_layers - 1)]


def pairs_program(pairs: Pairs, num_layers: int, steps_per_layer: int = 2) -> Program:
    """The program with these pairs run as LP steps."""
    program = Program.dense(num_layers, steps_per_layer)
    for first in pairs:
        program = pair(program, range(first, first + 2))
    return program


def as_operation(pairs: Pairs) -> AppliedOperation:
    """The pairs as an operation of a recipe, neighbouring pairs joined into one stretch."""
    stretches: list[range] = []
    for first in pairs:
        if stretches and stretches[-1].stop == first:
            stretches[-1] = range(stretches[-1].start, first + 2)
        else:
            stretches.append(range(first, first + 2))
    return AppliedOperation("pair", tuple(stretches))
