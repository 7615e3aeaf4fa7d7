"""A search whose best choice is known, on a made-up measure: what tests of the engine run, and processes they start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from optuna.distributions import IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from surgeon.searches.study.shared_study import FINISHED, PROGRAM, SharedStudy, Told
from surgeon.searches.study.storage import Pace, open_storage

PARAMETERS, MOST = 4, 4
QUICK = Pace(heartbeat=0.2, grace=1.0, poll=0.01, longest_poll=0.05)
TRIALS, TOGETHER = 18, 4


def value(params: dict[str, int]) -> float:
    """Least in a corner; no two sets of parameters have the same."""
    return sum((params[f"p{place}"] - 3) ** 2 + params[f"p{place}"] / 7**place for place in range(PARAMETERS))


def key(params: dict[str, int]) -> str:
    return " ".join(map(str, params.values()))


def ask(stored: Sequence[FrozenTrial], count: int) -> list[FrozenTrial]:
    """Of the best that is finished the nearest neighbours, in order, that nobody has tried."""
    tried = {key(trial.params) for trial in stored}
    finished = [trial for trial in stored if trial.state in FINISHED]
    best = min(finished, key=lambda trial: value(trial.params), default=None)
    start = [0] * PARAMETERS if best is None else [*best.params.values()]
    found = []
    for number in range(5**PARAMETERS):
        moves = [number // 5**place % 5 for place in range(PARAMETERS)]
        params = {f"p{place}": (start[place] + moves[place]) % (MOST + 1) for place in range(PARAMETERS)}
        if len(found) < count and key(params) not in tried:
            kinds = {name: IntDistribution(0, MOST) for name in params}
            attributes = {PROGRAM: key(params)}
            found.append(
                create_trial(state=TrialState.RUNNING, params=params, distributions=kinds, user_attrs=attributes)
            )
    return found


def measure(taken: Sequence[FrozenTrial], earlier: Sequence[FrozenTrial]) -> list[Told]:
    """Worse than all before: stopped early, with the best of them as a witness of what it was compared with."""
    best = min((trial.values[0] for trial in earlier if trial.state in FINISHED), default=0.0)
    told = []
    for trial in taken:
        own = value(trial.params)
        told.append(Told([own], {"against": best}, {"limit": own - 9}, {1: own / 2, 2: own} if own > 30 else {}))
    return told


def study(address: str, folder: Path, name: str = "search", say: Callable[[str], None] = print) -> SharedStudy:
    storage = open_storage(address or None, folder, QUICK)
    return SharedStudy(storage, name, {"model": "a"}, say=say)


def rows(found: SharedStudy) -> list[tuple[int, str, float, float]]:
    """All that is finished."""
    every = [trial for trial in found.trials() if trial.state in FINISHED]
    return [(one.number, key(one.params), one.values[0], one.user_attrs["against"]) for one in every]


def work(address: str, folder: str, seconds: float, log: str) -> None:
    """What a worker's process runs; it writes down every program that it begins to measure."""

    def slowly(taken: Sequence[FrozenTrial], earlier: Sequence[FrozenTrial]) -> list[Told]:
        with Path(log).open("a") as file:
            file.writelines(f"{key(trial.params)}\n" for trial in taken)
        time.sleep(seconds * len(taken))
        return measure(taken, earlier)

    for _ in study(address, Path(folder)).run(ask, slowly, TRIALS, TOGETHER):
        pass


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
