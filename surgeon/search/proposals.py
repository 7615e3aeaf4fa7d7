"""Choices of pairs worth trying: what the paper would do, what single pairs suggest, and neighbours of the best."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from surgeon.search.space import Pairs, best_pairs, contiguous_windows

WINDOW = "window"  # the paper's: one contiguous stretch
ADDITIVE = "additive"  # the choice whose pairs, each measured alone, do the least damage in sum
NEIGHBOUR = "neighbour"  # the best choice so far with some pairs moved
SAMPLED = "sampled"  # Optuna's sampler
_WORST = 1e30


def first_proposals(damage: Sequence[float], num_layers: int, count: int, limit: int) -> list[tuple[str, Pairs]]:
    """What to try before sampling, most promising first, at most `limit` of them.

    Args:
        damage: of each pair alone; entry k is for layers k and k + 1.
    """
    additive = (ADDITIVE, best_pairs([-value for value in damage], count))
    windows = [(WINDOW, window) for window in contiguous_windows(num_layers, count)]
    return [windows[0], additive, *windows[1:]][:limit]


def neighbour(pairs: Pairs, damage: Sequence[float], tried: Collection[Pairs], seed: int) -> Pairs | None:
    """An untried choice with one, two, ... of the pairs moved to free places; None if there is no untried one near.

    Args:
        damage: of each pair alone; places of little damage are taken more often.
    """
    dice = random.Random(seed)
    for moved in range(1, len(pairs) + 1):
        for _ in range(30):
            found = _move(pairs, damage, moved, dice)
            if found is not None and found not in tried:
                return found
    return None


def _move(pairs: Pairs, damage: Sequence[float], moved: int, dice: random.Random) -> Pairs | None:
    """The choice with so many pairs taken out at random and put back at random; None if one finds no place."""
    kept = dice.sample(pairs, len(pairs) - moved)
    for _ in range(moved):
        free = [first for first in range(len(damage)) if all(abs(first - other) > 1 for other in kept)]
        if not free:
            return None
        floor = max(min(damage), 1e-9)  # measured damage can be 0, or infinite
        kept += dice.choices(free, [1 / min(max(damage[first], floor), _WORST) for first in free])
    return tuple(sorted(kept))
