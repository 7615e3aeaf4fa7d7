"""Training of a whole model, at once or rack by rack: options, messages, result and its checkpoint."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from accelerate import PartialState
from pydantic import ConfigDict, Field, Strict
from transformers import PreTrainedModel

from surgeon.exports.prove import Proof
from surgeon.language.program import Program
from surgeon.quality.summary import Quality
from surgeon.training.arguments import describe_devices
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.run_files import (
    NEVER,
    ProcessOptions,
    RacksToTrain,
    parse_averaging,
)
from surgeon.training.racks.supervisor import commands_by_hand, prepare, train_in_processes
from surgeon.training.racks.task import TrainedModel, train_in_turn
from surgeon.training.run import train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainingText, TrainTexts
from surgeon.training.token_store import IGNORED


@dataclass(frozen=True)
class RackOptions:
    """Options of training by racks: cuts by depth, and the processes of each.

    Attributes:
        ranges: of the program's layers, such as "0:4" and "4:8".
        coda: layers of a rack's coda; every rack but the last predicts with one of its own.
        processes: train all racks at once, a process each; else one after the other, to the same result.
        average, ahead, replicas: of processes, as `ProcessOptions` has them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # annotations are for where it is read from a file

    ranges: Annotated[list[str], Strict(), Field(min_length=2)]
    coda: Annotated[int, Strict(), Field(ge=0)] = 1
    processes: Annotated[bool, Strict()] = False
    average: Annotated[int, Strict()] | str = NEVER
    ahead: Annotated[int, Strict(), Field(ge=1)] = 4
    replicas: Annotated[int, Strict(), Field(ge=1)] = 1

    def __post_init__(self) -> None:
        if isinstance(self.ranges, str):
            raise ValueError(f'the ranges of racks are several, as ["0:4", "4:8"], not {self.ranges!r}')

    def cut(self, program: Program) -> Racks:
        """Cut a program into racks, in the numbers of the unedited model's layers.

        Raises:
            ValueError: if it cannot be cut like this, or these options do not go together.
        """
        racks = Racks.parse(self.ranges, program, self.coda)
        if self.replicas > 1 and not self.processes:
            raise ValueError(
                "replicas are processes that share a rack; add processes: true, or leave them out"
            )
        if parse_averaging(self.average) is not None and not self.processes:
            raise ValueError(
                "average needs all racks at the same time; add processes: true, or leave it out"
            )
        return racks

    @property
    def process_options(self) -> ProcessOptions | None:
        if self.processes:
            return ProcessOptions(self.average, self.ahead, replicas=self.replicas)
        return None


def train_model(
    model: PreTrainedModel,
    texts: TrainTexts,
    settings: TrainSettings,
    folder: Path,
    *,
    program: Program,
    identity: Mapping[str, Any],
    original: Callable[[], PreTrainedModel] | None = None,
    racks: Racks | None,
    processes: ProcessOptions | None,
    by_hand: bool = False,
    seed: int | None = None,
    device: str,
) -> TrainedModel | None:
    """Train a model as `surgeon.training.run.train` does, or its racks; a run that was killed resumes.

    Args:
        racks: of its program.
        processes: how racks are trained at once; None to train them in turn.
        by_hand: print how the processes of racks are started by hand, unless they are done.
        seed: of the codas' first numbers; None for copies of the model's last layers.

    Returns:
        None in all processes but the first, and where racks are yet to be started by hand.

    Raises:
        ValueError, OSError: as `train`, `train_in_turn` and `train_in_processes`.
    """
    if racks is None:
        one = train(model, texts, settings, folder, original, program, dict(identity), device)
        if one is None:
            return None
        return TrainedModel(one, folder, settings.method)
    asked = RacksToTrain(model, racks, texts, settings, folder, original, identity, seed, device)
    if by_hand:
        prepare(asked, processes or ProcessOptions())
        if commands := commands_by_hand(folder, len(racks)):
            print(*commands, sep="\n")
            return None
    if processes is None:
        return train_in_turn(asked)
    return train_in_processes(asked, processes)


_MARKS = ("\u27e6", "\u27e7")  # white square brackets, around what is learned
_ROWS_AT_ONCE = 1000


def learned_lines(text: TrainingText, tokenizer: Any, show_row: bool = False) -> list[str]:
    """Describe how many tokens of a text are learned, where not all but the first of each window are.

    Args:
        show_row: add the first row, as text with what is learned of it between brackets.
    """
    lines = []
    if "labels" in text.rows.column_names:
        blocks = text.rows.select_columns("labels").with_format("numpy").iter(_ROWS_AT_ONCE)
        learned = sum(int((block["labels"] != IGNORED).sum()) for block in blocks)
        total = len(text) * text.window
        lines.append(f"of the {total:,} tokens to train on, padding among them, {learned:,} are learned")
    if show_row:
        row = text.rows.with_format("numpy")[0]
        ids = row["input_ids"]
        in_loss = row.get("labels", row["input_ids"]) != IGNORED
        if "position_ids" in row:
            begins = np.flatnonzero(row["position_ids"] == 0)
        else:
            begins = np.zeros(1, int)
        end = begins[1] if len(begins) > 1 else len(ids)
        # From what is learned to what is not, and back.
        turns = np.flatnonzero(np.diff(in_loss[:end])) + 1
        parts = [
            (tokenizer.decode(ids[first:last]), in_loss[first])
            for first, last in pairwise([0, *turns, end])
        ]
        lines += [
            f"one row, what is learned of it between {' '.join(_MARKS)}:",
            "".join(
                f"{_MARKS[0]}{part}{_MARKS[1]}" if is_learned else part for part, is_learned in parts
            ),
        ]
    return lines


def announce(
    processes: PartialState,
    where: str,
    what: str,
    texts: TrainTexts,
    settings: TrainSettings,
    tokenizer: Any,
    show_row: bool = False,
) -> None:
    """Print once for all processes what is trained on what, and warn of notes on the texts."""
    # Refuses too little text, in every process.
    notes = (*texts.notes, *settings.notes_on(len(texts.training)))
    if processes.is_main_process:
        learned = learned_lines(texts.training, tokenizer, show_row)
        say(f"{what}; {texts.line()}", *learned, describe_devices(processes, where))
        for note in notes:
            warnings.warn(note, stacklevel=1)


def say_stages(stages: Mapping[str, Quality | None]) -> None:
    """Print the model's quality at each stage."""
    width = max(map(len, stages))
    say(
        *(
            f"{stage:<{width}} {quality.line()}"
            for stage, quality in stages.items()
            if quality is not None
        )
    )


def say_proof(proof: Proof, whose: str) -> None:
    """Print a proof; `whose` the program is."""
    say(
        f"proof: the program is {whose}; on {proof.tokens} random tokens the logits differ from the trained "
        f"model's {proof.differ}."
    )


def say(*lines: str) -> None:
    """Print lines on standard error, without empty ones."""
    for line in filter(None, lines):
        print(line, file=sys.stderr, flush=True)
