"""A model from scratch is trained: as one, or rack by rack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from surgeon.exports.in_memory import export
from surgeon.exports.prove import Proof
from surgeon.exports.with_codas import export_with_codas
from surgeon.training.racks.healing import as_one, method_of, racks_record
from surgeon.training.racks.run_files import ProcessOptions
from surgeon.training.racks.subject import RacksToTrain
from surgeon.training.racks.ways import finish_racks, train_racks
from surgeon.training.resume import finish_run
from surgeon.training.run import Trained, train
from surgeon.training.scratch.build import Blueprint
from surgeon.training.texts import TrainTexts


@dataclass(frozen=True)
class ScratchTrained:
    """What training from scratch came to.

    Attributes:
        whole: the model; where there are racks, its figures are those of the last one.
        method: what was trained, for people.
        racks: what each rack came to, as JSON values.
        write: writes the model as a checkpoint, as `surgeon.export` does, and what belongs beside it.
        finish: completes the record of the run whose result is written; called with `folder` and `record`.
    """

    whole: Trained
    method: str
    racks: dict[str, Any] | None = None
    write: Callable[..., Proof] = export
    finish: Callable[..., None] = field(default=finish_run)

    def lines(self) -> Iterator[str]:
        """The figures, for people."""
        for rack in [] if self.racks is None else self.racks["each"][:-1]:
            before, after = (rack[stage]["perplexity"] for stage in ("before", "after"))
            yield f"rack {rack['layers']}: perplexity by its coda {before:.4g} untrained, {after:.4g} trained"
        yield f"untrained {self.whole.before.line()}"
        yield f"trained   {self.whole.after.line()}"


def train_blueprint(plan: Blueprint, texts: TrainTexts, folder: Path, device: str = "cpu") -> ScratchTrained | None:
    """Build a model and train it; a run that was killed goes on where it was.

    Args:
        folder: of the run.
        device: "cpu" or "cuda".

    Returns:
        What came of it; None in every process but the first, where there are several.

    Raises:
        ValueError, OSError: as `train`, and `train_in_turn` where it is trained rack by rack.
    """
    settings, racks = plan.config.settings, plan.racks
    if racks is None:
        one = train(plan.build(), texts, settings, folder, None, plan.program, plan.identity(), device)
        return None if one is None else ScratchTrained(one, settings.method)
    known, model = plan.identity(), plan.build()
    asked, processes = plan.config.racks, None
    if asked is not None and asked.processes:
        processes = ProcessOptions(asked.average, asked.ahead, replicas=asked.replicas)
    found = train_racks(
        RacksToTrain(model, racks, texts, settings, folder, identity=known, seed=settings.seed, device=device),
        processes,
    )
    write = partial(export_with_codas, racks=racks.texts, nodes=racks.ends, depth=racks.depth, codas=found.codas)
    method, each = method_of(racks, settings), racks_record(racks, found.results)
    return ScratchTrained(as_one(found), method, each, write, partial(finish_racks, racks=racks))
