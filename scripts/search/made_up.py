"""A worker of a search that takes no model: what each trial costs is made up, and takes a known time.

    python -m scripts.search.made_up STORAGE STUDY SECONDS LOG

It writes a line into LOG for every trial that it begins to measure.
"""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from optuna.distributions import IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from surgeon.searches.study.shared_study import PROGRAM, SharedStudy, Told
from surgeon.searches.study.storage import open_storage

LAYERS, TRIALS, TOGETHER = 12, 60, 3


def key(params: Mapping[str, int]) -> str:
    """What a trial tries, as text."""
    return "".join(map(str, params.values()))


def ask(stored: Sequence[FrozenTrial], count: int) -> list[FrozenTrial]:
    """Some that nobody has tried, from anywhere on."""
    tried, found = {key(trial.params) for trial in stored}, list[FrozenTrial]()
    start = random.randrange(2**LAYERS)
    for number in range(start, start + 2**LAYERS):
        params = {f"layer {layer}": number >> layer & 1 for layer in range(LAYERS)}
        if key(params) not in tried and len(found) < count:
            kinds = {name: IntDistribution(0, 1) for name in params}
            known = {PROGRAM: key(params)}
            found.append(create_trial(state=TrialState.RUNNING, params=params, distributions=kinds, user_attrs=known))
    return found


def divergence(program: str) -> float:
    """A number that follows from what is tried, and from nothing else."""
    return int.from_bytes(hashlib.sha256(program.encode()).digest()[:4], "big") / 2**32


def open_study(storage: str, name: str) -> SharedStudy:
    """The study; `storage` as `surgeon search --storage` takes it."""
    opened = open_storage(storage, Path(tempfile.gettempdir()))
    return SharedStudy(opened, name, {"layers": LAYERS})


def main() -> None:
    storage, name, seconds, log = sys.argv[1:]

    def measure(taken: Sequence[FrozenTrial], _: Sequence[FrozenTrial]) -> list[Told]:
        with Path(log).open("a") as file:
            file.writelines(f"{key(trial.params)}\n" for trial in taken)
        time.sleep(float(seconds) * len(taken))
        return [Told([divergence(key(trial.params))]) for trial in taken]

    study = open_study(storage, name)
    assert study.kept("base", lambda: time.sleep(float(seconds)) or 7) == 7
    for _ in study.run(ask, measure, TRIALS, TOGETHER):
        pass


if __name__ == "__main__":
    main()
