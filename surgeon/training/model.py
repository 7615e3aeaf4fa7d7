"""A whole model is trained, as one or rack by rack; what came of it is written, and the run ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, Strict
from transformers import PreTrainedModel

from surgeon.checkpoint.codas import Coda
from surgeon.exports.in_memory import export, export_with_codas
from surgeon.exports.prove import Proof
from surgeon.language.program import Program
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.run_files import NEVER, ProcessOptions, RacksToTrain, parse_averaging
from surgeon.training.racks.supervisor import commands_by_hand, prepare, train_racks
from surgeon.training.racks.trained import finish_racks
from surgeon.training.resume import finish_run
from surgeon.training.run import Trained, train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts
from surgeon.words import plural


@dataclass(frozen=True)
class RackOptions:
    """How a model is cut by depth into racks, each with a loss of its own, and how these are trained.

    Attributes:
        ranges: of the program's layers, such as "0:4" and "4:8".
        coda: how many layers a rack's coda has; every rack but the last predicts with one of its own.
        processes: train all racks at once, a process each; else one after the other, to the same result.
        average: with processes: average the codas over the racks "never", every so many steps, or "always".
        ahead: with processes: how many micro-batches a rack may be ahead of the next one.
        replicas: with processes: how many of them share each rack's batches.
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
        """The racks of a program, in the numbers of the unedited model's layers.

        Raises:
            ValueError: if it cannot be cut like this, or these options do not go together.
        """
        racks = Racks.parse(self.ranges, program, self.coda)
        if self.replicas > 1 and not self.processes:
            raise ValueError("replicas are processes that share a rack; add processes: true, or leave them out")
        if parse_averaging(self.average) is not None and not self.processes:
            raise ValueError("average needs all racks at the same time; add processes: true, or leave it out")
        return racks

    @property
    def process_options(self) -> ProcessOptions | None:
        """How processes go about it; None where racks take turns."""
        if self.processes:
            return ProcessOptions(self.average, self.ahead, replicas=self.replicas)
        return None


@dataclass(frozen=True)
class TrainedModel:
    """A model that was trained as one, or rack by rack.

    Attributes:
        whole: as if it had been trained as one: the last rack's figures are the whole model's.
        folder: of the run.
        method: what was trained, for people.
        racks: None where it was trained as one.
        figures: of every rack.
        codas: of every rack but the last.
    """

    whole: Trained
    folder: Path
    method: str
    racks: Racks | None = None
    figures: tuple[Trained, ...] = ()
    codas: tuple[Coda, ...] = ()

    def lines(self) -> Iterator[str]:
        """What racks came to by their codas, for people."""
        for rack, one in zip([] if self.racks is None else self.racks.texts[:-1], self.figures, strict=False):
            before = one.before.perplexity
            after = one.after.perplexity
            yield f"rack {rack}: perplexity by its coda {before:.4g} before, {after:.4g} after"

    def record(self, texts: TrainTexts, settings: TrainSettings) -> dict[str, Any]:
        """What is to be known of the training beside the model's quality, as JSON values."""
        entries = {
            "method": self.method,
            **texts.record(),
            "window": texts.training.window,
            "settings": settings.to_json(),
            "steps": self.whole.steps,
            "tokens": self.whole.tokens,
            "seconds": self.whole.seconds,
        }
        if self.racks is not None:
            each = zip(self.racks.texts, self.figures, strict=True)
            entries["racks"] = {
                "coda": self.racks.depth,
                "each": [{"layers": text} | one.to_json() for text, one in each],
            }
        return entries

    def write(self, output: Path, **options: Any) -> Proof:
        """Write it as a checkpoint, with its adapters merged and its codas beside it.

        Args:
            options: as `surgeon.export` takes them.

        Raises:
            NotProven: if what was written is not the model, or its program not the one that was trained.
            OSError, ValueError: as `surgeon.export`.
        """
        model = self.whole.merged()
        racks = self.racks
        if racks is None:
            return export(model, output, **options)
        return export_with_codas(model, output, racks.texts, racks.ends, racks.depth, self.codas, **options)

    def finish(self, record: dict[str, Any]) -> None:
        """Complete the run's record and remove what only the run needed, once the checkpoint is written.

        Raises:
            OSError: if the folder cannot be written.
        """
        if self.racks is None:
            finish_run(self.folder, record)
        else:
            finish_racks(self.folder, self.racks, record)


def train_model(
    model: PreTrainedModel,
    texts: TrainTexts,
    settings: TrainSettings,
    folder: Path,
    *,
    program: Program,
    identity: Mapping[str, Any],
    original: Callable[[], PreTrainedModel] | None = None,
    racks: Racks | None = None,
    processes: ProcessOptions | None = None,
    by_hand: bool = False,
    seed: int | None = None,
    device: str = "cpu",
) -> TrainedModel | None:
    """Train a model as `surgeon.training.run.train` does, or its racks; a run that was killed goes on where it was.

    Args:
        racks: of its program.
        processes: how racks are trained at once; None to train them in turn.
        by_hand: print how the processes of racks are started by hand, unless they are done.
        seed: of what codas begin with; None for copies of the model's last layers.

    Returns:
        What came of it; None in every process but the first, where there are several, and where racks are yet to be
        started by hand.

    Raises:
        ValueError, OSError: as `train`, and as `train_in_turn` and `train_in_processes` of racks.
    """
    if racks is None:
        one = train(model, texts, settings, folder, original, program, dict(identity), device)
        if one is None:
            return None
        return TrainedModel(one, folder, settings.method)
    asked = RacksToTrain(model, racks, texts, settings, folder, original, identity, seed, device)
    if by_hand:
        prepare(asked, processes)
        if commands := commands_by_hand(folder, len(racks)):
            print(*commands, sep="\n")
            return None
    found = train_racks(asked, processes)
    last = found.results[-1]
    seconds = sum(result.seconds for result in found.results)
    whole = Trained(last.steps, last.tokens, seconds, last.original, last.before, last.after, found.model)
    cut = f"rack by rack (layers {', '.join(racks.texts)}) with codas of {plural(racks.depth, 'layer')}"
    return TrainedModel(whole, folder, f"{settings.method}, {cut}", racks, found.results, found.codas)
