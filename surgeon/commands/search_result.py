"""What a search ends with: the winner, measured on held-out text and healed, all of it written and drawn."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from surgeon.checkpoint.load import load
from surgeon.commands.heal import heal
from surgeon.commands.search_setup import SearchSetup
from surgeon.findings.search import SearchResult
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.opened import Model
from surgeon.processes.files import write_text
from surgeon.quality.data import Windows, load_windows, shared_windows
from surgeon.quality.summary import Quality, quality_of
from surgeon.quality.text import OWN, VERIFIED, HeldOutQuality
from surgeon.searches.drafting import DraftValue, FoundDraft, by_verified_keys
from surgeon.searches.front import quality_curves
from surgeon.searches.here import drafts_here, fast_enough_here
from surgeon.searches.mixture import Trial
from surgeon.searches.question import PricedQuestion
from surgeon.searches.results import (
    SearchWork,
    Winner,
    commented,
    found_json,
    quality_table,
    write_front,
)
from surgeon.searches.winners import (
    RUNNERS_UP,
    Finalist,
    HealedFinalists,
    HeldOutComparison,
    against_most_salient,
    choose,
    compare,
    compared_by,
)
from surgeon.training.distiller import Distillation
from surgeon.training.settings import TrainSettings


def end_search(
    question: PricedQuestion,
    trials: Sequence[Trial],
    tables: dict[str, pd.DataFrame],
    setup: SearchSetup,
    unseen: Windows | None,
    heal: tuple[str, int, int] | None,
    record: dict[str, Any],
    work: SearchWork,
    output: Path,
) -> SearchResult:
    """Choose the winner, measure it again, and write and draw what was found.

    Args:
        tables: of trials and terms.
        unseen: the held-out text, if there is one.
        heal: text, steps and batch of a healing of the finalists before the last choice among them; None: of none.
    """
    settings = question.settings
    opened = setup.subject.opened
    curves = []
    for cost in question.along:
        if cost in question.traded:
            curves += quality_curves(cost, trials, question.original, question.pricing)
    if len(question.traded) > 1:  # it is there where no trial keeps the budget, too
        tables["front"] = write_front(output, question.front(trials), question, opened.reference, opened.hash)
        SearchResult.TABLES["front"].write(output, tables["front"])
    ranked, why = choose(question, trials, curves)
    first, *others = fast_enough_here(question, ranked, opened.folder)
    winner = Winner(first, why)
    chosen = first.choice
    salient = question.mixture.program(question.mixture.with_most_salient(chosen))
    measured = {trial.program: trial.measured for trial in trials if trial.measured.whole}
    text_of = "the search's text"
    runners_up = others[:RUNNERS_UP]
    # REAP's own choice of experts goes by less than the search's, and may be the better one on another text.
    runners_up += [trial for trial in others[RUNNERS_UP:] if trial.program == salient != first.program][:1]
    why_own = ""
    if unseen is not None:
        finalists = [opened.program, *(trial.program for trial in (first, *runners_up))]
        text_of = "held-out text"
        evaluator = setup.evaluator(output, unseen)
        on_unseen: Mapping[Program, Quality] = evaluator.measure([*dict.fromkeys([*finalists, salient])])
        if settings.draft is not None:
            on_unseen, why_own = by_verified_keys(evaluator, on_unseen)
        measured = {program: question.valued(program, found) for program, found in on_unseen.items()}
        by = compared_by(question.objectives)
        known = [Finalist(trial, measured[trial.program]) for trial in (first, *runners_up)]
        compared = compare(known[0], known[1:], measured[opened.program], by)
        winner = Winner(compared.chosen.trial, why, compared, unseen.record())
        if heal is not None:

            def recipe_of(trial: Trial) -> Recipe:
                return question.mixture.recipe(trial.choice, opened.reference, opened.hash)

            healed = heal_finalists(compared, recipe_of, opened, unseen, output, *heal)
            winner = replace(winner, trial=healed.after.chosen.trial, healing=healed)
    if question.drafting is not None:
        winner = replace(winner, draft=_as_draft(question.drafting, winner, setup, unseen, why_own))
    if salient in measured:
        experts = against_most_salient(question.mixture, chosen, measured, text_of)
        record |= {} if experts is None else {"experts": experts}
    recipe = question.mixture.recipe(winner.trial.choice, opened.reference, opened.hash)
    text = commented(recipe, question, winner, record)
    found = SearchResult(
        tables["trials"],
        tables.get("terms", pd.DataFrame()),
        tables.get("front", pd.DataFrame()),
        quality=quality_table(curves),
        recipe_text=text,
        record=record | found_json(question, winner, curves),
        question=question,
        winner=winner,
        work=work,
        curves=curves,
    )
    recipe_file = output / SearchResult.TEXTS["recipe_text"]
    write_text(recipe_file, text)
    return replace(found, files=(recipe_file, *found.write(output), *found.draw(output)))


def _as_draft(
    drafting: DraftValue, winner: Winner, setup: SearchSetup, unseen: Windows | None, why_own: str
) -> FoundDraft:
    """What the winner is worth as a draft, measured where it is asked for of this machine."""
    settings = setup.settings
    program = winner.trial.program
    texts = [winner.trial.measured]
    if winner.comparison is not None:
        texts.append(winner.comparison.chosen.unseen)
    known = (drafting.by_quality(program, one) for one in texts)
    predicted = [one for one in known if one is not None]
    measured = None
    if settings.is_timed_here:
        measured = drafts_here(setup.subject.opened, program, unseen or setup.subject.windows, settings)
    keys = OWN if unseen is None or why_own else VERIFIED
    return FoundDraft(drafting.by, predicted, measured, keys, why_own)


FOLDER = "healed"


def heal_finalists(
    before: HeldOutComparison,
    recipe_of: Callable[[Trial], Recipe],
    original: Model,
    unseen: Windows,
    folder: Path,
    data: str,
    steps: int,
    batch: int,
) -> HealedFinalists:
    """Heal each finalist as `surgeon.heal` does, into a checkpoint of its own, and compare them on held-out text."""
    window = unseen.ids.shape[1]
    distilled = Distillation() if before.by == "divergence" else None
    settings = TrainSettings(steps=steps, batch=batch, scope="edited", distillation=distilled, evaluate_every=steps + 1)
    judge = HeldOutQuality(unseen, load(original.folder).float())
    winner = before.chosen
    after = []
    for one in (winner, *(other for other in before.finalists if other.trial != winner.trial)):
        key = json.dumps([one.trial.key, data, window, settings.to_json()], sort_keys=True)
        target = folder / FOLDER / hashlib.sha256(key.encode()).hexdigest()[:12]
        if not target.exists():  # a search that was killed heals what is missing
            print(f"search: healing trial {one.trial.number} into {target}", file=sys.stderr, flush=True)
            heal(
                recipe_of(one.trial),
                data,
                target,
                settings=settings,
                window=window,
                separator=unseen.separator,
                eval_tokens=window,  # little: all are judged by the search's held-out text
            )
        values = judge.values(load(target).float())
        compared = {name: values[name] for name in ("nll", "divergence")}
        after.append(replace(one, unseen=quality_of(compared, unseen.predicted)))
    how = f"healed for {steps:,} steps ({settings.method}) on {data}, in {folder / FOLDER}"
    return HealedFinalists(before, compare(after[0], after[1:], before.original, before.by), how)


def require_text_to_heal(model: Model, data: str, steps: int, batch: int, searched: Windows, unseen: Windows) -> None:
    """Refuse too little text, and text that is searched or judged on: a model is not judged by what it was trained on.

    Raises:
        ValueError: with the reason.
    """
    window = unseen.ids.shape[1]
    tokens = (steps * batch + 1) * window  # `heal` holds one window out
    text = load_windows(model.tokenizer, data, window, tokens, searched.separator, at_most=True)
    TrainSettings(steps=steps, batch=batch).steps_on(len(text.ids) - 1)
    for other in (searched, unseen):
        if again := shared_windows(text, other):
            raise ValueError(
                f"{again} windows of {data}, to be healed on, are in the text of the search or in what it holds out "
                f"({other.source}), too; heal on other text"
            )
