"""The end of `surgeon search`: the winner is chosen and measured again, and what was found is written and said."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from surgeon.cli.search_healing import healed

if TYPE_CHECKING:
    from surgeon.analysis.subject import Subject
    from surgeon.cli.search_question import PredictedUse
    from surgeon.quality.data import Windows
    from surgeon.searches.front import DepthCurve
    from surgeon.searches.healer import CandidateHealer
    from surgeon.searches.question import Question
    from surgeon.searches.results import Winner
    from surgeon.searches.trial import Trial
    from surgeon.searches.winners import HeldOutComparison

_WIDTH, _KEY = 80, 12  # columns of a terminal, and of what stands before a line
_FIXED = "\N{NO-BREAK SPACE}"


def finish(
    question: Question,
    trials: Sequence[Trial],
    unseen: Windows | None,
    subject: Subject,
    use: PredictedUse,
    record: dict[str, Any],
    output: Path,
    healer: CandidateHealer | None = None,
) -> None:
    """Choose the winner, measure it again, and write and say what was found.

    Args:
        unseen: the held-out text, if there is one.
        healer: of the winner and the runners-up, before the last choice among them; None to choose as they are.
    """
    from surgeon.searches.choosing import choose
    from surgeon.searches.front import depth_curves
    from surgeon.searches.question import DEPTH
    from surgeon.searches.results import Winner, write_record, write_winner

    along_depth = question.along == DEPTH
    curves = depth_curves(trials, question.original, question.budget.pricing) if along_depth else []
    ranked, why = choose(question, trials, curves)
    first, *others = _fast_enough_here(question, ranked, subject, use)
    comparison = None if unseen is None else _compared(question, first, others, unseen, subject, output)
    text = None if unseen is None else unseen.record()
    after = None if comparison is None or healer is None else healed(healer, comparison, output)
    winner = Winner(first, why) if comparison is None else Winner(comparison.chosen.trial, why, comparison, text)
    if after is not None and healer is not None:
        winner = replace(winner, trial=after.chosen, healing=after, healed_by=healer.record)
    write_winner(output, question, winner, subject.reference, record)
    write_record(output, question, winner, curves, record)
    _draw(question, trials, curves, subject, output)
    _say(question, winner, curves, output)


def _fast_enough_here(
    question: Question, ranked: Sequence[Trial], subject: Subject, use: PredictedUse
) -> Sequence[Trial]:
    """The ranking; where time on this machine is limited, of the first few those that are measured to keep the limits.

    Raises:
        ValueError: if none of the first few does.
    """
    from surgeon.language.program import Program
    from surgeon.searches.here import measured_here, missed_here
    from surgeon.searches.quantities import HERE
    from surgeon.searches.winners import RUNNERS_UP

    limits, dense = question.budget.limits, question.mixture.model.dense
    if not any(limit.aspect.on == HERE for limit in limits):
        return ranked
    programs = [Program.parse(trial.proposal.key) for trial in ranked[: RUNNERS_UP + 1]]
    workload = use.workload(question.mixture.model.shapes.positions)
    times = measured_here(subject.folder, dense, programs, use.ranks, workload)
    fast = []
    for trial, program in zip(ranked, programs, strict=False):
        missed = missed_here(limits, program, dense, times)
        typer.echo(f"trial {trial.number}: {missed or f'measured {times[program]}'}", err=True)
        fast += [] if missed else [trial]
    if not fast:
        raise ValueError(
            f"none of the best {len(programs)} programs keeps {question.budget} when it is measured here; ask for "
            "less, or leave more room to the prediction"
        )
    return fast


def _compared(
    question: Question, first: Trial, others: Sequence[Trial], unseen: Windows, subject: Subject, output: Path
) -> HeldOutComparison:
    """The winner and the runners-up on held-out text."""
    from surgeon.searches.choosing import compared_by
    from surgeon.searches.evaluate import Evaluator
    from surgeon.searches.winners import RUNNERS_UP, remeasure

    evaluator = Evaluator(subject.model, unseen, subject.memory, output, own=question.mixture.model.own)
    by = compared_by(question.objectives)
    return remeasure(first, others[:RUNNERS_UP], question.mixture.model.dense, evaluator.measure, by)


def _draw(
    question: Question, trials: Sequence[Trial], curves: Sequence[DepthCurve], subject: Subject, output: Path
) -> None:
    from surgeon.reports.front import draw_depths, draw_front
    from surgeon.reports.search_history import draw_search
    from surgeon.reports.search_trials import SearchedTrials
    from surgeon.searches.choosing import compared_by
    from surgeon.searches.front import pareto_front
    from surgeon.searches.front_files import write_depths, write_front
    from surgeon.searches.results import trials_table

    searched = SearchedTrials(trials_table(question, trials), compared_by(question.objectives))
    draw_search(output / "search.png", searched, question.mixture.model.layers, f"{subject.label}: the search")
    if curves:
        write_depths(output, curves)
        draw_depths(output / "quality-against-depth.png", curves, f"{subject.label}: how deep it really is")
    objectives, pricing = question.traded, question.budget.pricing
    if len(objectives) > 1:
        front = pareto_front(trials, objectives, pricing)
        write_front(output, front, objectives, question.mixture, subject.reference, subject.model_hash)
        draw_front(output / "front.png", front, trials, objectives, pricing, subject.label)


def _say(question: Question, winner: Winner, curves: Sequence[DepthCurve], output: Path) -> None:
    """Print what was found, a few lines."""
    trial, measured = winner.trial, winner.trial.measured
    pricing = question.budget.pricing
    _print("program", trial.proposal.key)
    edits = (str(edit).replace(" ", _FIXED) for edit in trial.proposal.choice)
    _print("edits", ", ".join(edits) or "none")
    for aspect, dense in zip(pricing.aspects, pricing.dense, strict=True):
        cost = aspect.show(question.price(aspect, trial))
        _print("cost", f"{cost}; the original's is {aspect.quantity.show(dense)}")
    _print("divergence", f"{measured.divergence:.4g} nats per token")
    _print("perplexity", f"{measured.perplexity:.4g}; the original's is {question.original.perplexity:.4g}")
    for curve in curves:
        _print("depth", curve.line())
    for line in winner.comparison.lines() if winner.comparison else []:
        _print("held out", line)
    for line in [*winner.healing.table(), *winner.healing.lines()] if winner.healing else []:
        _print("healing", line)
    for line in winner.missed_unseen(question.budget):
        _print("held out", line)
    typer.echo(f"{'recipe':<{_KEY}}{output / 'recipe.yaml'}")  # whole, to be copied


def _print(key: str, text: str) -> None:
    """A line, or where it is longer than a terminal, several, with the key before the first."""
    lines = textwrap.fill(
        text,
        _WIDTH,
        initial_indent=f"{key:<{_KEY}}",
        subsequent_indent=" " * _KEY,
        break_long_words=False,
        break_on_hyphens=False,
    )
    typer.echo(lines.replace(_FIXED, " "))
