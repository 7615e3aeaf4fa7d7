"""`surgeon search`: the best change of a model under a budget, or along one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
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
    from surgeon.cost.hardware import Hardware
    from surgeon.quality.data import Windows
    from surgeon.search.accuracy import TaskAccuracy
    from surgeon.search.evaluate import Evaluator
    from surgeon.search.front import DepthCurve
    from surgeon.search.mixture import Mixture
    from surgeon.search.objectives import Objective
    from surgeon.search.question import Question
    from surgeon.search.results import Winner
    from surgeon.search.rounds import RoundStudy
    from surgeon.search.storage import StudyStorage
    from surgeon.search.terms import Terms
    from surgeon.search.trial import Trial
    from surgeon.search.winners import HeldOutComparison

_WIDTH, _KEY = 80, 12  # columns of a terminal, and of what stands before a line
_FIXED = "\N{NO-BREAK SPACE}"


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
    from surgeon.search.question import Question

    # What cannot be had is said before a large model is loaded.
    mixture, objectives = asked.mixture(Path(model).name, read_config_only(model).config, use), asked.objectives()
    budget = None if asked.is_timed_here else asked.within(mixture, use)
    storage = work.open(output)
    subject = open_measured(model, data, text, memory)
    unseen = held.windows(subject)
    if unseen is not None:
        warn(unseen.notes)
    evaluator, tasks = _evaluator(subject, output, work.workers), _tasks(subject, objectives, output)
    dense = mixture.model.dense
    original = evaluator.measure([dense])[dense]
    settings = {**asdict(asked), **asdict(use)}
    with work.at_work(output):
        study = _study(subject, mixture, objectives, work, storage, settings)
        budget = budget or asked.within(mixture, use, _here(study, subject, use))
        question = Question(mixture, budget, objectives, original)
        study.values = lambda proposal, measured: question.told(proposal.key, measured)
        terms = _terms(study, question, evaluator)
        found = _run(study, question, terms, evaluator, trials, output)
    if work.is_first:
        record = subject.provenance(**settings, trials=len(found), study=study.name, storage=study.storage.place)
        _finish(question, found if tasks is None else tasks.of_the_best(found), unseen, subject, use, record, output)


def _evaluator(subject: Subject, output: Path, workers: int) -> Evaluator:
    """What measures programs; several workers divide the memory that what they keep may take."""
    from surgeon.memory import free_bytes
    from surgeon.search.evaluate import KEPT_SHARE, Evaluator

    kept = None if workers == 1 else int(KEPT_SHARE * free_bytes() / workers)
    return Evaluator(subject.model, subject.windows, subject.memory, output, model_hash=subject.model_hash, kept=kept)


def _tasks(subject: Subject, objectives: Sequence[Objective], output: Path) -> TaskAccuracy | None:
    """What measures the tasks among the objectives; None if there are none."""
    if not any(objective.is_of_few for objective in objectives):
        return None
    from surgeon.runtime.text import open_tokenizer  # lm-eval takes seconds to import
    from surgeon.search.accuracy import TaskAccuracy

    identity = {"model_hash": subject.model_hash}
    return TaskAccuracy(subject.model, open_tokenizer(subject.folder), objectives, identity, output)


def _study(
    subject: Subject,
    mixture: Mixture,
    objectives: Sequence[Objective],
    work: SearchWorkers,
    storage: StudyStorage,
    settings: dict[str, Any],
) -> RoundStudy:
    """The study in its storage, new or gone on with; ValueError if it is another one."""
    from surgeon.provenance import FORMAT
    from surgeon.search.question import told_names
    from surgeon.search.rounds import RoundStudy

    known = {"format": FORMAT, "model_hash": subject.model_hash, "data": subject.windows.digest, **settings}
    return RoundStudy(
        storage,
        work.name(subject.label, known),
        known,
        edits=mixture.edits,
        objectives=dict.fromkeys(told_names(objectives), "minimize"),
        workers=work.workers,
    )


def _here(study: RoundStudy, subject: Subject, use: PredictedUse) -> Hardware:
    """This machine, calibrated by one worker for all."""
    from surgeon.cost.hardware_file import parse_hardware
    from surgeon.search.here import calibrate_here

    return parse_hardware(study.shared("here", lambda: calibrate_here(subject.folder, use.ranks)))


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

    with progress("search", trials, "trials", len(found), lambda: _best_so_far(question, found.values())) as ran:
        for trial in study.run(searching.propose, searching.measure, BATCH):
            found[trial.proposal.key] = trial
            ran(1)
    ended = sorted(found.values(), key=lambda trial: trial.number)
    write_progress(output, question, terms, ended)
    return ended


def _best_so_far(question: Question, trials: Iterable[Trial]) -> str:
    """The best trial in a few words, or where there is no single one, how many are on the front."""
    from surgeon.search.front import pareto_front

    if question.along is not None and not question.budget.of_quality:
        whole = [trial for trial in trials if trial.measured.whole]
        return f"{len(pareto_front(whole, question.traded, question.budget.pricing))} on the front"
    best = min(trials, key=lambda trial: (question.cost(trial), trial.number), default=None)
    if best is None or question.cost(best) == float("inf"):
        return ""
    if question.along is not None:
        return f"best {question.along.show(question.price(question.along, best))}"
    return f"best {question.cost(best):.4g}"


def _finish(
    question: Question,
    trials: Sequence[Trial],
    unseen: Windows | None,
    subject: Subject,
    use: PredictedUse,
    record: dict[str, Any],
    output: Path,
) -> None:
    """Choose the winner, measure it again, and write and say what was found."""
    from surgeon.search.choosing import choose
    from surgeon.search.front import depth_curves
    from surgeon.search.question import DEPTH
    from surgeon.search.results import Winner, write_record, write_winner

    along_depth = question.along == DEPTH
    curves = depth_curves(trials, question.original, question.budget.pricing) if along_depth else []
    ranked, why = choose(question, trials, curves)
    first, *others = _fast_enough_here(question, ranked, subject, use)
    comparison = None if unseen is None else _compared(question, first, others, unseen, subject, output)
    text = None if unseen is None else (unseen.source, unseen.digest)
    winner = Winner(first if comparison is None else comparison.chosen.trial, why, comparison, text)
    write_winner(output, question, winner, subject.reference, record)
    write_record(output, question, winner, curves, record)
    _draw(question, trials, curves, subject, output)
    _say(question, winner, curves, output)


def _fast_enough_here(
    question: Question, ranked: Sequence[Trial], subject: Subject, use: PredictedUse
) -> Sequence[Trial]:
    """The ranking from the first trial on that is measured to keep its limits of time on this machine.

    Raises:
        ValueError: if none of the first few does.
    """
    from surgeon.program import Program
    from surgeon.search.here import measured_here, missed_here
    from surgeon.search.quantities import HERE
    from surgeon.search.winners import RUNNERS_UP

    limits, dense = question.budget.limits, question.mixture.model.dense
    if not any(limit.aspect.on == HERE for limit in limits):
        return ranked
    programs = [Program.parse(trial.proposal.key) for trial in ranked[: RUNNERS_UP + 1]]
    workload = use.workload(question.mixture.model.shapes.positions)
    times = measured_here(subject.folder, dense, programs, use.ranks, workload)
    for place, program in enumerate(programs):
        missed = missed_here(limits, program, dense, times)
        typer.echo(f"trial {ranked[place].number}: {missed or f'measured {times[program]}'}", err=True)
        if not missed:
            return ranked[place:]
    raise ValueError(
        f"none of the best {len(programs)} programs keeps {question.budget} when it is measured here; ask for less, or "
        "leave more room to the prediction"
    )


def _compared(
    question: Question, first: Trial, others: Sequence[Trial], unseen: Windows, subject: Subject, output: Path
) -> HeldOutComparison:
    """The winner and the runners-up on held-out text."""
    from surgeon.search.choosing import compared_by
    from surgeon.search.evaluate import Evaluator
    from surgeon.search.winners import RUNNERS_UP, remeasure

    evaluator = Evaluator(subject.model, unseen, subject.memory, output)
    by = compared_by(question)
    return remeasure(first, others[:RUNNERS_UP], question.mixture.model.dense, evaluator.measure, by)


def _draw(
    question: Question, trials: Sequence[Trial], curves: Sequence[DepthCurve], subject: Subject, output: Path
) -> None:
    from surgeon.report.front import draw_depths, draw_front
    from surgeon.report.search_history import draw_search
    from surgeon.report.search_trials import SearchedTrials
    from surgeon.search.choosing import compared_by
    from surgeon.search.front import pareto_front
    from surgeon.search.front_files import write_depths, write_front
    from surgeon.search.results import trials_table

    searched = SearchedTrials(trials_table(question, trials), compared_by(question))
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
