"""What a run says while it goes on: progress, tables, TensorBoard."""

from __future__ import annotations

import time
from typing import Any

from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from surgeon.progress import Advance
from surgeon.training.run_log import RunLog
from surgeon.training.trainer import ModelTrainer


class Recorder(TrainerCallback):
    """Writes the tables of a run, and moves its progress bar.

    Attributes:
        trainer: whose run it is.
        log: has the tables; None in every process but the first.
        advance: moves the progress bar; set once there is one, in the first process.
        latest: what the progress bar says beside the time left.
    """

    def __init__(self, trainer: ModelTrainer, log: RunLog | None, tokens_per_step: int) -> None:
        self.trainer, self.log, self.tokens = trainer, log, tokens_per_step
        self.advance: Advance = lambda _: None
        self.latest: dict[str, float] = {}
        self._begun = time.monotonic()
        self._before = 0.0 if log is None else log.seconds

    @property
    def seconds(self) -> float:
        """Of the run so far, with those of earlier processes."""
        return self._before + time.monotonic() - self._begun

    def note(self) -> str:
        """The latest numbers, in as many words as stand beside a bar on a narrow terminal."""
        names = ("loss", "divergence" if "divergence" in self.latest else "perplexity")
        return ", ".join(f"{name} {self.latest[name]:.4g}" for name in names if name in self.latest)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._begun = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        del args, kwargs
        self.advance(1)
        if control.should_save or state.global_step >= state.max_steps:
            control.should_log = True  # so that a run that goes on from here has the same rows
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        del args, control, kwargs
        if logs is None or "loss" not in logs:
            return
        self.latest["loss"] = logs["loss"]
        if self.log is not None:
            place = {"step": state.global_step, "tokens": state.global_step * self.tokens, "seconds": self.seconds}
            self.log.training(place | logs)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        del args, control, kwargs
        quality = self.trainer.latest
        assert quality is not None
        self.latest["perplexity"] = quality.perplexity
        if quality.divergence is not None:
            self.latest["divergence"] = quality.divergence
        if self.log is not None:
            self.log.held_out(state.global_step, self.seconds, quality)


class EarlyEnd(EarlyStoppingCallback):
    """Early stopping that a run which goes on takes up where it was; also where it was at its end."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[no-untyped-call]
        states: Any = state.stateful_callbacks
        kept = states[type(self).__name__]["attributes"]
        self.early_stopping_patience_counter = kept["early_stopping_patience_counter"]
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True
