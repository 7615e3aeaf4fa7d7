"""What `surgeon.heal` and `surgeon.train` have in common: what they say meanwhile, and their result."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate import PartialState

from surgeon.exports.prove import Proof
from surgeon.library.opening import warn
from surgeon.quality.text import TextQuality
from surgeon.training.arguments import describe_devices
from surgeon.training.texts import TrainTexts


@dataclass(frozen=True)
class TrainingResult:
    """A model that was trained, and is a checkpoint now.

    Attributes:
        folder: of the checkpoint; its run, with tables, lies in `folder.run`.
        stages: quality on held-out text by its stage, in order: original (where it is known), edited and healed; of a
            model from scratch untrained and trained.
        steps: that were made; fewer than asked for where it ended early.
        tokens: of training text, counted as often as they were seen.
        seconds: that the training took.
        proof: that what was written is the model; of a base without the adapter that is kept beside it.
    """

    folder: Path
    stages: Mapping[str, TextQuality]
    steps: int
    tokens: int
    seconds: float
    proof: Proof

    def table(self) -> pd.DataFrame:
        """Perplexity and divergence (nats per token) with the ends of their 95% intervals, a row for each stage."""
        rows: dict[str, dict[str, Any]] = {}
        for stage, quality in self.stages.items():
            rows[stage] = {}
            for name in ("perplexity", "divergence"):
                low, high = getattr(quality, f"{name}_interval") or (None, None)
                rows[stage] |= {name: getattr(quality, name), f"{name}_low": low, f"{name}_high": high}
        return pd.DataFrame.from_dict(rows, orient="index").astype(float)

    def __str__(self) -> str:
        return "\n".join([*_lines(self.stages), str(self.folder)])


def announce(processes: PartialState, where: str, what: str, texts: TrainTexts) -> None:
    """Say on standard error, once for all processes, what is trained on what; and warn of what to know of the texts."""
    if processes.is_main_process:
        say(f"{what}; {texts.line()}", describe_devices(processes, where))
        warn(texts.notes)


def say_stages(stages: Mapping[str, TextQuality]) -> None:
    """Say how good the model was, and is."""
    say(*_lines(stages))


def say_proof(proof: Proof, whose: str) -> None:
    """Say what was proven; `whose` the program is."""
    exact = f"{proof.exact:.1g} of their scale in float32"
    rounded = "" if proof.dtype == "float32" else f", and by {proof.written:.1g} once rounded to {proof.dtype}"
    say(
        f"proof: the program is {whose}; on {proof.tokens} random tokens the logits differ from the trained "
        f"model's by {exact}{rounded}."
    )


def say(*lines: str) -> None:
    """Say something on standard error; empty lines are left out."""
    for line in filter(None, lines):
        print(line, file=sys.stderr, flush=True)


def _lines(stages: Mapping[str, TextQuality]) -> list[str]:
    width = max(map(len, stages))
    return [f"{stage:<{width}} {quality.line()}" for stage, quality in stages.items()]
