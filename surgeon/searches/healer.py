"""Healing a search's candidates: for each a copy of the model with its program, trained as `surgeon heal` does."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgeon.analysis.subject import Subject
from surgeon.checkpoint.load import load
from surgeon.checkpoint.streamed import streamed_layers
from surgeon.language.program import Program
from surgeon.models.edit import edit, restore
from surgeon.models.weights import FactorSource
from surgeon.provenance import FORMAT
from surgeon.quality.data import Windows, load_windows, shared_windows
from surgeon.quality.summary import estimate
from surgeon.searches.healing import HealedProgram
from surgeon.searches.trial import MeasuredProgram
from surgeon.searches.winners import Measured
from surgeon.training.distill.distiller import Distillation
from surgeon.training.held_out import HeldOutQuality
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainingText, TrainTexts


@dataclass(frozen=True)
class CandidateHealing:
    """That candidates are healed before the choice among them, in a user's words; checked as it is made.

    Attributes:
        steps: of each; None: they are not healed.
        data: text to heal on, as `load_windows` takes it.
        batch: windows of text in a step.
        holdout: tokens that are held out, on which they are compared; None: the default.

    Raises:
        ValueError: if healing lacks its text, or text lacks the healing, or nothing is held out.
    """

    steps: int | None = None
    data: str | None = None
    batch: int = 8
    holdout: int | None = None

    def __post_init__(self) -> None:
        if self.steps is None:
            if self.data is not None:
                raise ValueError("text to heal on without a number of steps heals nothing; say how many steps")
            return
        if self.data is None:
            raise ValueError(f"to heal for {self.steps} steps takes text, apart from the one that is searched on")
        if self.holdout == 0:
            raise ValueError(
                f"candidates that are healed ({self.steps} steps) are compared on held-out text, and with 0 tokens "
                "none is held out; leave that out"
            )

    def healer(
        self,
        subject: Subject,
        held_out: Windows | None,
        by: Measured,
        folder: Path,
        factors: FactorSource | None = None,
        made: Mapping[str, Any] | None = None,
    ) -> CandidateHealer | None:
        """What heals a candidate; None if none is to be.

        Args:
            by: what candidates are compared by.
            folder: for the checkpoints of runs.
            factors: of matrices that programs have ranks for, and what they follow from, as JSON values; by default the
                plain ones.

        Raises:
            FileNotFoundError: if there is no such text.
            ValueError: if it is too short, or not apart from the text that is searched or judged on; or if the model
                does not fit into memory.
        """
        if self.steps is None or self.data is None or held_out is None:
            return None
        searched, window = subject.windows, subject.windows.ids.shape[1]
        tokens = self.steps * self.batch * window
        text = load_windows(subject.opened.tokenizer, self.data, window, tokens, searched.separator, at_most=True)
        if len(text.ids) < self.batch:
            raise ValueError(
                f"{self.data} has {len(text.ids)} windows of {window} tokens to heal on, fewer than one batch of "
                f"{self.batch}; give more text, or a smaller batch or window"
            )
        for note in text.notes:
            warnings.warn(note, stacklevel=2)
        require_apart(text, searched, held_out)
        settings = brief_settings(self.steps, self.batch, by)
        texts = TrainTexts(TrainingText.of(text), held_out)
        model = subject.opened
        return CandidateHealer(model.folder, model.hash, subject.model, texts, settings, folder, factors, made or {})

    def require_layers_in_turn(self, own: Program | None) -> None:
        """Refuse to heal candidates of a model that runs a program of its own.

        Raises:
            ValueError: if candidates are to be healed.
        """
        if self.steps is not None and own is not None:
            raise ValueError(
                "candidates are healed of models whose layers run one after the other; search without, and heal what "
                "the recipe gives: surgeon heal recipe.yaml"
            )


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
        factors: of matrices that programs have ranks for; by default the plain ones.
        made: what these follow from, as JSON values.

    Raises:
        ValueError: if the original's weights are read layer by layer.
    """

    source: Path
    model_hash: str
    original: PreTrainedModel
    texts: TrainTexts
    settings: TrainSettings
    folder: Path
    factors: FactorSource | None = None
    made: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if streamed_layers(self.original) is not None:
            raise ValueError(
                f"candidates are trained in memory, where {self.source.name} does not fit even once: leave healing "
                "out, or search on a machine with more memory"
            )

    @property
    def how(self) -> str:
        settings, text = self.settings, self.texts.training
        tokens = settings.steps_on(len(text)) * settings.batch * text.window
        return f"healed for {settings.steps:,} steps ({settings.method}) on {tokens:,} tokens of {text.source}"

    @property
    def key(self) -> str:
        """What healed programs depend on beside the program, in a few letters."""
        identity = {
            "format": FORMAT,
            "original": self.model_hash,
            "settings": self.settings.to_json(),
            "data": self.texts.training.digest,
            "held_out": self.texts.held_out.digest,
            **({"factors": dict(self.made)} if self.made else {}),
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def record(self) -> dict[str, Any]:
        """What a search's record says of it, as JSON values."""
        return {"steps": self.settings.steps, **self.texts.training.record(), "settings": self.settings.to_json()}

    def __call__(self, program: Program) -> HealedProgram:
        """Heal a program and measure it on held-out text.

        Raises:
            ValueError, OSError: as `surgeon.training.run.train`.
        """
        from surgeon.training.run import train

        place = self.folder / hashlib.sha256(f"{self.key} {program}".encode()).hexdigest()[:16]
        student = edit(load(self.source).float(), program, factors=self.factors)
        identity = {"original": self.model_hash, "program": str(program)}
        device = self.original.device.type
        try:
            found = train(
                student, self.texts, self.settings, place, lambda: self.original, identity=identity, device=device
            )
        finally:
            restore(self.original)  # a teacher runs its own program, edited
        assert found is not None, "a search heals in one process"
        values = self._held_out.values(found.model)
        nll = values["nll"]
        divergence = values["divergence"]
        predicted = self.texts.held_out.predicted
        measured = MeasuredProgram.of(estimate(nll, divergence), predicted, nll, divergence)
        healed = HealedProgram(measured, found.tokens, found.seconds)
        del student, found
        gc.collect()  # a trainer refers to itself; the next candidate needs the room
        shutil.rmtree(place)
        return healed

    @cached_property
    def _held_out(self) -> HeldOutQuality:
        return HeldOutQuality(self.texts.held_out, self.original)
