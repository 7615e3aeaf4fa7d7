"""The choices of least predicted damage under limits, by dynamic programming over edits in the order of their layers.

The prediction is a sum over the chosen edits and over pairs of them,

    damage(S) = sum_i alone[i] + sum_{i<j} cross[i, j],

and a choice has to save at least `need` of everything that is limited. Two partial choices that have saved as much,
and leave the same later edits free, differ in damage only: if damage is a plain sum the better one stays the better
one, and keeping it alone is exact. Cross terms can turn that round, so that the best few of each such group are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

KEPT = 24  # partial choices of a group
_LEVELS = 24  # of savings, between none and enough, that tell groups apart


@dataclass(frozen=True)
class Damage:
    """What is predicted of choices among n edits.

    Attributes:
        alone: (n,), of each edit by itself.
        cross: (n, n), symmetric with a zero diagonal: what two edits do together beyond that.
    """

    alone: Numbers
    cross: Numbers

    def of(self, chosen: Sequence[int]) -> float:
        """Predicted of a choice, by the edits' numbers."""
        index = list(chosen)
        return float(self.alone[index].sum() + self.cross[np.ix_(index, index)].sum() / 2)


@dataclass(frozen=True)
class Savings:
    """What edits save of what is limited.

    Attributes:
        each: (n, limits), of each edit; it may be negative.
        need: (limits,), how much has to be saved of each, more than 0.
    """

    each: Numbers
    need: Numbers


@dataclass(frozen=True)
class _Partial:
    """A choice among the first edits.

    Attributes:
        pull: (n,), for every edit the cross terms with those chosen.
    """

    chosen: tuple[int, ...]
    damage: float
    saved: Numbers
    pull: Numbers = field(repr=False)


def best_choices(
    damage: Damage, savings: Savings, excluded: NDArray[np.bool_], count: int = 1, kept: int = KEPT
) -> list[tuple[int, ...]]:
    """The `count` choices of least predicted damage that save enough, the least first; fewer if there are fewer.

    With `kept` 1 and no cross terms the first one is exact.

    Args:
        excluded: (n, n), which edits exclude each other; edits are in the order of their layers.
        kept: how many partial choices of each group go on.
    """
    edits, limits = savings.each.shape
    later = [frozenset(map(int, np.flatnonzero(excluded[:, edit]))) for edit in range(edits)]
    groups = [_Partial((), 0.0, np.zeros(limits), np.zeros(edits))]
    for edit in range(edits):
        longer = [_extended(one, edit, damage, savings) for one in groups if later[edit].isdisjoint(one.chosen)]
        # Once a choice saves enough, more edits could only do it less damage where cross terms are negative.
        groups = _best_of_groups([*groups, *longer], edit, later, savings, kept)
    enough = [one for one in groups if (one.saved >= savings.need - 1e-9).all()]
    return [one.chosen for one in sorted(enough, key=lambda one: (one.damage, one.chosen))[:count]]


def _extended(one: _Partial, edit: int, damage: Damage, savings: Savings) -> _Partial:
    return _Partial(
        (*one.chosen, edit),
        one.damage + float(damage.alone[edit] + one.pull[edit]),
        one.saved + savings.each[edit],
        one.pull + damage.cross[edit],
    )


def _best_of_groups(
    partial: list[_Partial], edit: int, later: list[frozenset[int]], savings: Savings, kept: int
) -> list[_Partial]:
    """The best few of every group: as much saved, the same later edits excluded."""
    groups: dict[tuple[object, ...], list[_Partial]] = defaultdict(list)
    for one in partial:
        share = np.clip(one.saved / savings.need, -1, 1)
        open_ends = tuple(past for past in one.chosen if any(other > edit for other in later[past]))
        groups[*np.floor(share * _LEVELS + 1e-9), open_ends].append(one)
    return [one for group in groups.values() for one in sorted(group, key=lambda each: each.damage)[:kept]]
