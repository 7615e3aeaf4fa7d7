"""When a program is stopped before all windows are run, because it is worse than the best.

Programs are compared part by part of the text: texts differ in difficulty far more than programs do, and the
difference of two programs on one part does not have that in it. A program is stopped when a one-sided paired test
(Student's t) says that it is worse, on average, than the best with a margin on top. With the margin a program that
ties, or that is nearly as good, is never stopped by what rounding did.

Windows are few and long, so where they are few they are cut into blocks of 64 tokens or more. Blocks of one window
are alike: a program that errs on one is likelier to err on the next. So b blocks of a window say as much as
b / (1 + (b - 1) r) that are independent (Kish 1965, Survey Sampling, the design effect), with r their correlation,
about 0.25 on the demo model whatever was changed. Programs are looked at several times, and r is no constant: alpha
is a setting, and docs/measured-searches.md counts how often the best was stopped.
"""

from __future__ import annotations

import math
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
        correlation: of the blocks of a window, in what two programs differ by.
        least: values before the first look.

    Raises:
        ValueError: if alpha is no chance below a half, or the margin is negative.
    """

    alpha: float = 0.01
    margin: float = 0.01
    correlation: float = 0.25
    least: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 0.5:
            raise ValueError(f"alpha must lie between 0 and 0.5, not at {self.alpha}")
        if self.margin < 0 or not 0 <= self.correlation <= 1 or self.least < 2:
            raise ValueError(
                f"a race needs a margin of 0 or more, a correlation from 0 to 1 and two values or more, not {self}"
            )

    def is_lost(self, own: Values, best: Values, blocks: int = 1) -> bool:
        """Whether a program is worse, by its divergence and the best's on the same parts of a text, (parts,) each.

        A program whose divergence is no number has lost; to a best of that kind nothing loses.

        Args:
            blocks: how many of the parts are of one window.
        """
        if not np.isfinite(best).all():
            return False
        if not np.isfinite(own).all():
            return True
        if len(own) < self.least:
            return False
        above = own - best * (1 + self.margin) - ROUNDING
        effect = 1 + (blocks - 1) * self.correlation
        mean = float(above.mean())
        error = float(stats.sem(above)) * math.sqrt(effect)
        if mean <= 0:
            return False
        return error == 0 or float(stats.t.sf(mean / error, len(above) - 1)) < self.alpha
