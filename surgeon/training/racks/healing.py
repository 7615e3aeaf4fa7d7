"""An edited model is healed rack by rack, and written with the racks' codas beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from surgeon.checkpoint.codas import Coda
from surgeon.exports.prove import Proof
from surgeon.exports.with_codas import export_with_codas
from surgeon.training.heal.subject import HealSubject
from surgeon.training.heal.write import record_of, write_healed
from surgeon.training.racks.in_turn import RacksTrained
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.run_files import ProcessOptions
from surgeon.training.racks.subject import RacksToTrain
from surgeon.training.racks.ways import train_racks
from surgeon.training.run import RunFigures, Trained
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts
from surgeon.words import plural


@dataclass(frozen=True)
class RacksHealed:
    """A model that was healed rack by rack.

    Attributes:
        whole: as if it had been healed as one: the last rack's figures are the whole model's.
        results: of every rack.
        record: of the run, as JSON values.
    """

    racks: Racks
    whole: Trained
    codas: tuple[Coda, ...]
    results: tuple[RunFigures, ...]
    record: dict[str, Any]

    def write(
        self,
        subject: HealSubject,
        output: Path,
        form: str = "auto",
        dtype: str | None = None,
        overwrite: bool = False,
    ) -> Proof:
        """Write it as a checkpoint with codas; arguments and errors as `write_healed`."""
        write = partial(
            export_with_codas,
            racks=self.racks.texts,
            nodes=self.racks.ends,
            depth=self.racks.depth,
            codas=self.codas,
        )
        return write_healed(self.whole, subject, self.record, output, form, dtype, overwrite, write)


def heal_racks(
    subject: HealSubject,
    racks: Racks,
    texts: TrainTexts,
    settings: TrainSettings,
    folder: Path,
    device: str = "cpu",
    options: ProcessOptions | None = None,
) -> RacksHealed:
    """Heal a model rack by rack.

    Args:
        racks: of the subject's program.
        folder: of the run.
        options: of processes, one for each rack; by default the racks take turns.

    Raises:
        NotProven, OSError, ValueError: as `HealSubject.student`, `train_in_turn` and `train_in_processes`.
    """
    found = train_racks(racks_to_heal(subject, racks, texts, settings, folder, device), options)
    whole = as_one(found)
    record = record_of(subject, texts, settings, whole) | {"racks": racks_record(racks, found.results)}
    record["method"] = method_of(racks, settings)
    return RacksHealed(racks, whole, found.codas, found.results, record)


def racks_to_heal(
    subject: HealSubject, racks: Racks, texts: TrainTexts, settings: TrainSettings, folder: Path, device: str
) -> RacksToTrain:
    """What is trained to heal a model; codas begin as copies of its last layers, norm and head."""
    student, identity = subject.student(), subject.identity()
    return RacksToTrain(student, racks, texts, settings, folder, subject.loads_original, identity, device=device)


def as_one(found: RacksTrained) -> Trained:
    """Racks' training as that of one model, which the last rack's prediction is."""
    last = found.results[-1]
    seconds = sum(result.seconds for result in found.results)
    return Trained(last.steps, last.tokens, seconds, last.original, last.before, last.after, found.model)


def method_of(racks: Racks, settings: TrainSettings) -> str:
    """How racks were trained, for people."""
    ranges = ", ".join(racks.texts)
    return f"{settings.method}, rack by rack (layers {ranges}) with codas of {plural(racks.depth, 'layer')}"


def racks_record(racks: Racks, results: Sequence[RunFigures]) -> dict[str, Any]:
    """What each rack came to, as JSON values."""
    each = [{"layers": text} | result.to_json() for text, result in zip(racks.texts, results, strict=True)]
    return {"coda": racks.depth, "each": each}
