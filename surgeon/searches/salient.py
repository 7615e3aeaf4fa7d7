"""What a search of experts wins over REAP's own choice: as many experts of the same layers, the most salient ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from surgeon.findings.edit import Choice
from surgeon.language.program import Program
from surgeon.quality.summary import CONFIDENCE, interval
from surgeon.searches.mixture import Mixture
from surgeon.searches.trial import MeasuredProgram


def against_most_salient(
    mixture: Mixture, choice: Choice, measured: Mapping[Program, MeasuredProgram], text: str
) -> str | None:
    """In a sentence, window by window of the same text; None where the choice has no experts to choose.

    Args:
        measured: the programs of both choices, on all of a text.
        text: what that is.
    """
    if not any(edit in mixture.most_salient for edit in choice):
        return None
    salient = mixture.with_most_salient(choice)
    if salient == choice:
        return "the most salient ones of their layers (REAP): no other choice that was tried is better"
    ours, theirs = (measured[mixture.program(one)] for one in (choice, salient))
    differences = np.array(ours.divergences) - np.array(theirs.divergences)
    low, high = interval(differences, CONFIDENCE)
    verdict = "better" if high < 0 else "worse" if low > 0 else "not told apart"
    return (
        f"divergence {ours.divergence:.4g}, {theirs.divergence:.4g} of the most salient ones (REAP), on {text}: "
        f"difference {differences.mean():+.2g} ({CONFIDENCE:.0%} interval {low:+.2g} to {high:+.2g}), {verdict}"
    )
