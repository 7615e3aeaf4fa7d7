"""The files a search leaves: recipe.yaml, trials.csv, terms.csv and search.json; those of a front beside them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from surgeon.checkpoint.read import read_json
from surgeon.language.recipe import Recipe
from surgeon.processes.files import finite, write_json, write_table, write_text
from surgeon.searches.front import DepthCurve
from surgeon.searches.healing import HealedComparison
from surgeon.searches.limits import Limit, SearchBudget
from surgeon.searches.question import DEPTH, Question
from surgeon.searches.terms import Terms
from surgeon.searches.trial import MeasuredProgram, Trial
from surgeon.searches.winners import HeldOutComparison, quality_json

WIDTH = 80  # columns of a terminal
RECIPE_FILE, TRIALS_FILE, TERMS_FILE, RECORD_FILE = "recipe.yaml", "trials.csv", "terms.csv", "search.json"


@dataclass(frozen=True)
class Winner:
    """The trial that a search ends with.

    Attributes:
        why: what it is the best of, in a few words.
        comparison: with its runners-up on held-out text; None if none was held out.
        text: which held-out text that is (`Windows.record`).
        healing: of both; None if none was healed.
        healed_by: what healed them, as JSON values.
    """

    trial: Trial
    why: str
    comparison: HeldOutComparison | None = None
    text: Mapping[str, Any] | None = None
    healing: HealedComparison | None = None
    healed_by: Mapping[str, Any] = field(default_factory=dict)

    def missed_unseen(self, budget: SearchBudget) -> list[str]:
        """Limits of quality that the winner keeps on the text of the search, but not on held-out text, in sentences."""
        if self.comparison is None:
            return []
        known = {"": self.comparison, " once it is healed": self.healing.after if self.healing else None}
        return [
            f"{limit} is not kept on held-out text{when}: {limit.aspect.show(getattr(unseen, limit.aspect.name))}"
            for when, comparison in known.items()
            if comparison is not None
            for unseen in [comparison.unseen_of(self.trial)]
            for limit, short in _shortfalls(budget, unseen, comparison.original)
            if short
        ]


def _shortfalls(
    budget: SearchBudget, measured: MeasuredProgram, original: MeasuredProgram
) -> Iterator[tuple[Limit, float]]:
    return zip(budget.of_quality, budget.quality_shortfalls(measured, original), strict=True)


def trials_table(question: Question, trials: Sequence[Trial]) -> pd.DataFrame:
    """One row per trial, in the order they were asked for: its edits, its costs, its quality, its program."""
    return pd.DataFrame([_row(question, trial) for trial in trials])


def _row(question: Question, trial: Trial) -> dict[str, Any]:
    measured, program = trial.measured, trial.program
    pricing = question.budget.pricing
    costs = {
        str(aspect): aspect.natural(pricing.price(aspect, program))
        for aspect in dict.fromkeys([DEPTH, *pricing.aspects])
    }
    return {
        "trial": trial.number,
        "source": trial.proposal.source,
        "level": math.nan if trial.proposal.level is None else trial.proposal.level,
        "edits": "; ".join(map(str, trial.proposal.choice)),
        **costs,
        "divergence": measured.divergence,
        "divergence_low": measured.divergence_low,
        "divergence_high": measured.divergence_high,
        "perplexity": measured.perplexity,
        "tokens": measured.tokens,
        "whole": measured.whole,
        "within": measured.whole and question.is_met(trial),
        **measured.more,
        "program": trial.proposal.key,
    }


def terms_table(question: Question, terms: Terms) -> pd.DataFrame:
    """One row per edit: what it does alone, what it saves (of a speedup, in parts of the time), how it correlates."""
    mixture, pricing = question.mixture, question.budget.pricing
    aspects = list(dict.fromkeys([DEPTH, *pricing.aspects]))
    dense = [pricing.price(aspect, mixture.model.program) for aspect in aspects]
    rows = []
    for place, edit in enumerate(mixture.edits):
        program = mixture.program((edit,))
        saved = {
            f"{aspect}_saved": own - pricing.price(aspect, program) for aspect, own in zip(aspects, dense, strict=True)
        }
        others = np.delete(terms.correlation[place], place)
        rows.append(
            {
                "edit": str(edit),
                "space": edit.space,
                "first": edit.first,
                "last": edit.stop - 1,
                "option": edit.option,
                "divergence": terms.divergence[place],
                "correlation_mean": float(others.mean()) if len(others) else math.nan,
                **saved,
            }
        )
    return pd.DataFrame(rows)


def lost_trials(folder: Path, study: str, place: str, finished: int) -> list[str]:
    """What to say where a study has fewer finished trials than the record of its search tells of.

    Args:
        place: of the storage, for people.
    """
    try:
        record = read_json(folder / RECORD_FILE)
    except (FileNotFoundError, ValueError):
        return []  # it is written again
    told = record.get("trials")
    if record.get("study") != study or not isinstance(told, int) or told <= finished:
        return []
    return [f"{place} has {finished} of the {told} trials that {RECORD_FILE} tells of; the others are tried again"]


def write_progress(folder: Path, question: Question, terms: Terms, trials: Sequence[Trial]) -> None:
    """Write what is known while the search goes on; each file is whole at any time."""
    write_table(folder / TRIALS_FILE, trials_table(question, trials), missing="")
    write_table(folder / TERMS_FILE, terms_table(question, terms), missing="")


def write_winner(folder: Path, question: Question, winner: Winner, recipe: Recipe, record: Mapping[str, Any]) -> None:
    """Write the winner's recipe, with what was measured in comments."""
    trial, measured, original = winner.trial, winner.trial.measured, question.original
    low, high = measured.divergence_low, measured.divergence_high
    lines = [
        f"Found by: {record['command']}",
        f"{winner.why}: trial {trial.number} of {record['trials']}, {trial.proposal.source}.",
        f"On {measured.tokens:,} tokens:",
        f"divergence {measured.divergence:.4g} nats per token,",
        *([f"its 95% interval {low:.4g} to {high:.4g},"] if math.isfinite(high) else []),
        f"perplexity {measured.perplexity:.4g}; the original's is {original.perplexity:.4g}.",
        *(["On text that the search did not see:", *winner.comparison.lines()] if winner.comparison else []),
        *(["On the same text, healed:", *winner.healing.table(), *winner.healing.lines()] if winner.healing else []),
    ]
    write_text(folder / RECIPE_FILE, "\n".join(map(_comment, lines)) + "\n" + recipe.to_yaml())


def _comment(text: str) -> str:
    """Lines of YAML's comments that fit a terminal; a command can still be copied, word by word."""
    return textwrap.fill(
        text, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
    )


def write_record(
    folder: Path, question: Question, winner: Winner, curves: Sequence[DepthCurve], record: Mapping[str, Any]
) -> None:
    """Write the provenance, and what was found in numbers."""
    trial = winner.trial
    best = {"trial": trial.number, "why": winner.why, "program": trial.proposal.key, **_numbers(trial.measured)}
    found: dict[str, Any] = {"best": best, "original": _numbers(question.original)}
    if winner.comparison is not None:
        missed = winner.missed_unseen(question.budget)
        found["held_out"] = {
            **(winner.text or {}),
            **winner.comparison.to_json(),
            "limits_missed": missed,
        }
    if winner.healing is not None:
        found["healing"] = dict(winner.healed_by) | winner.healing.to_json()
    if curves:
        found["knees"] = [curve.line() for curve in curves]
    write_json(folder / RECORD_FILE, {**record, **found})


def _numbers(measured: MeasuredProgram) -> dict[str, float | None]:
    """As JSON holds them."""
    return {**quality_json(measured), **finite(measured.more)}
