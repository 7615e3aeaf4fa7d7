"""A worker of a search that takes no model: what each program costs is made up, and takes a known time.

    python -m scripts.search.made_up STORAGE STUDY SECONDS LOG

It writes a line into LOG for every program that it begins to measure.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from surgeon.results.edit import Edit, as_choice
from surgeon.searches.study.rounds import RoundStudy
from surgeon.searches.study.storage import open_storage
from surgeon.searches.trial import MeasuredProgram, Proposal, Trial

LAYERS, ROUNDS = 17, 4
EDITS = [Edit(first, first + 2, "pair", "lp") for first in range(LAYERS - 1)]


def propose(earlier: Sequence[Trial]) -> list[Proposal]:
    """All pairs alone; then the best program of all with every further pair, three times."""
    last = earlier[-1].proposal.level if earlier else 0.0
    if last == ROUNDS:
        return []
    of_last = [trial for trial in earlier if trial.proposal.level == last]
    best = min(of_last, key=lambda trial: trial.measured.divergence, default=None)
    base = () if best is None else best.proposal.choice
    choices = [as_choice([*base, edit]) for edit in EDITS if edit not in base]
    return [Proposal(", ".join(map(str, choice)), "made up", choice, (last or 0.0) + 1) for choice in choices]


def divergence(proposal: Proposal) -> float:
    """A number that follows from the program, and from nothing else."""
    digest = hashlib.sha256(proposal.key.encode()).digest()
    return len(proposal.choice) + int.from_bytes(digest[:4], "big") / 2**32


def open_study(storage: str, name: str) -> RoundStudy:
    """The study; `storage` as `surgeon search --storage` takes it."""
    opened = open_storage(storage, Path(tempfile.gettempdir()))
    return RoundStudy(opened, name, {"layers": LAYERS, "rounds": ROUNDS}, EDITS)


def main() -> None:
    storage, name, seconds, log = sys.argv[1:]

    def measure(proposals: Sequence[Proposal], _: Sequence[Trial]) -> list[MeasuredProgram]:
        with Path(log).open("a") as file:
            file.writelines(f"{proposal.key}\n" for proposal in proposals)
        time.sleep(float(seconds) * len(proposals))
        values = [divergence(proposal) for proposal in proposals]
        return [MeasuredProgram(value + 10, value, value, value, 100) for value in values]

    study = open_study(storage, name)
    base = study.shared("base", lambda: time.sleep(float(seconds)) or 7)
    assert base == 7
    for _ in study.run(propose, measure, together=3):
        pass


if __name__ == "__main__":
    main()
