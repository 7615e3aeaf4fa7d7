"""Small runs that tests of healing make."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.models.edit import edit
from surgeon.quality.data import Windows, digest_of
from surgeon.training.run import Trained, train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainingText, TrainTexts
from tests.tiny_models import tiny_model

PAIRED = "[A0 A1] [F0 F1]"


def windows(count: int, seed: int, tokens: int = 8) -> Windows:
    """Random ones."""
    ids = torch.randint(3, 60, (count, tokens), generator=torch.Generator().manual_seed(seed))
    return Windows(ids, "random", digest_of(ids))


TEXTS = TrainTexts(TrainingText.of(windows(10, 1)), windows(3, 2))


def student(dropout: float = 0.0, family: str = "llama", program: str = PAIRED) -> PreTrainedModel:
    """A small edited model, the same every time."""
    return edit(tiny_model(family, 2, dropout=dropout), program)


def run(folder: Path, model: PreTrainedModel | None = None, **settings: Any) -> Trained:
    """A short run on all weights, unless the settings say otherwise."""
    given = {
        "scope": "all",
        "steps": 4,
        "batch": 4,
        "learning_rate": 1e-2,
        "evaluate_every": 2,
        "save_every": 1,
    }
    found = train(model or student(), TEXTS, TrainSettings(**given | settings), folder)
    assert found is not None
    return found


def weights(found: Trained) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in found.model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether they are the same bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def tables(folder: Path) -> dict[str, Any]:
    """What a run's tables say, but for how long it took."""
    return {
        name: pd.read_csv(folder / f"{name}.csv").drop(columns="seconds")
        for name in ("training", "held_out")
    }


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def in_training(model: nn.Module, act: Callable[[int, int, Any], Any]) -> None:
    """Call `act` at every forward pass in training: its number from 1, its windows, the stream before the head.

    It may change that.
    """
    passes = 0

    def hook(module: nn.Module, _: Any, output: Tensor) -> Any:
        nonlocal passes
        if not module.training:
            return None
        passes += 1
        return act(passes, len(output), output)

    model.get_submodule("model.norm").register_forward_hook(hook)
