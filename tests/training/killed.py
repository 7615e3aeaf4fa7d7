"""Runs that are killed at drawn moments and started again; each process is a fork of one that has imported it all."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.utils.tensorboard  # as a run does

from surgeon.models.edit import edit
from surgeon.quality.data import Windows, digest_of
from surgeon.training import checkpoints
from surgeon.training.checkpoints import TABLES, RunLog
from surgeon.training.run import train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainingText, TrainTexts
from tests.tiny_models import tiny_model

SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"scope": "all", "steps": 5, "learning_rate": 1e-2, "evaluate_every": 2, "save_every": 2},
    "adapters": {
        "lora": 2,
        "steps": 4,
        "micro_batch": 1,
        "learning_rate": 5e-2,
        "evaluate_every": 2,
        "save_every": 1,
    },
    "patience": {"scope": "all", "steps": 20, "learning_rate": 0.02, "evaluate_every": 1, "patience": 2},
}
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
RESULT = "result.json"


class Moments:
    """The moments at which a run changes its folder, by their number; at one of them this process is killed."""

    def __init__(self, folder: Path, fatal: int | None) -> None:
        self.folder, self.fatal, self.count = str(folder), fatal, 0
        sys.addaudithook(self.hear)
        torch.save = self.torn(torch.save, lambda _, path, *__: [Path(path)])
        checkpoints.save_file = self.torn(checkpoints.save_file, lambda _, path, *__: [Path(path)])
        RunLog._add = self.torn(RunLog._add, lambda log, _: [log.folder / name for name in TABLES])

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in CHANGES or (
            event == "open" and isinstance(arguments[1], str) and set("wax") & set(arguments[1])
        )
        if changes and str(arguments[0]).startswith(self.folder):
            self.pass_one()

    def pass_one(self) -> None:
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def torn(self, write: Callable[..., Any], paths: Callable[..., list[Path]]) -> Callable[..., Any]:
        """What writes files, with a moment at which it has written half of them."""

        def writing(*arguments: Any, **options: Any) -> Any:
            before = {path: path.stat().st_size if path.exists() else 0 for path in paths(*arguments)}
            write(*arguments, **options)
            if self.count + 1 == self.fatal:
                for path, size in before.items():
                    os.truncate(path, (size + path.stat().st_size) // 2)
            self.pass_one()

        return writing


def run(folder: Path, name: str, fatal: int | None) -> None:
    """Heal a small model with dropout; at the end, write what came of it."""
    moments = Moments(folder, fatal)
    ids = torch.randint(3, 60, (13, 8), generator=torch.Generator().manual_seed(1))
    training, held_out = (Windows(part, "random", digest_of(part)) for part in (ids[:10], ids[10:]))
    student = edit(tiny_model("llama", 2, dropout=0.2), "[A0 A1] [F0 F1]")
    torch.manual_seed(os.getpid())  # nothing may follow from where random numbers happen to be
    found = train(
        student,
        TrainTexts(TrainingText.of(training), held_out),
        TrainSettings(batch=2, **SETTINGS[name]),
        folder,
    )
    assert found is not None
    state = found.model.state_dict()
    numbers = hashlib.sha256(
        b"".join(key.encode() + state[key].numpy().tobytes() for key in sorted(state))
    )
    said = [found.steps, found.before.to_json(), found.after.to_json()]
    result = {"weights": numbers.hexdigest(), "said": said, "moments": moments.count}
    folder.with_suffix(".json").write_text(json.dumps(result))


def process(folder: Path, name: str, fatal: int | None = None) -> int:
    """The status with which one process of a run ends."""
    child = os.fork()
    if child == 0:
        try:
            run(folder, name, fatal)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def left(folder: Path) -> dict[str, Any]:
    """What a run has left, but for how long it took."""
    tables = {
        name: pd.read_csv(folder / name).drop(columns="seconds").to_csv()
        for name in ("training.csv", "held_out.csv")
    }
    result = json.loads(folder.with_suffix(".json").read_text())
    names = sorted(path.name for path in folder.iterdir())
    return {"weights": result["weights"], "said": result["said"], "files": names, **tables}


def compare(folder: Path, name: str, kills: int, seed: int) -> dict[str, Any]:
    """One run that nobody kills, one that is killed again and again, and in what they differ."""
    whole, killed = folder / f"{name}-whole", folder / f"{name}-{seed}"
    if not whole.exists():
        assert process(whole, name) == 0
    moments = json.loads(whole.with_suffix(".json").read_text())["moments"]
    draw, ended, begun = random.Random(f"{name} {seed}"), [], 0
    while len(ended) < kills and ended[-1:] != [0]:
        begun += any(killed.glob("checkpoint-*"))
        ended.append(process(killed, name, draw.randint(1, moments)))
    # Where the one before it has come to the end, nothing is left to do.
    ended.append(process(killed, name))
    expected, found = left(whole), left(killed)
    return {
        "name": name,
        "ended": ended,
        "begun": begun,
        "different": [key for key in expected if found[key] != expected[key]],
    }


def main(folder: str, kills: str, *seeds: str) -> None:
    """Print a line of JSON for each kind of run and each seed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()  # or collecting would write to all the pages that forks share
    for name in SETTINGS:
        for seed in seeds:
            print(json.dumps(compare(Path(folder), name, int(kills), int(seed))), flush=True)
