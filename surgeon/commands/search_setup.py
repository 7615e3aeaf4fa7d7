"""Model, text, passes and prices of a search, for the command and for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.analysis.importance import expert_use, most_important
from surgeon.analysis.subject import Subject, calibration_entry, open_subject
from surgeon.commands.opening import as_folder, as_several, warn
from surgeon.cost.hardware import Hardware
from surgeon.errors import show_value
from surgeon.models.edit import restore
from surgeon.models.weights import FactorSource
from surgeon.opened import Model, open_model
from surgeon.quality.data import Windows
from surgeon.quality.summary import Quality
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.known import Known, open_factors, read_known
from surgeon.searches.mixture import Mixture
from surgeon.searches.pricing import Pricing
from surgeon.searches.question import PricedQuestion, Question, price_question


def open_question(
    model: str | Path | Model, question: Question
) -> tuple[Model, Question, Pricing | None]:
    """Open a model for a question, without its weights, and refuse what cannot be had.

    Returns:
        The model, the question with its spaces named, and its pricing: None where that needs passes or this machine.
    """
    opened = model if isinstance(model, Model) else open_model(model, weights=False)
    question = question.on(opened)
    mixture = question.mixture(opened)
    if question.is_timed_here or question.using:
        return opened, question, None
    return opened, question, price_question(question, mixture)


@dataclass(frozen=True)
class SearchSetup:
    """A search that can begin.

    Attributes:
        mixture: of edits as passes have measured them, on the text.
        factors: of matrices that programs have ranks for, and the choice of units; None: there are none.
    """

    subject: Subject
    settings: Question
    mixture: Mixture
    pricing: Pricing | None
    known: Known
    factors: FactorSource | None

    @classmethod
    def load(
        cls,
        model: str | Path | Model,
        question: Question,
        pricing: Pricing | None,
        folder: Path,
        make: bool = True,
    ) -> SearchSetup:
        """Load the model and the text, read the findings of passes, and make factors, or read those of worker 0."""
        opened = open_model(model)
        mixture = question.mixture(opened)  # factors of others' are known by what tensors are called
        subject = open_subject(
            opened,
            question.data,
            question.tokens,
            question.window,
            question.separator,
            memory=question.memory,
        )
        known = read_known(map(Path, question.using), subject.opened, subject.windows)
        mixture = known.mixture(mixture).on_text(calibration_entry(subject.windows))
        if mixture.most_salient:
            use = expert_use(subject.model, subject.windows, memory=subject.memory)
            mixture = mixture.by_saliency({layer: one.order() for layer, one in use.items()})
        warn(known.notes(mixture))
        programs = mixture.single_edits
        made = open_factors(subject, programs, known.ranks, folder / "factors", make)
        factors = most_important(
            subject.model, programs, subject.windows, factors=made, memory=subject.memory
        )
        if opened.own is not None:
            restore(subject.model)  # its program is the one that others are compared with
        return cls(subject, question, mixture, pricing, known, factors)

    def evaluator(
        self, folder: Path, unseen: Windows | None = None, kept: int | None = None
    ) -> Evaluator:
        """An evaluator of programs on the text of the search, or on unseen text."""
        subject = self.subject
        return Evaluator(
            subject.model,
            unseen or subject.windows,
            subject.memory,
            folder,
            kept=kept,
            own=subject.opened.own,
            factors=self.factors,
            sampled=self.settings.sampled_acceptance,
        )

    def question(self, original: Quality, here: Hardware | None = None) -> PricedQuestion:
        """The question with its prices, of which some are times on this machine."""
        pricing = self.pricing or price_question(self.settings, self.mixture, here)
        return PricedQuestion(self.settings, self.mixture, pricing, original)


def read_question(arguments: Mapping[str, Any]) -> Question:
    """Read a command's arguments, of which spaces, limits, objectives and passes may be several."""
    values = {name: value for name, value in arguments.items() if value is not None}
    for name in ("space", "budget", "objective"):
        given = values.get(name, "")
        several = as_several(given)
        if not all(isinstance(one, str) for one in several):
            raise ValueError(f"{name} is a text, or several of them, not {show_value(given)}")
        if name in values:
            values[name] = ",".join(several)
    for name in ("data", "output", "holdout_data", "heal_data"):
        if name in values:
            values[name] = str(values[name])
    using = tuple(str(as_folder(one)) for one in as_several(values.get("using", ())))
    return Question(**values | {"using": using})
