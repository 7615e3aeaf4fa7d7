"""What trials say about the terms: a regression that makes the prediction of choices exact where it was measured.

The terms of `Damage` are a prior: each edit's own term is believed to a share of itself, each cross term to a share of
what the two edits do alone. Trials then correct them, by Gaussian regression: a trial of the choice S is a measurement
of sum_i w_i + sum_{i<j} w_ij over S, and the posterior means of all w are the corrected terms. With t trials all of it
is t x t algebra, since the kernel of two choices follows from what they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from surgeon.searches.optimise import Damage, Numbers

# Shares that are tried; the ones under which the trials are likeliest are taken.
_OWN = (0.03, 0.1, 0.3, 1.0)
_CROSS = (0.03, 0.1, 0.3, 1.0)
_NOISE = 0.01  # of a measured value: what no terms explain


@dataclass(frozen=True)
class Surrogate:
    """Predicted damage of choices, with how far the prediction is to be trusted.

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
    def fit(cls, prior: Damage, choices: Sequence[Sequence[int]], measured: Sequence[float]) -> Surrogate:
        """The surrogate of these trials, with the shares that make them likeliest.

        Args:
            choices: by the edits' numbers.
            measured: damage of each, finite.
        """
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
    def corrected(self) -> Damage:
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
        predicted = [self.prior.of(np.flatnonzero(row).tolist()) for row in self.chosen]
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
