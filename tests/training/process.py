"""One process of a healing run, for tests that start several: FOLDER FSDP FAMILY PROGRAM LORA HIDDEN."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from surgeon.checkpoint.tensor_file import read_json
from surgeon.models.edit import edit
from surgeon.quality.data import Tokens
from surgeon.training.run import train
from surgeon.training.settings import Distillation, TrainSettings
from surgeon.training.texts import TrainingText, TrainTexts
from surgeon.training.token_store import Packer, as_table, columns
from surgeon.training.trainer import ModelTrainer
from tests.tiny_models import tiny_model
from tests.training.test_run import TEXTS


def documents() -> TrainTexts:
    """Documents in windows, in each of which another number of tokens is predicted."""
    rng, packer = np.random.default_rng(0), Packer(12, "apart")
    rows = [
        row
        for length in rng.integers(2, 20, 24)
        for row in packer.add(
            Tokens(rng.integers(3, 60, length).astype(np.int32), rng.random(length) < 0.5)
        )
    ]
    return TrainTexts(
        TrainingText(datasets.Dataset(as_table(rows, columns("apart"), 12)), "documents", "0"),
        TEXTS.held_out,
    )


def require_shared(trainer: Any) -> None:
    """Refuse a process that does not share out every parameter, or holds much more than half of their numbers."""
    parameters = list(trainer.model_wrapped.parameters())
    assert all(isinstance(one, DTensor) for one in parameters)
    assert sum(one.to_local().numel() for one in parameters) < 0.55 * sum(
        one.numel() for one in parameters
    )


def main(folder: str, sharded: str, family: str, program: str, lora: str, hidden: str) -> None:
    """Heal a tiny model, and write what comes of it: the norm of every parameter, by name.

    Args:
        sharded: "fsdp" or "deepspeed"; else the model is whole in each process.
    """
    torch.set_num_threads(1)
    arguments: dict[str, Any] = {"fsdp": True} if sharded == "fsdp" else {}
    if sharded == "deepspeed":
        arguments["deepspeed"] = read_json(
            Path(__file__).parents[2] / "recipes" / "launch" / "zero3.json"
        )
        # Share tiny ones, too.
        arguments["deepspeed"]["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    settings = TrainSettings(
        steps=4, batch=4, learning_rate=1e-2, evaluate_every=2, save_every=2, lora=int(lora) or None,
        distillation=Distillation(hidden=float(hidden)), arguments=arguments,
    )  # fmt: skip
    student = edit(tiny_model(family, 3, dropout=0.0), program)
    whole_model = ModelTrainer.whole_model

    def gathered(trainer: ModelTrainer) -> Any:
        if sharded == "fsdp":
            require_shared(trainer)
        return whole_model(trainer)

    with patch.object(ModelTrainer, "whole_model", gathered):
        found = train(
            student, documents(), settings, Path(folder), lambda: tiny_model(family, 3, dropout=0.0)
        )
    if found is not None:
        # What slices share under each of its names.
        every = found.merge().named_parameters(remove_duplicate=False)
        norms = {name: float(parameter.detach().norm()) for name, parameter in every}
        (Path(folder) / "norms.json").write_text(json.dumps(norms))


if __name__ == "__main__":
    main(*sys.argv[1:])
