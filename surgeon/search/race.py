"""When a program is stopped before all windows are run, because it is worse than the best.

Programs are compared part by part of the text: texts differ in difficulty far more than programs do, and the
difference of two programs on one part does not have that in it. A program is stopped when a one-sided paired test
(Student's t) says that it is worse, on average, than the best with a margin on top. With the margin a program that
ties, or that is nearly as good, is never stopped by what rounding did.

Windows are few and long, so where they are few they are cut into blocks of some 64 tokens. Neighbouring blocks are of
one text, and a program that errs on one is likelier to err on the next: the test takes them to say more than they do.
And a program is looked at several times. So alpha is no chance of a false stop, only a setting, whose false stops
`scripts/search/race.py` counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from surgeon.quality.summary import Values

BLOCK = 64  # tokens, at least, in what is compared
ROUNDING = 1e-6  # nats: what equal programs may differ by
MOST_BLOCKS = 256  # of a text: with more windows than that, windows are compared


def blocks_per_window(windows: int, tokens: int) -> int:
    """Into how many parts windows are cut, so many of them and each with so many predicted tokens; 1: not cut."""
    return max(1, min(tokens // BLOCK, MOST_BLOCKS // windows))


@dataclass(frozen=True)
class Race:
    """The rule; checked as it is made.

    Attributes:
        alpha: of the test at each look.
        margin: how much worse than the best a program may be, as a share of the best's divergence (and a millionth of a
            nat, which rounding makes).
        least: values before the first look.

    Raises:
        ValueError: if alpha is no chance below a half, or the margin is negative.
    """

    alpha: float = 0.01
    margin: float = 0.01
    least: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 0.5:
            raise ValueError(f"alpha must lie between 0 and 0.5, not at {self.alpha}")
        if self.margin < 0 or self.least < 2:
            raise ValueError(f"a race needs a margin of 0 or more and two values or more, not {self}")

    def is_lost(self, own: Values, best: Values) -> bool:
        """Whether a program is worse, by its divergence and the best's on the same parts of a text, (parts,) each.

        A program whose divergence is no number has lost; to a best of that kind nothing loses.
        """
        if not np.isfinite(best).all():
            return False
        if not np.isfinite(own).all():
            return True
        if len(own) < self.least:
            return False
        above = own - best * (1 + self.margin) - ROUNDING
        mean, error = float(above.mean()), float(stats.sem(above))
        if mean <= 0:
            return False
        return error == 0 or float(stats.t.sf(mean / error, len(above) - 1)) < self.alpha
