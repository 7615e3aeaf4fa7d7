"""The papers' hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surgeon.errors import did_you_mean


@dataclass(frozen=True)
class PaperPreset:
    """What a paper trained with, as values of `TrainSettings`.

    Attributes:
        source: where it says so.
    """

    source: str
    values: dict[str, Any]


PRESETS = {
    "lp": PaperPreset(
        "Layer Parallelism, section 5 and table 2",
        {"scope": "edited", "batch": 32, "learning_rate": 1e-4, "schedule": "linear", "warmup": 0, "steps": 4096},
    ),
    "ladder": PaperPreset(
        "Ladder Residual, section 4.2",
        {"scope": "all", "batch": 32, "learning_rate": 5e-6, "schedule": "cosine", "warmup": 200, "epochs": 2.0},
    ),
}


def preset(name: str) -> PaperPreset:
    """The preset of this name.

    Raises:
        ValueError: if there is none.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; {did_you_mean(name, PRESETS)}")
    return PRESETS[name]
