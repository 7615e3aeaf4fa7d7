"""The options of `surgeon search` that heal the last few candidates before the winner is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surgeon.cli.opening import warn

if TYPE_CHECKING:
    from surgeon.analysis.subject import Subject
    from surgeon.quality.data import Windows
    from surgeon.searches.healer import CandidateHealer
    from surgeon.searches.healing import HealedComparison
    from surgeon.searches.winners import HeldOutComparison, Measured


@dataclass(frozen=True)
class SearchHealing:
    """Whether and how candidates are healed, in the user's words; a group of options (see grouped.py)."""

    heal: Annotated[
        int | None,
        typer.Option(
            "--heal",
            min=1,
            metavar="N",
            help="Heal the winner and the runners-up for N steps each before the last choice among them: the best "
            "before need not be the best after. Needs --heal-data.",
            show_default=False,
        ),
    ] = None
    heal_data: Annotated[
        str | None,
        typer.Option(
            "--heal-data",
            help="Text to heal on, as --data takes it; none of the text that is searched or judged on.",
            show_default=False,
        ),
    ] = None
    heal_batch: Annotated[int, typer.Option("--heal-batch", min=1, help="For --heal: windows of text in a step.")] = 8

    def require_sense(self, holdout: int | None) -> None:
        """Refuse options that do not go together.

        Args:
            holdout: tokens that are held out; None: the default.

        Raises:
            ValueError: if healing lacks its text, or text lacks the healing, or nothing is held out.
        """
        if self.heal is None:
            if self.heal_data is not None:
                raise ValueError("--heal-data without --heal heals nothing; say how many steps, as in --heal 200")
            return
        if self.heal_data is None:
            raise ValueError(f"--heal {self.heal} needs text to heal on, apart from --data; give it with --heal-data")
        if holdout == 0:
            raise ValueError(
                f"--heal {self.heal} compares candidates on held-out text, and --holdout 0 holds none out; leave it out"
            )

    def require_layers_in_turn(self) -> None:
        """Refuse to heal candidates of a model that runs a program of its own.

        Raises:
            ValueError: if candidates are to be healed.
        """
        if self.heal is not None:
            raise ValueError(
                "--heal heals candidates of models whose layers run one after the other; leave it out, and heal what "
                "the recipe gives: surgeon heal recipe.yaml"
            )

    def healer(self, subject: Subject, unseen: Windows | None, by: Measured, output: Path) -> CandidateHealer | None:
        """What heals a candidate; None if none is to be.

        Args:
            unseen: the held-out text.
            by: what candidates are compared by.

        Raises:
            FileNotFoundError: if there is no such text.
            ValueError: if it is too short, or not apart from the text that is searched or judged on; or if the model
                does not fit into memory.
        """
        from surgeon.quality.data import load_windows
        from surgeon.searches.healer import CandidateHealer, brief_settings, require_apart
        from surgeon.training.texts import TrainTexts

        if self.heal is None or self.heal_data is None or unseen is None:
            return None
        searched, window = subject.windows, subject.windows.ids.shape[1]
        tokens = self.heal * self.heal_batch * window
        text = load_windows(subject.tokenizer, self.heal_data, window, tokens, searched.separator, at_most=True)
        if len(text.ids) < self.heal_batch:
            raise ValueError(
                f"--heal-data {self.heal_data} has {len(text.ids)} windows of {window} tokens, fewer than one batch of "
                f"{self.heal_batch}; give more text, or lower --heal-batch or --window"
            )
        warn(text.notes)
        require_apart(text, searched, unseen)
        settings = brief_settings(self.heal, self.heal_batch, by)
        texts = TrainTexts(text, unseen)
        folder = output / "healing"
        return CandidateHealer(subject.folder, subject.model_hash, subject.model, texts, settings, folder)


def healed(healer: CandidateHealer, before: HeldOutComparison, output: Path) -> HealedComparison:
    """The candidates once they are healed; what is in the output folder already is not healed again."""
    from surgeon.searches.healing import JOURNAL_FILE, HealedPrograms, heal_candidates

    with HealedPrograms(output / JOURNAL_FILE, healer.key) as kept:
        return heal_candidates(before, healer, kept, healer.how, lambda line: typer.echo(line, err=True))
