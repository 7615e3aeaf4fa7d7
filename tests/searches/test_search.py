"""A whole search with a made-up measure: rounds, goals, spaces alone and mixed, and who wins."""

from __future__ import annotations

import pytest

from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.searches.choosing import choose
from surgeon.searches.front import TOGETHER, pareto_front, quality_curves
from surgeon.searches.quantities import DEPTH, SIZE, Aspect
from surgeon.searches.question import Question
from surgeon.searches.results import Winner
from surgeon.searches.search import BATCH, MIXTURE
from surgeon.searches.trial import Trial
from surgeon.searches.winners import Finalist, HeldOutComparison
from tests.searches.made_up_search import damage, search, try_programs
from tests.tiny_models import tiny_model


def test_under_a_budget_all_trials_keep_it_and_are_raced_against_the_best() -> None:
    searching, evaluator = search("pair", "depth=7")
    trials = [*try_programs(searching, 30)]
    assert len(trials) == 30
    assert all(searching.question.is_met(trial) for trial in trials)
    assert evaluator.raced[0] is None, "the first ones run through"
    assert all(rival is not None for rival in evaluator.raced[1:])
    assert evaluator.raced[1:] == sorted(evaluator.raced[1:], reverse=True), "by the best so far, which only improves"
    ranked, why = choose(searching.question, trials, [])
    assert ranked[0].measured.divergence == min(trial.measured.divergence for trial in trials)
    assert why == "The best within depth=7"


def test_a_mixture_is_searched_beside_its_spaces_alone() -> None:
    searching, _ = search("pair,drop:layers", "depth=7")
    trials = [*try_programs(searching, 40)]
    assert list(searching.strands) == [MIXTURE, "drop", "pair"]
    alone = {
        name: [t for t in trials if {edit.space for edit in t.proposal.choice} == {name}] for name in ("drop", "pair")
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


def test_without_a_budget_every_depth_is_looked_at() -> None:
    searching, _ = search("pair", None)
    trials = [*try_programs(searching, 40)]
    levels = [goal.level for goal in searching.question.goals]
    assert levels == [9, 8, 7, 6, 5]
    assert {trial.proposal.level for trial in trials} == set(levels)
    curves = quality_curves(DEPTH, trials, searching.question.original, searching.question.budget.pricing)
    assert [point.cost for point in curves[0].points] == [10, *levels]
    ranked, why = choose(searching.question, trials, curves)
    assert searching.question.along == (DEPTH,)
    price = searching.question.price(DEPTH, ranked[0])
    assert curves[0].knee.cost is None
    most = 1.1 * searching.question.original.perplexity
    kept = [searching.question.price(DEPTH, trial) for trial in trials if trial.measured.perplexity <= most]
    assert "there is no knee" in why
    assert price == (min(kept) if kept else 9)


def test_quality_alone_is_kept_at_the_least_depth() -> None:
    searching, _ = search("pair", "divergence<=0.2")
    trials = [*try_programs(searching, 40)]
    ranked, _ = choose(searching.question, trials, [])
    every = [t for t in trials if t.measured.divergence <= 0.2]
    depth = {t.number: Program.parse(t.proposal.key).effective_depth() for t in trials}
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
    assert {trial.proposal.choice for trial in trials} >= {(edit,) for edit in small.question.mixture.edits}
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
    assert not {*batch} & {trial.proposal.key for trial in trials}


def test_a_program_that_is_known_is_not_measured_again() -> None:
    searching, evaluator = search("pair", "depth=9")
    choice = searching.question.mixture.edits[:1]
    proposal = searching.proposal(searching.parameters.values(choice))
    first = searching.measure(proposal, [])
    evaluator.known.clear()
    assert searching.measure(proposal, [Trial(0, proposal, first)]) == first
    assert first.divergence == damage(choice)


def test_a_limit_of_quality_that_held_out_text_does_not_keep_is_named() -> None:
    searching, evaluator = search("pair", "divergence<=0.2")
    ranked, why = choose(searching.question, [*try_programs(searching, 20)], [])
    seen = ranked[0].measured
    for unseen, said in ((0.19, []), (0.31, ["divergence<=0.2 is not kept on held-out text: divergence 0.31 nats"])):
        assert seen.divergence <= 0.2
        finalist = Finalist(ranked[0], evaluator.measured(unseen))
        comparison = HeldOutComparison("divergence", finalist, (), evaluator.measured(0.0))
        assert Winner(ranked[0], why, comparison).missed_unseen(searching.question.budget) == said


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
def test_a_cost_without_quality_is_traded_for_divergence(budget: str | None, objectives: str, small: str) -> None:
    assert ",".join(map(str, Question("drop", budget, objectives).objectives)) == small


@pytest.mark.parametrize(
    ("budget", "objectives", "spaces", "along"),
    [
        ("depth=7", "divergence", "pair", ()),
        ("divergence<=0.2", "divergence", "pair", (DEPTH,)),
        (None, "size", "drop,rank", (SIZE,)),
        ("depth=7,divergence<=0.2", "divergence", "pair", (DEPTH,)),
        ("size=0.8x,divergence<=0.2", "divergence", "drop,rank", (SIZE,)),
        ("speedup>=1.3@cpu-2", "divergence", "drop,pair", ()),  # late steps and factors of so small ones save none
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
    there = [name for name in settings.space.split(",") if name in ("drop", "repeat", "pair", "ladder", "rank")]
    assert ",".join(there) == spaces
    assert settings.along == along
    assert Question("pair", budget, objectives).on(model).space == "pair"


def test_the_front_between_two_limits_is_looked_for_on_both_sides() -> None:
    searching, _ = search("pair,drop:layers", "depth=7,divergence<=0.6")
    question, trials = searching.question, [*try_programs(searching, 60)]
    assert question.traded == (Aspect("divergence"), DEPTH)
    depths = [question.price(DEPTH, trial) for trial in trials]
    good = [depth for depth, trial in zip(depths, trials, strict=True) if trial.measured.divergence <= 0.6]
    assert min(good) < 7, "shallower ones are as good as they have to be"
    assert min(depths) < min(good), "and what is shallower still was tried"
    assert 2 * depths.count(7) >= len([trial for trial in trials if trial.number >= 20])
    ranked, why = choose(question, trials, [])
    within = [t for t, depth in zip(trials, depths, strict=True) if depth <= 7 and t.measured.divergence <= 0.6]
    assert ranked[0].measured.divergence == min(trial.measured.divergence for trial in within)
    assert why == "The best within depth=7,divergence<=0.6"


def test_two_costs_are_looked_along_in_one_search() -> None:
    searching, _ = search("pair,rank", None)
    question = searching.question
    assert question.along == (DEPTH, SIZE)
    trials = [*try_programs(searching, 30)]
    curves = {
        (curve.along, curve.name)
        for cost in question.along
        for curve in quality_curves(cost, trials, question.original, question.budget.pricing, resamples=20)
    }
    assert curves == {(DEPTH, "pair"), (DEPTH, TOGETHER), (SIZE, "rank"), (SIZE, TOGETHER)}
    front = {point.trial.number for point in question.front(trials)}
    pricing = question.budget.pricing
    assert front == {
        point.trial.number
        for cost in (DEPTH, SIZE)
        for point in pareto_front(trials, (Aspect("divergence"), cost), pricing)
    }
    dense = pricing.price(SIZE, question.mixture.model.program)
    for trial in trials:
        cost = DEPTH if trial.proposal.level in question.levels[DEPTH] else SIZE
        assert question.price(cost, trial) <= trial.proposal.level < {DEPTH: 10, SIZE: dense}[cost]
