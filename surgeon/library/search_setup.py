"""What a search is set up of, for the study of a command and for one that a notebook runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.analysis.experts import expert_use
from surgeon.analysis.factors.calibration import recorded
from surgeon.analysis.importance import most_important
from surgeon.analysis.subject import Subject, open_subject
from surgeon.commands.opening import as_folder, warn
from surgeon.cost.hardware import Hardware
from surgeon.errors import shown
from surgeon.findings.result import RunResult
from surgeon.models.edit import restore
from surgeon.models.weights import FactorSource
from surgeon.opened import Model, open_model
from surgeon.quality.data import Windows
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.known import Known, measured_ranks, read_known
from surgeon.searches.known_factors import open_factors
from surgeon.searches.limits import SearchBudget
from surgeon.searches.mixture import Mixture
from surgeon.searches.question import Question
from surgeon.searches.settings import SearchSettings
from surgeon.searches.trial import MeasuredProgram

Using = str | Path | RunResult | Sequence[str | Path | RunResult]


@dataclass(frozen=True)
class SearchText:
    """The text of a search, as `open_subject` takes it."""

    data: str | None
    tokens: int
    window: int | None
    separator: str | None


@dataclass(frozen=True)
class AskedSearch:
    """What is asked of a model that is not loaded yet; what cannot be had is said here.

    Attributes:
        settings: with the spaces named.
        mixture: of the spaces, before what passes and the text say of their edits.
        budget: None where it takes more to know: what passes have found, or the time on this machine.
    """

    model: Model
    settings: SearchSettings
    mixture: Mixture
    budget: SearchBudget | None

    @classmethod
    def of(cls, model: str | Path | Model, settings: SearchSettings, using: Sequence[str]) -> AskedSearch:
        """Open a model for a question; errors as `SearchSettings.mixture` and `SearchSettings.priced`."""
        opened = model if isinstance(model, Model) else open_model(model, weights=False)
        settings = settings.on(opened)
        mixture = settings.mixture(opened)
        budget = None if settings.is_timed_here or using else settings.priced(mixture)
        return cls(opened, settings, mixture, budget)

    def open(self, model: str | Path | Model) -> Model:
        """Open the model with its files.

        Raises:
            FileNotFoundError, ValueError: as `open_model`; and as `SearchSettings.mixture`, if the files hold factors
                of others'.
        """
        opened = open_model(model)
        if opened.own != self.model.own:  # factors of others' are known by what tensors are called
            self.settings.mixture(opened)
        return opened

    def load(
        self,
        model: str | Path | Model,
        text: SearchText,
        memory: int | str | None,
        using: Sequence[str],
        folder: Path,
        make: bool = True,
    ) -> SearchSetup:
        """Load the model and the text, and read what passes have found.

        Args:
            model: what the question was opened of.
            memory: the most that the process may take, in bytes or as text ("2GB").
            using: folders of passes.
            folder: where factors are kept.
            make: make those that go by a text; else they are there.

        Raises:
            FileNotFoundError, ValueError, OSError: as `open_subject`, `read_known` and `open_factors`; and as
                `SearchSettings.mixture`, if the model's files hold factors of others'.
        """
        opened = self.open(model)
        subject = open_subject(opened, **vars(text), memory=memory)
        known = read_known(map(Path, using), subject.opened, subject.windows)
        mixture = known.mixture(self.mixture).on_text(recorded(subject.windows))
        orders = {}
        if mixture.most_salient:
            use = expert_use(subject.model, subject.windows, memory=subject.memory)
            orders = {layer: one.order() for layer, one in use.items()}
            mixture = mixture.by_saliency(orders)
        warn(known.notes(mixture))
        ranks = measured_ranks(mixture)
        programs = mixture.single_edits
        made = open_factors(subject, programs, ranks, folder / "factors", make)
        factors = most_important(subject.model, programs, subject.windows, factors=made, memory=subject.memory)
        if self.model.own is not None:
            restore(subject.model)  # its program is the one that others are compared with
        return SearchSetup(subject, self.settings, mixture, self.budget, known, factors)


@dataclass(frozen=True)
class SearchSetup:
    """A search that can begin.

    Attributes:
        mixture: of edits as passes have measured them, on the text.
        budget: as `AskedSearch` has it.
        factors: of matrices that programs have ranks for, and the choice of units; None: there are none.
    """

    subject: Subject
    settings: SearchSettings
    mixture: Mixture
    budget: SearchBudget | None
    known: Known
    factors: FactorSource | None

    def evaluator(self, folder: Path, unseen: Windows | None = None, kept: int | None = None) -> Evaluator:
        """What measures programs on the text of the search, or on text that it has not seen.

        Args:
            folder: for hidden states that do not fit into memory, and the original's predictions on the search's text.
            kept: as `Evaluator` takes it.
        """
        subject = self.subject
        return Evaluator(
            subject.model,
            unseen or subject.windows,
            subject.memory,
            folder,
            model_hash=None if unseen else subject.opened.hash,
            kept=kept,
            own=subject.opened.own,
            factors=self.factors,
            sampled=self.settings.sampled_acceptance,
        )

    def question(self, original: MeasuredProgram, here: Hardware | None = None) -> Question:
        """What is asked; errors as `SearchSettings.priced`.

        Args:
            original: the unedited model's quality on the text.
            here: this machine, if a cost is a time on it.
        """
        budget = self.budget or self.settings.priced(self.mixture, here)
        return Question(self.settings, self.mixture, budget, original)


def search_settings(
    space: str | Sequence[str] | None,
    budget: str | Sequence[str] | None,
    objective: str | Sequence[str],
    *more: Any,
) -> SearchSettings:
    """What is searched for, where spaces, limits and objectives may be one text or several.

    Args:
        more: the other fields of `SearchSettings`, in order.

    Raises:
        ValueError: if one is no text, or as `SearchSettings`.
    """
    texts: list[Any] = []
    for name, given in (("space", space), ("budget", budget), ("objective", objective)):
        several = [given] if isinstance(given, str) else given
        if not isinstance(several, list | tuple) or not all(isinstance(one, str) for one in several):
            if given is not None or name == "objective":
                raise ValueError(f"{name} is a text, or several of them, not {shown(given)}")
            texts.append(None)
        else:
            texts.append(",".join(several))
    return SearchSettings(*texts, *more)


def folders(using: Using) -> tuple[str, ...]:
    """Where passes lie, of which one or several are given."""
    return tuple(str(as_folder(one)) for one in ([using] if isinstance(using, str | Path | RunResult) else using))
