"""`surgeon search`: the best change of a model under a budget, or along one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.opening import open_measured, warn
from surgeon.cli.options import DataOption, MemoryOption, ModelArgument, OutputOption, TextArguments
from surgeon.cli.search_healing import SearchHealing
from surgeon.cli.search_question import HeldOutText, PredictedUse, SearchQuestion
from surgeon.cli.search_results import finish
from surgeon.cli.search_workers import SearchWorkers

if TYPE_CHECKING:
    from surgeon.analysis.subject import Subject
    from surgeon.cost.hardware import Hardware
    from surgeon.language.program import Program
    from surgeon.searches.accuracy import TaskAccuracy
    from surgeon.searches.evaluate import Evaluator
    from surgeon.searches.mixture import Mixture
    from surgeon.searches.objectives import Objective
    from surgeon.searches.question import Question
    from surgeon.searches.study.rounds import RoundStudy
    from surgeon.searches.study.storage import StudyStorage
    from surgeon.searches.terms import Terms
    from surgeon.searches.trial import Trial


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
    healing: SearchHealing,
    work: SearchWorkers,
    text: TextArguments,
    memory: MemoryOption = None,
) -> None:
    """Search for the best change of a model: layers in groups, late, left out or in another order, tracks, low ranks.

    Every change is measured alone first; then whole programs are proposed from that, measured, and learnt from. Writes
    recipe.yaml (for surgeon export), trials.csv, terms.csv, search.json and pictures; without a budget, or with several
    objectives, a recipe for each point of the front, too. The winner and the runners-up are measured again on text that
    the search did not see, and with --heal once more when they are healed. Interrupted, the same command goes on where
    it was; with more --trials it adds to them.
    """
    from surgeon.checkpoint.config_only import read_config_only
    from surgeon.models.edit import restore
    from surgeon.searches.choosing import compared_by
    from surgeon.searches.question import Question
    from surgeon.searches.results import lost_trials

    # What cannot be had is said before a large model is loaded.
    healing.require_sense(held.holdout)
    config, own = read_config_only(model)
    mixture, objectives = asked.mixture(Path(model).name, config, use, own), asked.objectives()
    if own is not None:
        healing.require_layers_in_turn()
    budget = None if asked.is_timed_here else asked.within(mixture, use)
    storage = work.open(output)
    subject = open_measured(model, data, text, memory)
    unseen = held.windows(subject)
    if unseen is not None:
        warn(note for note in unseen.notes if note not in subject.windows.notes)
    healer = healing.healer(subject, unseen, compared_by(objectives), output)
    if own is not None:
        restore(subject.model)  # its program is the one that others are compared with
    evaluator, tasks = _evaluator(subject, output, work.workers, own), _tasks(subject, objectives, output)
    dense = mixture.model.dense
    original = evaluator.measure([dense])[dense]
    settings = {**asdict(asked), **asdict(use)}
    with work.at_work(output):
        study = _study(subject, mixture, objectives, work, storage, settings)
        if work.is_first:
            warn(lost_trials(output, study.name, storage.place, len(study.finished())))
        budget = budget or asked.within(mixture, use, _here(study, subject, use))
        question = Question(mixture, budget, objectives, original)
        study.values = lambda proposal, measured: question.told(proposal.key, measured)
        terms = _terms(study, question, evaluator)
        found = _run(study, question, terms, evaluator, trials, output)
    if work.is_first:
        record = subject.provenance(**settings, trials=len(found), study=study.name, storage=study.storage.place)
        known = found if tasks is None else tasks.of_the_best(found)
        finish(question, known, unseen, subject, use, record, output, healer)


def _evaluator(subject: Subject, output: Path, workers: int, own: Program | None) -> Evaluator:
    """What measures programs; several workers divide the memory that what they keep may take."""
    from surgeon.memory import free_bytes
    from surgeon.searches.evaluate import KEPT_SHARE, Evaluator

    kept = None if workers == 1 else int(KEPT_SHARE * free_bytes() / workers)
    model, windows, model_hash = subject.model, subject.windows, subject.model_hash
    return Evaluator(model, windows, subject.memory, output, model_hash=model_hash, kept=kept, own=own)


def _tasks(subject: Subject, objectives: Sequence[Objective], output: Path) -> TaskAccuracy | None:
    """What measures the tasks among the objectives; None if there are none."""
    if not any(objective.is_of_few for objective in objectives):
        return None
    from surgeon.searches.accuracy import TaskAccuracy  # lm-eval takes seconds to import

    identity = {"model_hash": subject.model_hash}
    return TaskAccuracy(subject.model, subject.tokenizer, objectives, identity, output)


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
    from surgeon.searches.question import told_names
    from surgeon.searches.study.rounds import RoundStudy

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
    from surgeon.searches.here import calibrate_here

    return parse_hardware(study.shared("here", lambda: calibrate_here(subject.folder, use.ranks)))


def _terms(study: RoundStudy, question: Question, evaluator: Evaluator) -> Terms:
    """What edits do alone, measured by one worker for all."""
    from surgeon.progress import progress
    from surgeon.searches.terms import Terms, measure_terms, work_of_terms

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
    from surgeon.searches.results import write_progress
    from surgeon.searches.search import BATCH, Search

    searching = Search(question, terms, evaluator, trials)
    # A study of an earlier version may have programs that are none to this one.
    earlier = [trial for trial in study.finished() if question.mixture.allows(trial.proposal.choice)]
    found = {trial.proposal.key: trial for trial in earlier}

    with progress("search", trials, "trials", len(found), lambda: _best_so_far(question, found.values())) as ran:
        for trial in study.run(searching.propose, searching.measure, BATCH):
            found[trial.proposal.key] = trial
            ran(1)
    ended = sorted(found.values(), key=lambda trial: trial.number)
    write_progress(output, question, terms, ended)
    return ended


def _best_so_far(question: Question, trials: Iterable[Trial]) -> str:
    """The best trial in a few words, or where there is no single one, how many are on the front."""
    from surgeon.searches.front import pareto_front

    if question.along is not None and not question.budget.of_quality:
        whole = [trial for trial in trials if trial.measured.whole]
        return f"{len(pareto_front(whole, question.traded, question.budget.pricing))} on the front"
    best = min(trials, key=lambda trial: (question.cost(trial), trial.number), default=None)
    if best is None or question.cost(best) == float("inf"):
        return ""
    if question.along is not None:
        return f"best {question.along.show(question.price(question.along, best))}"
    return f"best {question.cost(best):.4g}"
