"""A search whose best choice is known, on a made-up measure: what tests of the engine run, and processes they start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from surgeon.results.edit import Edit, as_choice
from surgeon.searches.study.rounds import RoundStudy
from surgeon.searches.study.storage import Pace, open_storage
from surgeon.searches.trial import MeasuredProgram, Proposal, Trial

LAYERS = 8
EDITS = [Edit(first, first + 2, "pair", "lp") for first in range(LAYERS - 1)]
QUICK = Pace(heartbeat=0.2, grace=1.0, poll=0.01, longest_poll=0.05)
SIZES = (7, 6, 5)  # of the rounds: single pairs, then the best with one more


def propose(earlier: Sequence[Trial]) -> list[Proposal]:
    """Every pair alone; then the best of the last round with every other pair; then once more."""
    made = 0
    for size in SIZES:
        if len(earlier) == made:
            best = min(earlier, key=lambda trial: (trial.measured.divergence, trial.proposal.key), default=None)
            base = () if best is None else best.proposal.choice
            choices = [as_choice([*base, edit]) for edit in EDITS if edit not in base]
            return [Proposal(" + ".join(map(str, c)), "made up", c, float(len(c))) for c in choices][:size]
        made += size
    return []


def damage(proposal: Proposal) -> float:
    """Least at the end; the last pair helps the others."""
    firsts = [edit.first for edit in proposal.choice]
    return sum(0.01 / (1 + first) for first in firsts) - 0.003 * (len(firsts) - 1) * (LAYERS - 2 in firsts)


def measured(value: float, whole: bool = True) -> MeasuredProgram:
    return MeasuredProgram(10 + value, value, 0.0, 1.0, 100, (2.0, 2.5), (value, value), whole=whole)


def measure(proposals: Sequence[Proposal], _: Sequence[Trial]) -> list[MeasuredProgram]:
    return [measured(damage(proposal)) for proposal in proposals]


def study(address: str, folder: Path, name: str = "search", say: Callable[[str], None] = print) -> RoundStudy:
    storage = open_storage(address or None, folder, QUICK)
    return RoundStudy(storage, name, {"model": "a"}, EDITS, say=say)


def rows(found: RoundStudy) -> list[tuple[int, str, float]]:
    return [(trial.number, trial.proposal.key, trial.measured.divergence) for trial in found.finished()]


def work(address: str, folder: str, seconds: float, log: str) -> None:
    """What a worker's process runs; it writes down every program that it begins to measure."""

    def slowly(proposals: Sequence[Proposal], earlier: Sequence[Trial]) -> list[MeasuredProgram]:
        with Path(log).open("a") as file:
            file.writelines(f"{proposal.key}\n" for proposal in proposals)
        time.sleep(seconds * len(proposals))
        return measure(proposals, earlier)

    for _ in study(address, Path(folder)).run(propose, slowly, together=3):
        pass


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
