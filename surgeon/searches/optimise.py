"""Choices of least predicted damage under limits, by dynamic programming over edits in the order of their layers.

The prediction is a sum over the chosen edits and over pairs of them,

    damage(S) = sum_i alone[i] + sum_{i<j} cross[i, j],

and a choice has to save at least `need` of everything that is limited. Two partial choices that have saved as much, and
leave the same later edits free, differ in damage only: if damage is a plain sum the better one stays the better one,
and keeping it alone is exact. Cross terms can turn that round, so that the best few of each such group go on, and of
many spaces together only the best few hundred of all that have saved as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]
Places = NDArray[np.intp]
Counts = NDArray[np.int64]

BEAM = 16  # partial choices of a group
_GROUPS = 16  # times as many of all groups that have saved as much
_MOST = 2048  # partial choices in all, shared out evenly among what they have saved
_LEVELS = 24  # of savings, between none and enough, that tell groups apart
# Times the damage of a choice that is enough: an edit that does more by itself is in no good one.
_HOPELESS = 2.0
_NEAR = 1e-9


@dataclass(frozen=True)
class Damage:
    """Predicted damage of choices among n edits.

    Attributes:
        alone: (n,), of each edit by itself.
        cross: (n, n), symmetric with a zero diagonal: of two edits together beyond that.
    """

    alone: Numbers
    cross: Numbers

    def total(self, chosen: Sequence[int]) -> float:
        index = list(chosen)
        return float(self.alone[index].sum() + self.cross[np.ix_(index, index)].sum() / 2)


@dataclass(frozen=True)
class Savings:
    """Savings of edits in limited quantities.

    Attributes:
        each: (n, limits), of each edit; it may be negative.
        need: (limits,), how much has to be saved of each, more than 0.
    """

    each: Numbers
    need: Numbers

    @property
    def worth(self) -> Numbers:
        """(n,), the shares of `need` that each edit saves, added up over the limits."""
        found: Numbers = np.clip(self.each / self.need, 0, 1).sum(axis=1)
        return found

    def are_enough(self, saved: Numbers) -> Flags:
        """Tell which choices that save so much, (choices, limits), save enough: (choices,)."""
        return np.asarray((saved >= self.need * (1 - _NEAR)).all(axis=1))


@dataclass(frozen=True)
class _Population:
    """Partial choices, one a row.

    Attributes:
        chosen, blocked: (rows, n), its edits, and those that exclude one of them.
        damage: (rows,), saved: (rows, limits).
        pull: (rows, n), for every edit the cross terms with those chosen.
    """

    chosen: Flags
    blocked: Flags
    damage: Numbers
    saved: Numbers
    pull: Numbers

    def take(self, rows: Places | Flags) -> _Population:
        return _Population(*(part[rows] for part in vars(self).values()))

    def join(self, other: _Population) -> _Population:
        return _Population(
            *map(np.concatenate, zip(vars(self).values(), vars(other).values(), strict=True))
        )


def best_choices(
    damage: Damage,
    savings: Savings,
    excluded: Flags,
    count: int = 1,
    scarce: tuple[Counts, int] | None = None,
    beam: int = BEAM,
) -> list[tuple[int, ...]]:
    """The `count` choices of least predicted damage that save enough, the least first; fewer if there are fewer.

    Edits that save nothing are in none of them, nor is one after those before it have saved enough, nor one that alone
    does twice the damage of a whole choice. With `beam` 1 and no cross terms the first one is exact, where not too many
    edits exclude later ones at a time.

    Args:
        excluded: (n, n), which edits exclude each other; edits are in the order of their layers.
        scarce: (n,), how much each edit takes of something, and how much of it a choice may take in all.
        beam: how many partial choices of each group go on.
    """
    useful = useful_edits(damage, savings, excluded)
    taken = np.zeros(len(useful), dtype=np.int64)
    most = 0
    if scarce is not None:
        taken = scarce[0][useful]
        most = scarce[1]
    damage = Damage(damage.alone[useful], damage.cross[np.ix_(useful, useful)])
    savings = Savings(savings.each[useful], savings.need)
    excluded = excluded[np.ix_(useful, useful)]
    rows = len(useful)
    limits = len(savings.need)
    none = np.zeros((1, rows), dtype=bool)
    found = _Population(none, none, np.zeros(1), np.zeros((1, limits)), np.zeros((1, rows)))
    # One number for each set of blocked edits.
    digits = np.random.default_rng(0).integers(1, 2**62, rows)
    for edit in range(rows):
        there = found.chosen @ taken + taken[edit] <= most
        more = found.take(there & ~found.blocked[:, edit] & ~savings.are_enough(found.saved))
        chosen = more.chosen.copy()
        chosen[:, edit] = True
        longer = _Population(
            chosen,
            more.blocked | excluded[edit],
            more.damage + damage.alone[edit] + more.pull[:, edit],
            more.saved + savings.each[edit],
            more.pull + damage.cross[edit],
        )
        found = found.join(longer)
        blocked = found.blocked[:, edit + 1 :] @ digits[edit + 1 :]
        steps = np.floor(np.clip(found.saved / savings.need, -1, 1) * _LEVELS + _NEAR)
        # One number for how much of everything is saved.
        levels = (steps.astype(np.int64) + _LEVELS) @ (2 * _LEVELS + 1) ** np.arange(limits)
        # The best few of each group go on, and of these the best of all that have saved as much.
        order = np.lexsort((found.damage, blocked, levels))
        order = order[_place_in_run(levels[order], blocked[order]) < beam]
        order = order[np.lexsort((found.damage[order], levels[order]))]
        room = max(_MOST, 4 * beam) // len(np.unique(levels))
        going = _place_in_run(levels[order]) < min(beam * _GROUPS, max(1, room))
        found = found.take(order[going])
    enough = found.take(savings.are_enough(found.saved))
    order = np.argsort(enough.damage, kind="stable")[:count]
    return [tuple(useful[row].tolist()) for row in enough.chosen[order]]


def useful_edits(damage: Damage, savings: Savings, excluded: Flags) -> Places:
    """Edits that can be in a good choice: that save something, at no more damage than a whole choice does."""
    worth = savings.worth
    useful = np.flatnonzero(worth > _NEAR)
    chosen: list[int] = []
    for edit in useful[np.argsort(damage.alone[useful] / worth[useful], kind="stable")]:
        if not excluded[edit, chosen].any():
            chosen.append(int(edit))
        if savings.are_enough(savings.each[chosen].sum(axis=0)[None])[0]:
            limit = _HOPELESS * max(damage.total(chosen), float(damage.alone[chosen].max()))
            return useful[damage.alone[useful] <= limit]
    return useful


def _place_in_run(*keys: Counts) -> Places:
    """The place of every row among neighbours with the same keys."""
    rows = np.arange(len(keys[0]))
    begins = np.ones(len(rows), dtype=bool)
    if len(rows):
        begins[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    places: Places = rows - np.maximum.accumulate(np.where(begins, rows, 0))
    return places


# Shares that are tried; the ones under which the trials are likeliest are taken.
_OWN = (0.03, 0.1, 0.3, 1.0)
_CROSS = (0.03, 0.1, 0.3, 1.0)
_NOISE = 0.01  # of a measured value: what no terms explain


@dataclass(frozen=True)
class Surrogate:
    """Predicted damage of choices, with its uncertainty.

    Attributes:
        prior: the terms as they were measured.
        chosen: (trials, n), which edits each trial had, as 0 and 1.
        measured: (trials,), its damage.
        own, cross: by which share the terms of edits, and of pairs of them, are believed to be off.
    """

    prior: Damage
    chosen: Numbers
    measured: Numbers
    own: float
    cross: float

    @classmethod
    def fit(
        cls, prior: Damage, choices: Sequence[Sequence[int]], measured: Sequence[float]
    ) -> Surrogate:
        """The surrogate of these trials, with the shares that make them likeliest; damage is finite."""
        chosen = indicators(choices, len(prior.alone))
        values = np.asarray(measured, dtype=np.float64)
        every = [cls(prior, chosen, values, own, cross) for own, cross in product(_OWN, _CROSS)]
        if len(values):
            return max(every, key=lambda each: each.likelihood)
        return every[-1]

    @cached_property
    def likelihood(self) -> float:
        """Logarithm of the trials' likelihood, up to a constant."""
        factor, _ = self._factor
        return float(-0.5 * self._residual @ self._weights - np.log(np.diag(factor)).sum())

    @cached_property
    def corrected_damage(self) -> Damage:
        if not len(self.measured):
            return self.prior
        scale = self._scale
        weighted = self.chosen * self._weights[:, None]
        alone = self.prior.alone + (self.own * scale) ** 2 * weighted.sum(0)
        cross = self.cross**2 * np.outer(scale, scale) * (self.chosen.T @ weighted)
        np.fill_diagonal(cross, 0.0)
        return Damage(alone, self.prior.cross + cross)

    def uncertainty(self, choices: Sequence[Sequence[int]]) -> Numbers:
        """(choices,), the standard deviation of each one's predicted damage."""
        asked = indicators(choices, len(self.prior.alone))
        variances: Numbers = np.array([self._kernel(row[None], row[None])[0, 0] for row in asked])
        if len(self.measured):
            across = self._kernel(self.chosen, asked)
            variances -= np.einsum("tc,tc->c", across, cho_solve(self._factor, across))
        deviations: Numbers = np.sqrt(np.maximum(variances, 0.0))
        return deviations

    @property
    def _scale(self) -> Numbers:
        floor: Numbers = np.maximum(self.prior.alone, 1e-9)
        return floor

    def _kernel(self, one: Numbers, other: Numbers) -> Numbers:
        """Covariance of damages: of the edits that two choices share, and of the pairs of such edits."""
        square = (one * self._scale**2) @ other.T
        twice = ((one * self._scale) @ other.T) ** 2 - square  # d_i d_j, each pair of shared edits twice
        covariance: Numbers = self.own**2 * square + self.cross**2 * twice / 2
        return covariance

    @cached_property
    def _factor(self) -> tuple[Numbers, bool]:
        covariance = self._kernel(self.chosen, self.chosen)
        noise = (_NOISE * np.maximum(np.abs(self.measured), 1e-9)) ** 2
        factor, lower = cho_factor(covariance + np.diag(noise), lower=True)
        return factor, lower

    @cached_property
    def _residual(self) -> Numbers:
        predicted = [self.prior.total(np.flatnonzero(row).tolist()) for row in self.chosen]
        residual: Numbers = self.measured - np.array(predicted)
        return residual

    @cached_property
    def _weights(self) -> Numbers:
        weights: Numbers = cho_solve(self._factor, self._residual)
        return weights


def indicators(choices: Sequence[Sequence[int]], edits: int) -> NDArray[np.float64]:
    """(choices, edits), 1 where a choice has an edit."""
    found = np.zeros((len(choices), edits))
    for row, choice in zip(found, choices, strict=True):
        row[list(choice)] = 1.0
    return found
