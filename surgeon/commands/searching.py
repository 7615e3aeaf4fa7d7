"""A search from its question to its end: its study, its workers, the winner, healed and measured on held-out text."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import pandas as pd

from surgeon.analysis.subject import Subject
from surgeon.commands.command import INTERRUPTED, warn
from surgeon.commands.heal import heal
from surgeon.cost.calibrate import calibrate
from surgeon.cost.hardware import parse_hardware
from surgeon.errors import needs_extra
from surgeon.findings.search import RECIPE_FILE, SearchResult
from surgeon.language.program import Program
from surgeon.machine import avoid_cudnn_attention, wait_asleep
from surgeon.opened import Model, load, open_model
from surgeon.processes.files import write_text
from surgeon.progress import progress
from surgeon.quality.data import (
    LEAST_HELD_OUT,
    Windows,
    held_out,
    load_windows,
    shared_windows,
    tokens_before_rest,
    window_for,
)
from surgeon.quality.head import OWN, VERIFIED, HeldOutQuality
from surgeon.quality.sources import DEMO
from surgeon.quality.summary import Quality, quality_of
from surgeon.searches.drafting import DraftValue, FoundDraft, by_verified_keys
from surgeon.searches.evaluate import Terms, measure_terms
from surgeon.searches.known import Known
from surgeon.searches.mixture import Trial
from surgeon.searches.quantities import ACCURACY, HERE
from surgeon.searches.question import SURGEON, PricedQuestion, Question, open_question
from surgeon.searches.results import (
    comment_recipe,
    describe_work,
    found_json,
    lost_trials,
    quality_curves,
    quality_table,
    terms_table,
    trials_table,
    write_front,
)
from surgeon.searches.search import Search, SearchSetup, make_sampler, require_sampler
from surgeon.searches.study import (
    FINISHED,
    StudyStorage,
    compute_once,
    interruptible,
    list_trials,
    naming_storage,
    open_storage,
    open_study,
    run_trials,
)
from surgeon.searches.winners import (
    ROUNDS,
    RUNNERS_UP,
    Finalist,
    HealedFinalists,
    HeldOutComparison,
    Winner,
    against_most_salient,
    choose,
    compare,
    compared_by,
    drafts_here,
    fast_enough_here,
    ranks_here,
)
from surgeon.searches.workers import given_to_worker, worker_processes
from surgeon.training.settings import Distillation, TrainSettings
from surgeon.training.token_store import SELF
from surgeon.version import FORMAT
from surgeon.words import plural

if TYPE_CHECKING:
    from surgeon.searches.accuracy import TaskAccuracy


DEFAULT_STUDY = "search"
HEALED = "healed"  # folder of checkpoints of finalists
SEARCH_FORMAT = 3  # of studies; those of 0.2.0 say none, and are begun anew
# -P imports nothing from the current folder, in which anything may lie.
WORKER = ("-P", "-m", "surgeon.commands.searching")


def join_search(model: str | Path | Model, options: Question, worker: int) -> SearchResult | None:
    """Work on a search until nothing is left to try: worker 0 starts the others and ends it; the others return None."""
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    # What cannot be had is said before a large model is loaded.
    opened, options, pricing = open_question(model, options)
    output = Path(options.output)
    _require_what_it_takes(options, opened)
    storage = open_storage(options.storage, output)
    options = _text_before_rest(model, options)
    setup = SearchSetup.load(model, options, pricing, output, make=not worker)
    subject = setup.subject
    findings = setup.known
    unseen = _held_out(subject, options)
    if options.heal is not None and unseen is not None:
        require_text_to_heal(subject, options, unseen)
    evaluator = setup.evaluator
    tasks = _tasks(setup, output)
    original = evaluator.measure([evaluator.dense])[evaluator.dense]
    given = {"model": opened.name, "question": asdict(options)}
    with interruptible(worker), naming_storage(storage):
        study = _open_study(subject, options, findings, storage)
        if not worker:
            finished = [trial for trial in list_trials(study) if trial.state in FINISHED]
            warn(lost_trials(output, study.study_name, storage.place, len(finished)))
        here = None
        if options.is_timed_here:
            on = sorted({1, options.ranks})
            here = parse_hardware(
                compute_once(study, "here", lambda: calibrate(HERE, subject.opened, on, ROUNDS))
            )
        question = setup.question(original, here)
        searching = Search(question, evaluator, known=findings)
        if options.sampler == SURGEON:  # the others do not go by terms
            searching.known_terms = _terms(study, searching)
        # Each session draws other numbers; those of ours follow from the trials alone.
        study.sampler = make_sampler(
            searching, options.sampler, options.seed + len(study.trials) + 1000 * worker
        )
        alone = options.workers == 1 or worker
        with nullcontext() if alone else worker_processes(options.workers, WORKER, given, output):
            trials = _run_trials(study, searching, options, until)
        work = describe_work(searching.known_terms, study.trials)
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
    if findings.passes:
        record["using"] = findings.record(setup.mixture, trials)
    record["sublayers_run"] = round(sum(work["sublayers"].values()), 1)
    record["work"] = work
    if tasks is not None:
        trials = tasks.of_the_best(trials)
        tables["trials"] = trials_table(question, trials)
    return end_search(question, trials, tables, setup, unseen, record, output)


def _require_what_it_takes(options: Question, model: Model) -> None:
    """Refuse settings that would fail at the end."""
    if options.draft is not None and options.heal is not None:
        raise ValueError(
            "a draft that is healed has weights of its own, and a search is for those over the model's; leave heal out"
        )
    if options.is_timed_here:
        ranks_here(options)
    require_sampler(options.sampler)
    if options.heal is None:
        if options.heal_data is not None:
            raise ValueError(
                "text to heal on without a number of steps heals nothing; say how many steps"
            )
        return
    if options.heal_data is None:
        raise ValueError(
            f"to heal for {plural(options.heal, 'step')} takes text, apart from the one that is searched on"
        )
    if options.heal_data == SELF:
        raise ValueError(
            "candidates are healed on a text that is there, and self is written anew for each; search without, and "
            "heal what is found: surgeon heal recipe.yaml --data self"
        )
    if options.holdout == 0:
        raise ValueError(
            f"candidates that are healed ({plural(options.heal, 'step')}) are compared on held-out text, and with 0 "
            "tokens none is held out; leave that out"
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
    # Models that others decomposed are recognised by their tensors, and refused before a text is read.
    options.mixture(opened)
    data = DEMO if options.data is None else options.data
    window = window_for(opened.config, options.window)
    tokens = tokens_before_rest(
        opened.tokenizer, data, window, options.tokens, options.separator, LEAST_HELD_OUT
    )
    return replace(options, tokens=tokens)


def _held_out(subject: Subject, options: Question) -> Windows | None:
    """The text to measure winners on again, with its warnings; None if none is wanted."""
    if options.holdout == 0:
        return None
    found = held_out(subject.opened.tokenizer, subject.windows, options.holdout, options.holdout_data)
    warn(note for note in found.notes if note not in subject.windows.notes)
    return found


def _tasks(setup: SearchSetup, output: Path) -> TaskAccuracy | None:
    """The tasks among the objectives, loaded before anything is measured; None without any."""
    subject = setup.subject
    objectives = setup.settings.objectives
    if not any(objective.name == ACCURACY for objective in objectives):
        return None
    with needs_extra("tasks", "measuring tasks"):
        from surgeon.searches.accuracy import TaskAccuracy  # lm-eval takes seconds to import

    identity = {"model_hash": subject.opened.hash}
    return TaskAccuracy(
        subject.model,
        subject.opened.tokenizer,
        objectives,
        identity,
        output,
        factors=setup.evaluator.factors,
    )


def _open_study(
    subject: Subject, options: Question, findings: Known, storage: StudyStorage
) -> optuna.Study:
    settings = {
        "format": FORMAT,
        "search_format": SEARCH_FORMAT,
        "model_hash": subject.opened.hash,
        "data": subject.windows.digest,
    }
    settings |= {
        **options.identity,
        "sampler": options.sampler,
        "seed": options.seed,
        **findings.identity,
    }
    name = options.study or DEFAULT_STUDY
    if options.study is None and options.storage is not None:
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        name = f"{DEFAULT_STUDY} {subject.opened.label} {digest[:8]}"
    objectives = tuple(map(str, options.recorded_aspects))
    return open_study(storage, name, settings, objectives)


def _terms(study: optuna.Study, searching: Search) -> Terms:
    evaluator = searching.evaluator

    def compute() -> Any:
        plan = searching.terms_plan
        ids = evaluator.windows.ids
        what = f"search: {len(plan.programs)} single edits on {plan.tokens(ids):,} tokens"
        with progress(what, plan.work(ids), "sublayers") as ran:
            evaluator.ran = ran
            return measure_terms(evaluator, plan).to_json()

    try:
        return Terms.from_json(compute_once(study, "terms", compute))
    finally:
        evaluator.ran = lambda _: None


def _run_trials(
    study: optuna.Study, searching: Search, options: Question, until: float | None
) -> list[Trial]:
    """Run all trials; returns those of other workers and earlier commands, too."""
    question = searching.question
    found = searching.finished_trials(list_trials(study))
    with progress(
        "search", options.trials, "trials", len(found), lambda: question.best_in_words(found)
    ) as ran:

        def tell(_: object) -> None:
            found[:] = searching.finished_trials(list_trials(study))
            ran(1)

        run_trials(study, searching.objective, options.trials, until, tell)
    return searching.finished_trials(list_trials(study))


def end_search(
    question: PricedQuestion,
    trials: Sequence[Trial],
    tables: dict[str, pd.DataFrame],
    setup: SearchSetup,
    unseen: Windows | None,
    record: dict[str, Any],
    output: Path,
) -> SearchResult:
    """Choose the winner, measure it again, and write and draw the result.

    Args:
        tables: of trials and terms.
    """
    settings = question.settings
    opened = setup.subject.opened
    curves = []
    for cost in question.along:
        if cost in question.traded_aspects:
            curves += quality_curves(cost, trials, question.original, question.pricing)
    if len(question.traded_aspects) > 1:  # it is there where no trial keeps the budget, too
        tables["front"] = write_front(
            output, question.front(trials), question, opened.reference, opened.hash
        )
        SearchResult.TABLES["front"].write(output, tables["front"])
    knees = [curve.knee for curve in curves if curve.along == question.along[0]]
    ranked, why = choose(question, trials, knees[-1] if knees else None)
    first, *others = fast_enough_here(question, ranked, opened.folder)
    winner = Winner(first, why)
    chosen = first.choice
    salient = question.mixture.program(question.mixture.with_most_salient(chosen))
    measured = {trial.program: trial.measured for trial in trials if trial.measured.whole}
    text_of = "the search's text"
    runners_up = others[:RUNNERS_UP]
    # REAP's own choice of experts goes by less than the search's, and may be the better one on another text.
    runners_up += [trial for trial in others[RUNNERS_UP:] if trial.program == salient != first.program][
        :1
    ]
    why_own = ""
    if unseen is not None:
        finalists = [opened.program, *(trial.program for trial in (first, *runners_up))]
        text_of = "held-out text"
        evaluator = setup.evaluator.on(unseen)
        on_unseen: Mapping[Program, Quality] = evaluator.measure([*dict.fromkeys([*finalists, salient])])
        if settings.draft is not None:
            on_unseen, why_own = by_verified_keys(evaluator, on_unseen)
        measured = {program: question.add_value(program, found) for program, found in on_unseen.items()}
        by = compared_by(question.settings.objectives)
        candidates = [Finalist(trial, measured[trial.program]) for trial in (first, *runners_up)]
        compared = compare(candidates[0], candidates[1:], measured[opened.program], by)
        winner = Winner(compared.choice.trial, why, compared, unseen.record())
        if settings.heal is not None:  # before the last choice among them
            healed = heal_finalists(compared, question, opened, unseen, output)
            winner = replace(winner, trial=healed.after.choice.trial, healing=healed)
    if question.drafting is not None:
        winner = replace(winner, draft=_as_draft(question.drafting, winner, setup, unseen, why_own))
    if salient in measured:
        experts = against_most_salient(question.mixture, chosen, measured, text_of)
        record |= {} if experts is None else {"experts": experts}
    recipe = question.mixture.recipe(winner.trial.choice, opened.reference, opened.hash)
    text = comment_recipe(recipe, question, winner, record)
    found = SearchResult(
        tables["trials"],
        tables.get("terms", pd.DataFrame()),
        tables.get("front", pd.DataFrame()),
        quality=quality_table(curves),
        recipe_text=text,
        record=record | found_json(question, winner, curves),
        question=question,
        winner=winner,
        curves=curves,
    )
    recipe_file = output / RECIPE_FILE
    write_text(recipe_file, text)
    return replace(found, files=(recipe_file, *found.write(output), *found.draw(output)))


def _as_draft(
    drafting: DraftValue, winner: Winner, setup: SearchSetup, unseen: Windows | None, why_own: str
) -> FoundDraft:
    settings = setup.settings
    program = winner.trial.program
    texts = [winner.trial.measured]
    if winner.comparison is not None:
        texts.append(winner.comparison.choice.unseen)
    estimates = (drafting.by_quality(program, one) for one in texts)
    predicted = [one for one in estimates if one is not None]
    measured = None
    if settings.is_timed_here:
        measured = drafts_here(setup.subject.opened, program, unseen or setup.subject.windows, settings)
    keys = OWN if unseen is None or why_own else VERIFIED
    return FoundDraft(drafting.by, predicted, measured, keys, why_own)


def heal_finalists(
    before: HeldOutComparison,
    question: PricedQuestion,
    original: Model,
    unseen: Windows,
    folder: Path,
) -> HealedFinalists:
    """Heal each finalist as `surgeon.heal` does, into a checkpoint of its own, and compare them on held-out text."""
    steps = question.settings.heal
    data = question.settings.heal_data
    assert steps is not None
    assert data is not None
    window = unseen.ids.shape[1]
    distilled = Distillation() if before.by == "divergence" else None
    settings = TrainSettings(
        steps=steps,
        batch=question.settings.heal_batch,
        scope="edited",
        distillation=distilled,
        evaluate_every=steps + 1,
    )
    judge = HeldOutQuality(unseen, load(original.folder).float())
    winner = before.choice
    after = []
    for one in (winner, *(other for other in before.finalists if other.trial != winner.trial)):
        key = json.dumps([one.trial.key, data, window, settings.to_json()], sort_keys=True)
        target = folder / HEALED / hashlib.sha256(key.encode()).hexdigest()[:12]
        if not target.exists():  # a search that was killed heals what is missing
            print(f"search: healing trial {one.trial.number} into {target}", file=sys.stderr, flush=True)
            heal(
                question.mixture.recipe(one.trial.choice, original.reference, original.hash),
                data,
                target,
                settings=settings,
                window=window,
                separator=unseen.separator,
                eval_tokens=window,  # little: all are judged by the search's held-out text
            )
        healed = judge.measure(load(target).float())
        compared = {name: healed.by_window(name) for name in ("nll", "divergence")}
        after.append(replace(one, unseen=quality_of(compared, unseen.predicted_tokens)))
    how = f"healed for {plural(steps, 'step')} ({settings.method}) on {data}, in {folder / HEALED}"
    return HealedFinalists(before, compare(after[0], after[1:], before.original, before.by), how)


def require_text_to_heal(subject: Subject, options: Question, unseen: Windows) -> None:
    """Refuse too little text, and text that is searched or judged on."""
    data = options.heal_data
    assert data is not None
    settings = TrainSettings(steps=options.heal, batch=options.heal_batch)
    window = unseen.ids.shape[1]
    # `heal` holds one window out.
    text = load_windows(
        subject.opened.tokenizer,
        data,
        window,
        settings.tokens_on(window) + window,
        subject.windows.separator,
        at_most=True,
    )
    settings.steps_on(len(text.ids) - 1)
    for other in (subject.windows, unseen):
        if again := shared_windows(text, other):
            raise ValueError(
                f"{again} windows of {data}, to be healed on, are in the text of the search or in what it holds out "
                f"({other.source}), too; heal on other text"
            )


def run_worker() -> int | str:
    """Work on a search beside the process that started this one; returns an exit code or an error."""
    wait_asleep()
    avoid_cudnn_attention()
    index, given = given_to_worker()
    try:
        join_search(given["model"], Question.from_json(given["question"]), index)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError) as error:
        return f"error: {error}"
    return 0


if __name__ == "__main__":
    sys.exit(run_worker())
