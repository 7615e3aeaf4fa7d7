"""A whole search with a made-up measure: rounds, goals, spaces alone and mixed, and who wins."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import optuna.terminator
import pytest
from optuna.trial import FrozenTrial, TrialState

from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.searches.mixture import Trial
from surgeon.searches.pricing import pareto_front
from surgeon.searches.quantities import DEPTH, QUANTITIES, SIZE, Aspect, Quantity
from surgeon.searches.question import Question
from surgeon.searches.results import TOGETHER, quality_curves
from surgeon.searches.search import BATCH, MIXTURE, SAMPLERS, Search, SurgerySampler, make_sampler
from surgeon.searches.winners import Finalist, HeldOutComparison, Winner, choose
from tests.searches.made_up_search import damage, search, try_programs
from tests.tiny_models import tiny_model


def test_under_a_budget_all_trials_keep_it_and_are_raced_against_the_best() -> None:
    searching, evaluator = search("pair", "depth=7")
    trials = [*try_programs(searching, 30)]
    assert len(trials) == 30
    assert all(searching.question.is_met(trial) for trial in trials)
    assert evaluator.raced[0] is None, "the first ones run through"
    assert all(rival is not None for rival in evaluator.raced[1:])
    assert evaluator.raced[1:] == sorted(evaluator.raced[1:], reverse=True), (
        "by the best so far, which only improves"
    )
    ranked, why = choose(searching.question, trials, None)
    assert ranked[0].measured.divergence == min(trial.measured.divergence for trial in trials)
    assert why == "The best within depth=7"


@pytest.mark.thorough
def test_a_mixture_is_searched_beside_its_spaces_alone() -> None:
    searching, _ = search("pair,drop:layers", "depth=7")
    trials = [*try_programs(searching, 40)]
    assert list(searching.strands) == [MIXTURE, "drop", "pair"]
    alone = {
        name: [t for t in trials if {edit.space for edit in t.choice} == {name}]
        for name in ("drop", "pair")
    }
    assert all(alone.values())
    best = min(trials, key=lambda trial: trial.measured.divergence)
    for name in ("drop", "pair"):
        single, _ = search(name, "depth=7")
        assert best.measured.divergence <= min(t.measured.divergence for t in try_programs(single, 40))


def test_a_space_that_cannot_reach_a_budget_is_searched_in_the_mixture_only() -> None:
    searching, _ = search("pair,ladder", "depth=7")
    assert list(searching.strands) == [MIXTURE, "pair"], "a ladder is as deep as the model"
    assert len([*try_programs(searching, 12)]) == 12


@pytest.mark.thorough
def test_without_a_budget_every_depth_is_looked_at() -> None:
    searching, _ = search("pair", None)
    trials = [*try_programs(searching, 40)]
    levels = [goal.level for goal in searching.question.goals]
    assert levels == [9, 8, 7, 6, 5]
    assert {trial.level for trial in trials} == set(levels)
    curves = quality_curves(DEPTH, trials, searching.question.original, searching.question.pricing)
    assert [point.cost for point in curves[0].points] == [10, *levels]
    ranked, why = choose(searching.question, trials, curves[-1].knee)
    assert searching.question.along == (DEPTH,)
    price = searching.question.pricing.price(DEPTH, ranked[0].program)
    assert curves[0].knee is None
    most = 1.1 * searching.question.original.perplexity
    kept = [
        searching.question.pricing.price(DEPTH, trial.program)
        for trial in trials
        if trial.measured.perplexity <= most
    ]
    assert "there is no knee" in why
    assert price == (min(kept) if kept else 9)


def test_quality_alone_is_kept_at_the_least_depth() -> None:
    searching, _ = search("pair", "divergence<=0.2")
    trials = [*try_programs(searching, 40)]
    ranked, _ = choose(searching.question, trials, None)
    every = [t for t in trials if t.measured.divergence <= 0.2]
    depth = {t.number: Program.parse(t.key).effective_depth() for t in trials}
    assert depth[ranked[0].number] == min(depth[t.number] for t in every)
    assert ranked[0].measured.divergence <= 0.2
    equals = [t for t in every if depth[t.number] == depth[ranked[0].number]]
    assert ranked[0].measured.divergence == min(t.measured.divergence for t in equals)
    below = [t for t in trials if depth[t.number] < depth[ranked[0].number]]
    assert below, "and shallower ones were tried"


def test_what_is_measured_by_other_objectives_is_not_raced() -> None:
    searching, evaluator = search("pair", "depth=8", "perplexity")
    assert len([*try_programs(searching, 12)]) == 12
    assert set(evaluator.raced) == {None}


def test_a_measured_quantity_of_ones_own_is_told_with_each_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doubled = Quantity("doubled", float, "{:g}".format, measure=lambda found, _: 2 * found.divergence)
    monkeypatch.setitem(QUANTITIES, "doubled", doubled)
    searching, _ = search("pair", "depth=8", "doubled")
    for trial in try_programs(searching, 3):
        assert trial.measured.more == {"doubled": 2 * trial.measured.divergence}


def test_what_is_running_is_not_proposed_again_and_what_was_proposed_first_comes_first() -> None:
    """Also where nothing is finished yet, as for many workers at the beginning; and until there is nothing more."""
    searching, _ = search("pair", "depth=7")
    given: list[str] = []
    while (proposal := searching.next_proposal([], given)) is not None:
        given.append(proposal.key)
    assert len({*given}) == len(given) == 35, "all ways to choose 3 of 9 pairs that do not overlap"
    first = [proposal.key for proposal in searching.strands["pair"].first_round(3)]
    assert given[:3] == first
    small, _ = search("pair", "depth=9")
    trials = [*try_programs(small, 100)]
    assert {trial.choice for trial in trials} >= {(edit,) for edit in small.question.mixture.edits}
    assert small.next_proposal(trials) is None


def test_of_one_knowledge_a_batch_is_made_and_with_more_known_another_one() -> None:
    searching, _ = search("pair", "depth=7")
    trials = [*try_programs(searching, 11)]
    batch: list[str] = []
    for _ in range(BATCH):
        proposal = searching.next_proposal(trials, batch)
        assert proposal is not None
        batch.append(proposal.key)
    again, _ = search("pair", "depth=7")
    expected = again.strands["pair"].next_round(trials, [BATCH])
    assert {*batch} == {proposal.key for proposal in expected}
    assert not {*batch} & {trial.key for trial in trials}


def test_a_program_that_is_known_is_not_measured_again() -> None:
    searching, evaluator = search("pair", "depth=9")
    choice = searching.question.mixture.edits[:1]
    proposal = searching.proposal(searching.question.mixture.values(choice))
    first = searching.measure(proposal, [])
    evaluator.known.clear()
    assert searching.measure(proposal, [Trial(**vars(proposal), number=0, measured=first)]) == first
    assert first.divergence == damage(choice)


def test_a_limit_of_quality_that_held_out_text_does_not_keep_is_named() -> None:
    searching, evaluator = search("pair", "divergence<=0.2")
    ranked, why = choose(searching.question, [*try_programs(searching, 20)], None)
    seen = ranked[0].measured
    for unseen, said in (
        (0.19, []),
        (0.31, ["divergence<=0.2 is not kept on held-out text: divergence 0.31 nats"]),
    ):
        assert seen.divergence <= 0.2
        finalist = Finalist(ranked[0], evaluator.measured(unseen))
        comparison = HeldOutComparison("divergence", finalist, (), evaluator.measured(0.0))
        assert (
            Winner(ranked[0], why, comparison).missed_unseen(searching.question.settings.of_quality)
            == said
        )


@pytest.mark.parametrize(
    ("budget", "objectives", "small"),
    [
        (None, "size", "divergence,size"),  # a model that is destroyed has least of it
        ("depth=7", "depth,params", "divergence,depth,params"),
        ("divergence<=0.2", "depth", "depth"),
        ("perplexity<=1.2x", "depth", "depth"),
        (None, "params,perplexity", "params,perplexity"),
    ],
)
def test_a_cost_without_quality_is_traded_for_divergence(
    budget: str | None, objectives: str, small: str
) -> None:
    assert ",".join(map(str, Question("drop", budget, objectives).objectives)) == small


@pytest.mark.parametrize(
    ("budget", "objectives", "spaces", "along"),
    [
        ("depth=7", "divergence", "pair", ()),
        ("divergence<=0.2", "divergence", "pair", (DEPTH,)),
        (None, "size", "drop,rank", (SIZE,)),
        ("depth=7,divergence<=0.2", "divergence", "pair", (DEPTH,)),
        ("size=0.8x,divergence<=0.2", "divergence", "drop,rank", (SIZE,)),
        # Late steps and factors of so small ones save none.
        ("speedup>=1.3@cpu-2", "divergence", "drop,pair", ()),
        ("kv_bytes=0.8x", "divergence", "drop", ()),
        (None, "divergence", "drop,pair,rank", (DEPTH, SIZE)),
        ("depth>=5", "divergence", "repeat", ()),
    ],
)
def test_a_question_that_names_no_space_has_all_that_lessen_what_it_asks_for(
    budget: str | None, objectives: str, spaces: str, along: tuple[Aspect, ...]
) -> None:
    model = Model.of_config(tiny_model("llama", num_layers=4).config, "tiny")
    settings = Question(None, budget, objectives).on(model)
    there = [
        name
        for name in settings.space.split(",")
        if name in ("drop", "repeat", "pair", "ladder", "rank")
    ]
    assert ",".join(there) == spaces
    assert settings.along == along
    assert Question("pair", budget, objectives).on(model).space == "pair"


@pytest.mark.thorough
def test_the_front_between_two_limits_is_looked_for_on_both_sides() -> None:
    searching, _ = search("pair,drop:layers", "depth=7,divergence<=0.6")
    question, trials = searching.question, [*try_programs(searching, 60)]
    assert question.traded_aspects == (Aspect("divergence"), DEPTH)
    depths = [question.pricing.price(DEPTH, trial.program) for trial in trials]
    good = [
        depth for depth, trial in zip(depths, trials, strict=True) if trial.measured.divergence <= 0.6
    ]
    assert min(good) < 7, "shallower ones are as good as they have to be"
    assert min(depths) < min(good), "and what is shallower still was tried"
    assert 2 * depths.count(7) >= len([trial for trial in trials if trial.number >= 20])
    ranked, why = choose(question, trials, None)
    within = [
        t for t, depth in zip(trials, depths, strict=True) if depth <= 7 and t.measured.divergence <= 0.6
    ]
    assert ranked[0].measured.divergence == min(trial.measured.divergence for trial in within)
    assert why == "The best within depth=7,divergence<=0.6"


@pytest.mark.thorough
def test_two_costs_are_looked_along_in_one_search() -> None:
    searching, _ = search("pair,rank", None)
    question = searching.question
    assert question.along == (DEPTH, SIZE)
    trials = [*try_programs(searching, 30)]
    curves = {
        (curve.along, curve.name)
        for cost in question.along
        for curve in quality_curves(cost, trials, question.original, question.pricing, resamples=20)
    }
    assert curves == {(DEPTH, "pair"), (DEPTH, TOGETHER), (SIZE, "rank"), (SIZE, TOGETHER)}
    front = {point.number for point in question.front(trials)}
    pricing = question.pricing
    assert front == {
        point.number
        for cost in (DEPTH, SIZE)
        for point in pareto_front(trials, (Aspect("divergence"), cost), pricing)
    }
    dense = pricing.price(SIZE, question.mixture.model.program)
    for trial in trials:
        cost = DEPTH if trial.level in question.levels[DEPTH] else SIZE
        assert (
            question.pricing.price(cost, trial.program) <= trial.level < {DEPTH: 10, SIZE: dense}[cost]
        )


def study_of(searching: Search, **options: Any) -> optuna.Study:
    directions = ["minimize"] * len(searching.question.settings.recorded_aspects)
    return optuna.create_study(directions=directions, sampler=SurgerySampler(searching), **options)


def keys(searching: Search, trials: Sequence[FrozenTrial]) -> list[str]:
    return [searching.proposal(trial.params).key for trial in trials]


def test_a_study_that_is_optimised_finds_what_a_search_finds() -> None:
    searching, _ = search("pair,drop:layers", "depth=7")
    study = study_of(searching)
    study.optimize(searching.objective, n_trials=30)
    assert len({*keys(searching, study.trials)}) == 30
    other, _ = search("pair,drop:layers", "depth=7")
    assert study.best_value == pytest.approx(
        min(trial.measured.divergence for trial in try_programs(other, 30))
    )
    assert (
        searching.question.mixture.program(
            searching.question.mixture.choice(study.best_params)
        ).effective_depth()
        <= 7
    )
    for evaluator in (
        optuna.importance.PedAnovaImportanceEvaluator(),
        optuna.importance.FanovaImportanceEvaluator(),
    ):
        assert {*optuna.importance.get_param_importances(study, evaluator=evaluator)} <= {
            *searching.question.mixture.parameters
        }


def test_ask_and_tell_with_several_running_at_once() -> None:
    searching, _ = search("pair", "depth=7")
    study, measured = study_of(searching), searching.objective
    waiting = [study.ask(searching.question.mixture.categories) for _ in range(12)]
    assert len({*keys(searching, [trial._cached_frozen_trial for trial in waiting])}) == 12
    for trial in waiting[::2]:
        study.tell(trial, measured(trial))
    study.tell(waiting[1], state=TrialState.FAIL)
    more = [study.ask(searching.question.mixture.categories) for _ in range(6)]
    known = {*keys(searching, [t for t in study.trials if t.state != TrialState.FAIL])}
    assert len(known) == 17
    assert len({*keys(searching, [trial._cached_frozen_trial for trial in more])}) == 6


@pytest.mark.parametrize("storage", ["memory", "journal", "sqlite"])
def test_studies_in_every_storage_of_which_threads_and_later_sessions_go_on(
    storage: str, tmp_path: Path
) -> None:
    backends = {
        "memory": optuna.storages.InMemoryStorage,
        "journal": lambda: optuna.storages.journal.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(tmp_path / "log"))
        ),
        "sqlite": lambda: f"sqlite:///{tmp_path}/study.db",
    }
    searching, _ = search("pair", "depth=7")
    study = study_of(searching, storage=backends[storage](), study_name="search")
    study.optimize(searching.objective, n_trials=6)
    if storage == "memory":
        study.optimize(searching.objective, n_trials=6, n_jobs=2)
    else:
        again, _ = search("pair", "depth=7")
        loaded = optuna.load_study(
            study_name="search", storage=backends[storage](), sampler=SurgerySampler(again)
        )
        loaded.optimize(again.objective, n_trials=6)
    found = optuna.load_study(study_name="search", storage=study._storage).trials
    assert len(found) == 12
    assert len({*keys(searching, found)}) == 12 or storage == "memory"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::optuna.exceptions.ExperimentalWarning")
def test_several_objectives_give_a_front_and_a_terminator_ends_a_study() -> None:
    searching, _ = search("pair", None)
    study = study_of(searching)
    study.optimize(searching.objective, n_trials=30)
    assert {trial.values[1] for trial in study.best_trials} >= {9.0, 8.0, 7.0, 6.0, 5.0}
    single, _ = search("pair", "depth=7")
    study = study_of(single)
    terminator = optuna.terminator.Terminator(
        improvement_evaluator=optuna.terminator.BestValueStagnationEvaluator(5),
        error_evaluator=optuna.terminator.StaticErrorEvaluator(0),
        min_n_trials=8,
    )
    callback = optuna.terminator.TerminatorCallback(terminator)
    study.optimize(single.objective, n_trials=60, callbacks=[callback])
    assert 8 <= len(study.trials) < 60


def test_trials_that_others_chose_and_measured_are_learnt_from() -> None:
    searching, _ = search("pair", "depth=7")
    study = study_of(searching)
    best = min(
        (trial for trial in try_programs(search("pair", "depth=7")[0], 40)),
        key=lambda trial: trial.measured.divergence,
    )
    study.enqueue_trial(searching.question.mixture.values(best.choice))
    study.optimize(searching.objective, n_trials=8)
    assert study.best_trial.number == 0
    assert len({*keys(searching, study.trials)}) == 8
    (broken,) = searching.finished_trials(study.trials[:1])
    assert broken.measured.divergence == study.trials[0].value


def test_a_space_that_is_tried_out_stops_the_study() -> None:
    searching, _ = search("pair", "depth=9")
    study = study_of(searching)
    study.optimize(searching.objective, n_trials=200)
    other, _ = search("pair", "depth=9")
    assert (
        len({*keys(searching, study.trials)})
        == len([*try_programs(other, 200)])
        == len(study.trials) - 1
        < 199
    )


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_runs_and_what_it_asks_follows_from_the_study(name: str) -> None:
    trials = 12 if name == "gp" else 24
    found = []
    for _ in range(2):
        searching, _ = search("pair,drop:layers", "depth=7")
        tried = try_programs(searching, trials, name, seed=3)
        found.append([(trial.number, trial.source, trial.key) for trial in tried])
    assert found[0] == found[1]
    assert [number for number, *_ in found[0]] == list(range(trials))
    assert {source for _, source, _ in found[0]} & {
        "TPE",
        "GP",
        "CmaEs",
        "NSGAII",
        "Random",
        "regression",
    }
    if name not in ("surgeon", "gp"):
        searching, _ = search("pair,drop:layers", "depth=7")
        other = [trial.key for trial in try_programs(searching, trials, name, seed=4)]
        assert other != [key for *_, key in found[0]]


def test_workers_that_ask_at_the_same_moment_ask_for_different_trials() -> None:
    """Others have begun a trial each of which nothing is said yet."""
    searching, _ = search("pair,drop:layers", "depth=7")
    asked: list[str] = []
    for others in range(4):
        study = optuna.create_study(sampler=SurgerySampler(searching))
        for _ in range(others):
            study._storage.create_new_trial(study._study_id)
        asked += keys(searching, [study.ask(searching.question.mixture.categories)._cached_frozen_trial])
    assert len({*asked}) == 4


def test_samplers_that_cannot_be_had() -> None:
    searching, _ = search("pair", "depth=7")
    with pytest.raises(ValueError, match="unknown sampler 'tp'; did you mean 'tpe'"):
        make_sampler(searching, "tp")


def test_trials_of_another_objective_and_threads_that_ask_at_once() -> None:
    """A user's own objective says one number; nothing else is known of the trials."""
    searching, _ = search("pair", "depth=7")
    study = study_of(searching)
    names = searching.question.mixture.categories

    def own() -> None:
        for _ in range(5):
            trial = study.ask(names)
            study.tell(trial, math.sqrt(sum(value != "" for value in trial.params.values())))

    threads = [threading.Thread(target=own) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(study.trials) == 10
