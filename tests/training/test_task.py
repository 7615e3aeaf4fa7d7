"""A task of its own in place of the text: what it is told, in a run and in one that goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from surgeon.quality.head import HeldOutQuality
from surgeon.quality.summary import Quality
from surgeon.training.head_loss import text_loss
from surgeon.training.run import Trained, TrainingTask, train
from surgeon.training.settings import Distillation, TrainSettings
from surgeon.training.texts import RunOrder
from tests.training.runs import TEXTS, run, same, student, weights

SETTINGS = {
    "scope": "all",
    "steps": 4,
    "batch": 4,
    "micro_batch": 2,
    "evaluate_every": 2,
    "save_every": 2,
}


class Watched(HeldOutQuality):
    """Keeps after which steps it was asked."""

    def __init__(self) -> None:
        super().__init__(TEXTS.held_out, None)
        self.asked: list[int] = []

    def measure(self, model: nn.Module, step: int = 0) -> Quality:
        self.asked.append(step)
        return super().measure(model, step)


class HalfTheLoss:
    """The text's loss, halved; keeps which windows it got, and from where in the run's order."""

    def __init__(self) -> None:
        self.places: list[list[int]] = []
        self.windows: list[int] = []

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        self.places.append(inputs["place"].tolist())
        self.windows += inputs["index"].tolist()
        assert torch.equal(TEXTS.training.ids[inputs["index"]], inputs["input_ids"])
        return {"loss": text_loss(model, inputs) / 2}


class Counter(TrainerCallback):
    steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1


def trained(folder: Path, task: TrainingTask, **options: Any) -> Trained:
    settings = TrainSettings(**SETTINGS | options)
    found = train(student(), TEXTS, settings, folder, task=task)
    assert found is not None
    return found


def test_a_task_is_told_where_the_run_is(tmp_path: Path) -> None:
    held_out, loss, counter = Watched(), HalfTheLoss(), Counter()
    trained(tmp_path, TrainingTask(held_out.measure, loss, [counter]))
    assert loss.places == [[first, first + 1] for first in range(0, 16, 2)]
    assert loss.windows == list(RunOrder(10, 4, 4, 0))
    assert held_out.asked == [0, 2, 4, 4]
    assert counter.steps == 4


def test_a_run_that_goes_on_has_the_places_that_are_left(tmp_path: Path) -> None:
    class Killed(HalfTheLoss):
        def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
            if inputs["place"][0] == 14:
                raise KeyboardInterrupt
            return super().__call__(model, inputs)

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "killed", TrainingTask(Watched().measure, Killed()))
    held_out, loss = Watched(), HalfTheLoss()
    found = trained(tmp_path / "killed", TrainingTask(held_out.measure, loss))
    assert loss.places == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert held_out.asked == [4, 4]
    assert same(
        weights(found),
        weights(trained(tmp_path / "whole", TrainingTask(Watched().measure, HalfTheLoss()))),
    )


def test_its_loss_is_what_is_trained(tmp_path: Path) -> None:
    """Half the loss with plain gradient descent is half the rate on the whole loss."""
    plain = {"optim": "sgd", "max_grad_norm": 0.0}
    found = trained(
        tmp_path / "half",
        TrainingTask(Watched().measure, HalfTheLoss()),
        learning_rate=0.5,
        arguments=plain,
    )
    whole = run(tmp_path / "whole", **SETTINGS | {"learning_rate": 0.25, "arguments": plain})
    for name, value in weights(whole).items():
        assert torch.allclose(weights(found)[name], value, atol=1e-6), name
    assert not same(weights(whole), dict(student().state_dict()))


def test_a_task_is_not_distilled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not distilled as well"):
        trained(tmp_path, TrainingTask(Watched().measure), distillation=Distillation())
