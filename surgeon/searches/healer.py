"""Healing a search's candidates: for each a copy of the model with its program, trained as `surgeon heal` does."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgeon.checkpoint.load import load
from surgeon.checkpoint.streamed import streamed_layers
from surgeon.language.program import Program
from surgeon.models.edit import edit
from surgeon.provenance import FORMAT
from surgeon.quality.data import Windows, shared_windows
from surgeon.quality.summary import estimate
from surgeon.searches.healing import HealedProgram
from surgeon.searches.trial import MeasuredProgram
from surgeon.searches.winners import Measured
from surgeon.training.distill.distiller import Distillation
from surgeon.training.held_out import HeldOutQuality
from surgeon.training.run import train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts


def brief_settings(steps: int, batch: int, by: Measured) -> TrainSettings:
    """How candidates are healed: towards what they are compared by, the original's predictions or the text.

    Raises:
        ValueError: if there is no such number of steps, or of windows in a batch.
    """
    learned = Distillation() if by == "divergence" else None
    # What is measured before and after is enough.
    return TrainSettings(steps=steps, batch=batch, distillation=learned, evaluate_every=steps + 1)


def require_apart(training: Windows, *others: Windows) -> None:
    """Refuse to heal on text that candidates are chosen or judged by.

    Raises:
        ValueError: if windows of it are in the training text, too.
    """
    for other in others:
        if again := shared_windows(training, other):
            raise ValueError(
                f"{again} windows of {training.source}, to be healed on, are in the text of the search or in what it "
                f"holds out ({other.source}), too; a model is not judged by what it was trained on: heal on other text"
            )


@dataclass(frozen=True)
class CandidateHealer:
    """Heals programs of a model, one after the other; killed, it goes on with the one it was at.

    Attributes:
        source: the model's folder, from which every candidate is loaded anew.
        model_hash: which model it is.
        original: the same model, unedited; it is left as it is.
        folder: for a run's checkpoints, which are gone when it is over.

    Raises:
        ValueError: if the original's weights are read layer by layer.
    """

    source: Path
    model_hash: str
    original: PreTrainedModel
    texts: TrainTexts
    settings: TrainSettings
    folder: Path

    def __post_init__(self) -> None:
        if streamed_layers(self.original) is not None:
            raise ValueError(
                f"candidates are trained in memory, where {self.source.name} does not fit even once: leave --heal out, "
                "or search on a machine with more memory"
            )

    @property
    def how(self) -> str:
        """What it does, for people."""
        settings, text = self.settings, self.texts.training
        tokens = settings.steps_on(len(text.ids)) * settings.batch * text.ids.shape[1]
        return f"healed for {settings.steps:,} steps ({settings.method}) on {tokens:,} tokens of {text.source}"

    @property
    def identity(self) -> dict[str, Any]:
        """What healed programs depend on beside the program, as JSON values."""
        texts = self.texts
        return {
            "format": FORMAT,
            "original": self.model_hash,
            "settings": self.settings.to_json(),
            "data": texts.training.digest,
            "held_out": texts.held_out.digest,
        }

    @property
    def record(self) -> dict[str, Any]:
        """What a search's record says of it, as JSON values."""
        text, settings = self.texts.training, self.settings
        return {
            "steps": settings.steps,
            **text.record(),
            "settings": settings.to_json(),
        }

    @property
    def key(self) -> str:
        """The same in a few letters."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]

    def __call__(self, program: Program) -> HealedProgram:
        """Heal a program and measure it on held-out text.

        Raises:
            ValueError, OSError: as `surgeon.training.run.train`.
        """
        place = self.folder / hashlib.sha256(f"{self.key} {program}".encode()).hexdigest()[:16]
        student = edit(load(self.source).float(), program)
        identity = {"original": self.model_hash, "program": str(program)}
        device = self.original.device.type
        found = train(
            student, self.texts, self.settings, place, lambda: self.original, identity=identity, device=device
        )
        assert found is not None, "a search heals in one process"
        measured = self._measured(found.model)
        healed = HealedProgram(measured, found.tokens, found.seconds)
        del student, found
        gc.collect()  # a trainer refers to itself; the next candidate needs the room
        shutil.rmtree(place)
        return healed

    def _measured(self, model: Any) -> MeasuredProgram:
        nll, divergence = self._held_out.values(model)
        assert divergence is not None
        found = estimate(nll, divergence)
        return MeasuredProgram(
            found.perplexity,
            found.divergence,
            found.divergence_low,
            found.divergence_high,
            self.texts.held_out.predicted,
            tuple(nll.tolist()),
            tuple(divergence.tolist()),
        )

    @cached_property
    def _held_out(self) -> HeldOutQuality:
        return HeldOutQuality(self.texts.held_out, self.original)
