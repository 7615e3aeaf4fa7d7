"""A worker of a search that takes no model: what each trial costs is made up, and takes a known time.

    python -m scripts.search.made_up STORAGE STUDY SECONDS LOG

It writes a line into LOG for every trial that it begins to measure.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import optuna

from surgeon.searches.study import compute_once, open_storage, open_study, run_trials

LAYERS = 12
TRIALS = 60


def key(params: Mapping[str, int]) -> str:
    """What a trial tries, as text."""
    return "".join(map(str, params.values()))


def divergence(program: str) -> float:
    """A number that follows from what is tried, and from nothing else."""
    return int.from_bytes(hashlib.sha256(program.encode()).digest()[:4], "big") / 2**32


def made_up_study(storage: str, name: str) -> optuna.Study:
    """The study; `storage` as `surgeon search --storage` takes it."""
    opened = open_storage(storage, Path(tempfile.gettempdir()))
    study = open_study(opened, name, {"layers": LAYERS}, ["divergence"])
    study.sampler = optuna.samplers.RandomSampler()
    return study


def main() -> None:
    storage, name, seconds, log = sys.argv[1:]

    def measure(trial: optuna.Trial) -> float:
        params = {f"layer {layer}": trial.suggest_int(f"layer {layer}", 0, 1) for layer in range(LAYERS)}
        with Path(log).open("a") as file:
            file.write(f"{key(params)}\n")
        time.sleep(float(seconds))
        return divergence(key(params))

    study = made_up_study(storage, name)
    assert compute_once(study, "base", lambda: time.sleep(float(seconds)) or 7) == 7
    run_trials(study, measure, TRIALS, None, lambda _: None)


if __name__ == "__main__":
    main()
