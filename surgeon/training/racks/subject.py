"""What is trained rack by rack, whichever way: in turn, or in a process for each rack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgeon.training.racks.partition import Racks
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts


@dataclass(frozen=True, eq=False)
class RacksToTrain:
    """The racks of a model, and how and where they are trained.

    Attributes:
        whole: the model, edited or not, which is left as it is; racks that take turns need numbers of at least 32 bits.
        racks: of its program.
        folder: of the runs.
        original: loads what divergence is from, and what racks that are distilled learn from; None where it is not
            known.
        identity: what the whole model follows from, as JSON values.
        seed: of the random numbers that codas begin with; None for copies of the model's last layers.
        device: "cpu" or "cuda".

    Raises:
        ValueError: if the settings are not for racks, or there is nothing to distil from.
    """

    whole: PreTrainedModel
    racks: Racks
    texts: TrainTexts
    settings: TrainSettings
    folder: Path
    original: Callable[[], PreTrainedModel] | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_settings(self.settings)
        if self.settings.distillation is not None and self.original is None:
            raise ValueError("there is no original to distil from; name it as the teacher")

    def identity_of_racks(self) -> dict[str, Any]:
        """What every rack's run follows from, beside settings and text, as JSON values."""
        distillation = self.settings.distillation
        distilled = {} if distillation is None else {"distillation": asdict(distillation)}
        cut = {"racks": self.racks.texts, "coda": self.racks.depth, "coda_seed": self.seed}
        return {**self.identity} | cut | distilled

    def settings_and_text(self) -> dict[str, Any]:
        """What `train` adds to the identity of a run."""
        texts = {"data": self.texts.training.digest, "held_out": self.texts.held_out.digest}
        return {"settings": own_settings(self.settings).to_json()} | texts


def own_settings(settings: TrainSettings) -> TrainSettings:
    """What `train` gets: what a rack learns from the original is its task's."""
    return replace(settings, distillation=None)


def check_settings(settings: TrainSettings) -> None:
    """Refuse settings that racks cannot be trained with.

    Raises:
        ValueError: naming the one, and what to do.
    """
    if settings.scope == "edited":
        raise ValueError("racks train their codas, too, which no edit has touched; train all weights, or norms")
    if settings.distillation is not None and not settings.distillation.hidden:
        raise ValueError(
            "racks learn the original's streams, each those of its own stretch, and only the last one its predictions; "
            "distil both, or hidden"
        )
    if settings.lora is not None:
        raise ValueError("racks are trained without adapters; leave lora out")
    if settings.patience is not None:
        raise ValueError("racks are trained side by side, and none of them ends before the others; drop patience")
