"""`surgeon search`: the best change of a model under a budget, or along one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.opening import open_measured, warn
from surgeon.cli.options import DataOption, MemoryOption, ModelArgument, OutputOption, TextArguments
from surgeon.cli.search_question import HeldOutText, PredictedUse, SearchQuestion
from surgeon.cli.search_workers import SearchWorkers

if TYPE_CHECKING:
    from surgeon.analysis.subject import Subject
    from surgeon.quality.data import Windows
    from surgeon.search.evaluate import Evaluator
    from surgeon.search.front import DepthCurve
    from surgeon.search.question import Question
    from surgeon.search.results import Winner
    from surgeon.search.rounds import RoundStudy
    from surgeon.search.terms import Terms
    from surgeon.search.trial import Trial
    from surgeon.search.winners import HeldOutComparison


@grouped
def search(
    model: ModelArgument,
    data: DataOption,
    output: OutputOption,
    trials: Annotated[int, typer.Option("--trials", help="How many programs to try in all.", min=1)] = 60,
    *,
    asked: SearchQuestion,
    use: PredictedUse,
    held: HeldOutText,
    work: SearchWorkers,
    text: TextArguments,
    memory: MemoryOption = None,
) -> None:
    """Search for the best change of a model: layers in pairs, late steps, dropped layers, low ranks, or all of these.

    Every change is measured alone first; then whole programs are proposed from that, measured, and learnt from. Writes
    recipe.yaml (for surgeon export), trials.csv, terms.csv, search.json and pictures; without a budget, or with several
    objectives, a recipe for each point of the front, too. The winner and the runners-up are measured again on text that
    the search did not see. Interrupted, the same command goes on where it was; with more --trials it adds to them.
    """
    from surgeon.checkpoint.config_only import read_config_only
    from surgeon.search.evaluate import Evaluator
    from surgeon.search.question import Question

    # What cannot be had is said before a large model is loaded.
    mixture, budget = asked.of_model(Path(model).name, read_config_only(model).config, use)
    subject = open_measured(model, data, text, memory)
    unseen = held.windows(subject)
    if unseen is not None:
        warn(unseen.notes)
    output.mkdir(parents=True, exist_ok=True)
    evaluator = Evaluator(subject.model, subject.windows, subject.memory, output, model_hash=subject.model_hash)
    dense = mixture.model.dense
    question = Question(mixture, budget, asked.objectives(), evaluator.measure([dense])[dense])
    settings = {**asdict(asked), **asdict(use)}
    with work.at_work(output):
        study = _study(subject, question, work, output, settings)
        terms = _terms(study, question, evaluator)
        found = _run(study, question, terms, evaluator, trials, output)
    if work.is_first:
        record = subject.provenance(**settings, trials=len(found), study=study.name, storage=study.storage.place)
        _finish(question, found, unseen, subject, record, output)


def _study(
    subject: Subject, question: Question, work: SearchWorkers, output: Path, settings: dict[str, Any]
) -> RoundStudy:
    """The study in its storage, new or gone on with; ValueError if it is another one."""
    from surgeon.provenance import FORMAT
    from surgeon.search.rounds import RoundStudy

    known = {"format": FORMAT, "model_hash": subject.model_hash, "data": subject.windows.digest, **settings}
    return RoundStudy(
        work.open(output),
        work.name(subject.label, known),
        known,
        edits=question.mixture.edits,
        objectives={str(objective): "minimize" for objective in question.objectives},
        values=lambda proposal, measured: question.values_of(proposal.key, measured),
        workers=work.workers,
    )


def _terms(study: RoundStudy, question: Question, evaluator: Evaluator) -> Terms:
    """What edits do alone, measured by one worker for all."""
    from surgeon.progress import progress
    from surgeon.search.terms import Terms, measure_terms, work_of_terms

    mixture = question.mixture
    programs = [mixture.program((edit,)) for edit in mixture.edits]

    def compute() -> Any:
        with progress(f"search: {len(programs)} single edits", work_of_terms(evaluator, programs), "sublayers") as ran:
            evaluator.ran = ran
            return measure_terms(evaluator, programs).to_json()

    try:
        return Terms.from_json(study.shared("terms", compute))
    finally:
        evaluator.ran = lambda _: None


def _run(
    study: RoundStudy, question: Question, terms: Terms, evaluator: Evaluator, trials: int, output: Path
) -> list[Trial]:
    """Run all trials, and keep the tables true meanwhile."""
    from surgeon.progress import progress
    from surgeon.search.results import write_progress
    from surgeon.search.search import BATCH, Search

    searching = Search(question, terms, evaluator, trials)
    found = {trial.proposal.key: trial for trial in study.finished()}

    def best_so_far() -> str:
        best = min((question.cost(trial) for trial in found.values()), default=float("inf"))
        return f"best {best:.4g}" if best < float("inf") else ""

    with progress("search", trials, "trials", len(found), best_so_far) as ran:
        for trial in study.run(searching.propose, searching.measure, BATCH):
            found[trial.proposal.key] = trial
            ran(1)
    ended = sorted(found.values(), key=lambda trial: trial.number)
    write_progress(output, question, terms, ended)
    return ended


def _finish(
    question: Question,
    trials: Sequence[Trial],
    unseen: Windows | None,
    subject: Subject,
    record: dict[str, Any],
    output: Path,
) -> None:
    """Choose the winner, measure it again, and write and say what was found."""
    from surgeon.search.front import depth_curves
    from surgeon.search.question import DEPTH
    from surgeon.search.results import Winner, write_record, write_winner
    from surgeon.search.winner import choose

    along_depth = question.along == DEPTH
    curves = depth_curves(trials, question.original, question.budget.pricing) if along_depth else []
    (first, *others), why = choose(question, trials, curves)
    comparison = None if unseen is None else _compared(question, first, others, unseen, subject, output)
    winner = Winner(first if comparison is None else comparison.chosen.trial, why, comparison)
    write_winner(output, question, winner, subject.reference, record)
    write_record(output, question, winner, record)
    _draw(question, trials, curves, subject, output)
    _say(question, winner, curves, output)


def _compared(
    question: Question, first: Trial, others: Sequence[Trial], unseen: Windows, subject: Subject, output: Path
) -> HeldOutComparison:
    """The winner and the runners-up on held-out text."""
    from surgeon.search.evaluate import Evaluator
    from surgeon.search.winners import RUNNERS_UP, Measured, remeasure

    evaluator = Evaluator(subject.model, unseen, subject.memory, output)
    by: Measured = "perplexity" if str(question.objectives[0]) == "perplexity" else "divergence"
    return remeasure(first, others[:RUNNERS_UP], question.mixture.model.dense, evaluator.measure, by)


def _draw(
    question: Question, trials: Sequence[Trial], curves: Sequence[DepthCurve], subject: Subject, output: Path
) -> None:
    from surgeon.report.front import draw_depths, draw_front
    from surgeon.search.front import pareto_front
    from surgeon.search.front_files import write_depths, write_front

    if curves:
        write_depths(output, curves)
        draw_depths(output / "quality-against-depth.png", curves, f"{subject.label}: how deep it really is")
    if len(question.objectives) > 1:
        front = pareto_front(trials, question.objectives, question.budget.pricing)
        write_front(output, front, question.objectives, question.mixture, subject.reference, subject.model_hash)
        draw_front(output / "front.png", front, trials, question.objectives, question.budget.pricing, subject.label)


def _say(question: Question, winner: Winner, curves: Sequence[DepthCurve], output: Path) -> None:
    """Print what was found, a few lines."""
    trial, measured = winner.trial, winner.trial.measured
    pricing = question.budget.pricing
    typer.echo(f"program     {trial.proposal.key}")
    typer.echo(f"edits       {', '.join(map(str, trial.proposal.choice))}")
    for aspect, dense in zip(pricing.aspects, pricing.dense, strict=True):
        cost = aspect.show(question.price(aspect, trial))
        typer.echo(f"cost        {cost}; the original's is {aspect.quantity.show(dense)}")
    typer.echo(f"divergence  {measured.divergence:.4g} nats per token")
    typer.echo(f"perplexity  {measured.perplexity:.4g}; the original's is {question.original.perplexity:.4g}")
    for curve in curves:
        typer.echo(f"depth       {curve.line()}")
    for line in winner.comparison.lines() if winner.comparison else []:
        typer.echo(f"held out    {line}")
    typer.echo(f"recipe      {output / 'recipe.yaml'}")
