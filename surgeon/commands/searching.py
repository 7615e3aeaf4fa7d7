"""A search from its question to its end: what it is set up of, its study, its workers."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna

from surgeon.analysis.subject import Subject
from surgeon.commands.opening import warn
from surgeon.commands.search_result import end_search, require_text_to_heal
from surgeon.commands.search_setup import SearchSetup, open_question
from surgeon.cost.calibrate import calibrate
from surgeon.cost.hardware import parse_hardware
from surgeon.errors import needs_extra
from surgeon.findings.search import SearchResult
from surgeon.memory import free_bytes
from surgeon.opened import Model, open_model
from surgeon.progress import progress
from surgeon.provenance import FORMAT
from surgeon.quality.data import (
    DEMO,
    LEAST_HELD_OUT,
    Windows,
    held_out,
    tokens_before_rest,
    window_for,
)
from surgeon.searches.evaluate import KEPT_SHARE
from surgeon.searches.here import ROUNDS, ranks_here
from surgeon.searches.known import Known
from surgeon.searches.mixture import Trial
from surgeon.searches.quantities import ACCURACY, HERE
from surgeon.searches.question import SURGEON, Question
from surgeon.searches.results import (
    SearchWork,
    lost_trials,
    terms_table,
    trials_table,
)
from surgeon.searches.search import Search, make_sampler, require_sampler
from surgeon.searches.study import (
    FINISHED,
    StudyStorage,
    counted,
    kept,
    naming_storage,
    open_storage,
    open_study,
    run_trials,
)
from surgeon.searches.terms import Terms
from surgeon.searches.workers import WorkerProcesses, interruptible
from surgeon.training.token_store import SELF

if TYPE_CHECKING:
    from surgeon.searches.accuracy import TaskAccuracy

DEFAULT_STUDY = "search"
SEARCH_FORMAT = 3  # of studies; those of 0.2.0 say none, and are begun anew
WORKER = ("-P", "-m", "surgeon.commands.search_worker")  # not from the current folder, in which anything may lie


def join_search(model: str | Path | Model, options: Question, worker: int) -> SearchResult | None:
    """Work on a search until there is nothing left to try.

    Args:
        worker: which of a machine's workers this process is: the first one, 0, starts the others, and ends the search;
            the others return None.
    """
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    # What cannot be had is said before a large model is loaded.
    opened, options, pricing = open_question(model, options)
    output = Path(options.output)
    _require_what_it_takes(options, opened)
    storage = open_storage(options.storage, output)
    options = _text_before_rest(model, options)
    setup = SearchSetup.load(model, options, pricing, output, make=not worker)
    subject = setup.subject
    known = setup.known
    unseen = _held_out(subject, options)
    heal = None
    if options.heal is not None and options.heal_data is not None and unseen is not None:
        heal = options.heal_data, options.heal, options.heal_batch
        require_text_to_heal(subject.opened, *heal, subject.windows, unseen)
    room = None if options.workers == 1 else int(KEPT_SHARE * free_bytes() / options.workers)
    evaluator = setup.evaluator(output, kept=room)
    tasks = _tasks(setup, output)
    original = evaluator.measure([evaluator.dense])[evaluator.dense]
    given = {"model": opened.name, "question": asdict(options)}
    with interruptible(worker), naming_storage(storage):
        study = _open_study(subject, options, known, storage)
        if not worker:
            finished = [trial for trial in counted(study) if trial.state in FINISHED]
            warn(lost_trials(output, study.study_name, storage.place, len(finished)))
        here = None
        if options.is_timed_here:
            on = sorted({1, options.ranks})
            here = parse_hardware(kept(study, "here", lambda: calibrate(HERE, subject.opened, on, ROUNDS)))
        question = setup.question(original, here)
        searching = Search(question, evaluator, known=known)
        if options.sampler == SURGEON:  # the others do not go by terms
            searching.known_terms = _terms(study, searching)
        # Each session draws other numbers; those of ours follow from the trials alone.
        study.sampler = make_sampler(searching, options.sampler, options.seed + len(study.trials) + 1000 * worker)
        with WorkerProcesses(1 if worker else options.workers, WORKER, given, output):
            trials = _run_trials(study, searching, options, until)
        work = SearchWork.of(searching.known_terms, study.trials)
    if worker:
        return None
    tables = {"trials": trials_table(question, trials)}
    if searching.known_terms is not None:
        tables["terms"] = terms_table(question, searching.known_terms)
    for name, table in tables.items():  # they are there where no trial keeps the budget, too
        SearchResult.TABLES[name].write(output, table)
    by = {"sampler": options.sampler} | ({} if options.sampler == SURGEON else {"seed": options.seed})
    record = subject.provenance(
        **options.identity, **by, trials=len(trials), study=study.study_name, storage=storage.place
    )
    if known.passes:
        record["using"] = known.record(setup.mixture, trials)
    record["sublayers_run"] = round(work.alone + work.together, 1)
    record["work"] = work.to_json()
    if tasks is not None:
        trials = tasks.of_the_best(trials)
        tables["trials"] = trials_table(question, trials)
    return end_search(question, trials, tables, setup, unseen, heal, record, work, output)


def _require_what_it_takes(options: Question, model: Model) -> None:
    """Refuse what would be found out at the end.

    Raises:
        ValueError, ImportError: if a draft is to be healed, the sampler or the healing cannot be had, or what is
            measured here at last cannot be.
    """
    if options.draft is not None and options.heal is not None:
        raise ValueError(
            "a draft that is healed has weights of its own, and a search is for those over the model's; leave heal out"
        )
    if options.is_timed_here:
        ranks_here(options)
    require_sampler(options.sampler, len(options.recorded))
    if options.heal is None:
        if options.heal_data is not None:
            raise ValueError("text to heal on without a number of steps heals nothing; say how many steps")
        return
    if options.heal_data is None:
        raise ValueError(f"to heal for {options.heal} steps takes text, apart from the one that is searched on")
    if options.heal_data == SELF:
        raise ValueError(
            "candidates are healed on a text that is there, and self is written anew for each; search without, and "
            "heal what is found: surgeon heal recipe.yaml --data self"
        )
    if options.holdout == 0:
        raise ValueError(
            f"candidates that are healed ({options.heal} steps) are compared on held-out text, and with 0 tokens none "
            "is held out; leave that out"
        )
    if model.own is not None:
        raise ValueError(
            "candidates are healed of models whose layers run one after the other; search without, and heal what the "
            "recipe gives: surgeon heal recipe.yaml"
        )


def _text_before_rest(model: str | Path | Model, options: Question) -> Question:
    """The question with the text of the search, of which by default some is left to hold out."""
    if options.holdout is not None or options.holdout_data is not None:
        return options
    opened = open_model(model)
    options.mixture(opened)  # what others decomposed is known by its tensors, and refused before a text is read
    data = DEMO if options.data is None else options.data
    window = window_for(opened.config, options.window)
    tokens = tokens_before_rest(opened.tokenizer, data, window, options.tokens, options.separator, LEAST_HELD_OUT)
    return replace(options, tokens=tokens)


def _held_out(subject: Subject, options: Question) -> Windows | None:
    """The text to measure winners on again, with warnings of what there is to know of it; None if none is wanted."""
    if options.holdout == 0:
        return None
    found = held_out(subject.opened.tokenizer, subject.windows, options.holdout, options.holdout_data)
    warn(note for note in found.notes if note not in subject.windows.notes)
    return found


def _tasks(setup: SearchSetup, output: Path) -> TaskAccuracy | None:
    """What measures the tasks among the objectives, which are loaded before anything is measured; None without any."""
    subject = setup.subject
    objectives = setup.settings.objectives
    if not any(objective.name == ACCURACY for objective in objectives):
        return None
    with needs_extra("tasks", "measuring tasks"):
        from surgeon.searches.accuracy import TaskAccuracy  # lm-eval takes seconds to import

    identity = {"model_hash": subject.opened.hash}
    return TaskAccuracy(subject.model, subject.opened.tokenizer, objectives, identity, output, factors=setup.factors)


def _open_study(subject: Subject, options: Question, known: Known, storage: StudyStorage) -> optuna.Study:
    """The study in its storage, new or gone on with."""
    settings = {
        "format": FORMAT,
        "search_format": SEARCH_FORMAT,
        "model_hash": subject.opened.hash,
        "data": subject.windows.digest,
    }
    settings |= {**options.identity, "sampler": options.sampler, "seed": options.seed, **known.identity}
    name = options.study or DEFAULT_STUDY
    if options.study is None and options.storage is not None:
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        name = f"{DEFAULT_STUDY} {subject.opened.label} {digest[:8]}"
    objectives = tuple(map(str, options.recorded))
    return open_study(storage, name, settings, objectives)


def _terms(study: optuna.Study, searching: Search) -> Terms:
    """What edits do alone, as the study has it."""
    evaluator = searching.evaluator

    def compute() -> Any:
        plan = searching.terms_plan
        ids = evaluator.windows.ids
        what = f"search: {len(plan.programs)} single edits on {plan.tokens(ids):,} tokens"
        with progress(what, plan.work(ids), "sublayers") as ran:
            evaluator.ran = ran
            return searching.measured_terms().to_json()

    try:
        return Terms.from_json(kept(study, "terms", compute))
    finally:
        evaluator.ran = lambda _: None


def _run_trials(study: optuna.Study, searching: Search, options: Question, until: float | None) -> list[Trial]:
    """Run all trials, with the other workers; those of earlier commands are among what is returned."""
    question = searching.question
    found = searching.finished(counted(study))
    with progress("search", options.trials, "trials", len(found), lambda: question.best_in_words(found)) as ran:

        def tell(_: object) -> None:
            found[:] = searching.finished(counted(study))
            ran(1)

        run_trials(study, searching.objective, options.trials, until, tell)
    return searching.finished(counted(study))
