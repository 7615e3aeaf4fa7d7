"""What `surgeon.heal` and `surgeon.train` say while they go on."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from accelerate import PartialState

from surgeon.exports.prove import Proof
from surgeon.quality.summary import Quality
from surgeon.training.arguments import describe_devices
from surgeon.training.learned import learned_lines
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts


def announce(
    processes: PartialState,
    where: str,
    what: str,
    texts: TrainTexts,
    settings: TrainSettings,
    tokenizer: Any,
    show_row: bool = False,
) -> None:
    """Say on standard error, once for all processes, what is trained on what; and warn of what to know of the texts."""
    notes = (*texts.notes, *settings.notes_on(len(texts.training)))  # refuses too little text, in every process
    if processes.is_main_process:
        learned = learned_lines(texts.training, tokenizer, show_row)
        say(f"{what}; {texts.line()}", *learned, describe_devices(processes, where))
        for note in notes:
            warnings.warn(note, stacklevel=1)


def say_stages(stages: Mapping[str, Quality | None]) -> None:
    """Say how good the model was, and is, as far as that is known."""
    width = max(map(len, stages))
    say(*(f"{stage:<{width}} {quality.line()}" for stage, quality in stages.items() if quality is not None))


def say_proof(proof: Proof, whose: str) -> None:
    """Say what was proven; `whose` the program is."""
    say(
        f"proof: the program is {whose}; on {proof.tokens} random tokens the logits differ from the trained "
        f"model's {proof.differ}."
    )


def say(*lines: str) -> None:
    """Say something on standard error; empty lines are left out."""
    for line in filter(None, lines):
        print(line, file=sys.stderr, flush=True)
