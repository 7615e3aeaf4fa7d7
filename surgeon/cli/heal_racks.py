"""`surgeon heal --racks`: an edited model is healed rack by rack, each with a coda and a loss of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from surgeon.checkpoint.prove import Proof
    from surgeon.train.heal.subject import HealSubject
    from surgeon.train.settings import TrainSettings
    from surgeon.train.texts import TrainTexts


@dataclass(frozen=True)
class HealRacksArguments:
    """Racks that are healed one by one, in the user's words; a group of options (see grouped.py)."""

    racks: Annotated[
        str | None,
        typer.Option(
            metavar="RANGES",
            help="Cut the model by depth into racks (0:8,8:16 are layers 0 to 7 and 8 to 15), each trained by a loss "
            "of its own; no gradient goes from one to another. All weights are trained.",
            show_default=False,
        ),
    ] = None
    coda: Annotated[
        int | None,
        typer.Option(
            metavar="LAYERS",
            help="With --racks: private layers that every rack but the last predicts with, begun as copies of the "
            "model's last ones and kept beside the checkpoint. Default: 1.",
            show_default=False,
        ),
    ] = None

    def check(self, keep_adapter: bool) -> None:
        """Refuse options that do not go together.

        Raises:
            ValueError: naming them.
        """
        if self.racks is None and self.coda is not None:
            raise ValueError("--coda says what racks predict with, and there are none; add --racks, or drop it")
        if self.racks is not None and keep_adapter:
            raise ValueError("--racks trains the weights themselves; leave --keep-adapter out")


def heal_by_racks(
    asked: HealRacksArguments,
    subject: HealSubject,
    texts: TrainTexts,
    settings: TrainSettings,
    folder: Path,
    device: str,
    say: Callable[[str], None],
    write: dict[str, Any],
) -> Proof:
    """Heal the racks of a model, and write what they come to.

    Args:
        write: what `RacksHealed.write` gets beside the subject.

    Raises:
        FileNotFoundError, OSError, ValueError: as `train_in_turn` and `surgeon.export`.
    """
    from surgeon.train.racks.healing import heal_racks
    from surgeon.train.racks.in_turn import finish_racks
    from surgeon.train.racks.partition import Racks

    assert asked.racks is not None
    racks = Racks.parse(asked.racks, subject.program, 1 if asked.coda is None else asked.coda)
    found = heal_racks(subject, racks, texts, settings, folder, device)
    for rack, result in zip(racks.texts[:-1], found.results, strict=False):
        perplexities = f"{result.before.perplexity:.4g} before, {result.after.perplexity:.4g} after"
        say(f"rack {rack}: perplexity by its coda {perplexities}")
    whole = found.whole
    for name, quality in (("original", whole.original), ("edited", whole.before), ("healed", whole.after)):
        say("" if quality is None else f"{name:<9} {quality.line()}")
    proof = found.write(subject, **write)
    finish_racks(folder, racks, found.record)
    return proof
