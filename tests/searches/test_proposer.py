"""What is proposed, on made-up damage whose best choice is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest

from surgeon.findings.trials import ADDITIVE, SECOND_ORDER, SOURCES, WINDOW
from surgeon.language.operations.applied import Choice, Edit
from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.quality.summary import Quality
from surgeon.searches.evaluate import Terms
from surgeon.searches.mixture import Mixture, Proposal, Trial
from surgeon.searches.proposer import Goal, Proposer, at_the_edge, evenly
from surgeon.searches.spaces import parse_spaces
from tests.tiny_models import tiny_model

LAYERS, DEPTH = 10, 7


def mixture(spaces: str = "pair") -> Mixture:
    model = Model.of_config(tiny_model("llama", num_layers=LAYERS).config, "tiny")
    return Mixture(parse_spaces(spaces), model)


def true_damage(choice: Sequence[Edit]) -> float:
    """Every edit costs something of its own, and two next to each other cost more than their sum."""
    alone = sum(0.01 * (1 + abs(edit.first - 5)) * len(edit.layers) for edit in choice)
    return alone + sum(0.05 for one, other in pairwise(sorted(choice)) if other.first == one.stop)


def depth_of(program: Program) -> tuple[float, ...]:
    return (program.effective_depth(),)


def proposer(spaces: str = "pair", goals: Sequence[Goal] = (Goal((float(DEPTH),)),)) -> Proposer:
    mixed = mixture(spaces)
    alone = np.array([true_damage([edit]) for edit in mixed.edits])
    return Proposer(mixed, Terms(alone, np.eye(len(alone))), depth_of, tuple(goals))


def run(proposals: Sequence[Proposal], trials: list[Trial]) -> None:
    for proposal in proposals:
        value = true_damage(proposal.choice)
        trials.append(Trial(**vars(proposal), number=len(trials), measured=Quality(1, divergence=value)))


def every_pair_choice() -> list[Choice]:
    edits = mixture().edits
    chosen = combinations(edits, LAYERS - DEPTH)
    return [choice for choice in chosen if all(b.first >= a.stop for a, b in pairwise(choice))]


def test_the_first_round_has_the_sum_the_papers_window_and_the_second_order() -> None:
    proposals = proposer().first_round(6)
    assert [proposal.source for proposal in proposals[:3]] == [ADDITIVE, WINDOW, SECOND_ORDER]
    sums = {choice: sum(true_damage([edit]) for edit in choice) for choice in every_pair_choice()}
    assert sums[proposals[0].choice] == pytest.approx(min(sums.values()))
    layers = [edit.first for edit in proposals[1].choice]
    assert all(b - a == 2 for a, b in pairwise(layers)), "an unbroken stretch"
    assert len(proposals) == 6 == len({proposal.key for proposal in proposals})


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_every_proposal_keeps_an_attention(steps: int) -> None:
    """Also where nothing else is left; there are proposals for the tightest goal that can be met."""
    made = proposer("drop", [Goal((steps / 2,))])
    assert made.can_meet
    trials: list[Trial] = []
    for _ in range(4):
        proposals = made.next_round(trials, [6]) if trials else made.first_round(6)
        assert proposals or trials
        assert all("A" in proposal.key for proposal in proposals)
        run(proposals, trials)
    assert min(len(trial.key.split()) for trial in trials) <= steps


def test_trials_correct_what_single_edits_foretell() -> None:
    """The sum is wrong about neighbours; the best choice is found all the same, in a tenth of all evaluations."""
    every = [true_damage(choice) for choice in every_pair_choice()]
    asking, trials = proposer(), []
    run(asking.first_round(4), trials)
    while len(trials) < len(every) // 3:
        run(asking.next_round(trials, [2]), trials)
    best = min(trial.measured.divergence for trial in trials)
    assert trials[0].measured.divergence > min(every) + 0.01
    assert best == pytest.approx(min(every))
    assert {trial.source for trial in trials} <= set(SOURCES)


def test_layers_run_again_in_the_place_of_those_that_are_dropped() -> None:
    mixed = mixture("drop:layers,repeat")
    alone = np.array([true_damage([edit]) for edit in mixed.edits])

    def prices(program: Program) -> tuple[float, ...]:
        return len(set(program.sublayers())) / 2, -program.effective_depth()

    asking = Proposer(mixed, Terms(alone, np.eye(len(alone))), prices, (Goal((LAYERS - 2.0, -LAYERS)),))
    trials: list[Trial] = []
    run(asking.first_round(3), trials)
    run(asking.next_round(trials, [4]), trials)
    assert len(trials) == 7
    for trial in trials:
        program = Program.parse(trial.key)
        assert len(program.layers) == LAYERS - 2
        assert program.effective_depth() >= LAYERS


def test_all_proposals_meet_their_goal_and_none_comes_twice() -> None:
    goals = [Goal((float(depth),), float(depth)) for depth in (9, 8, 7, 6)]
    asking, trials = proposer("pair:3,par", goals), []
    run(asking.first_round(3), trials)
    for _ in range(3):
        run(asking.next_round(trials, evenly(goals, trials, 8)), trials)
    assert len({trial.key for trial in trials}) == len(trials)
    for trial in trials:
        assert asking.mixture.program(trial.choice) == Program.parse(trial.key)
        level = trial.level
        assert level is not None
        assert Program.parse(trial.key).effective_depth() <= level
    assert len({trial.level for trial in trials}) == len(goals)


def test_a_small_space_is_tried_out_and_then_there_is_nothing_more() -> None:
    asking, trials = proposer(goals=[Goal((float(LAYERS - 1),))]), []
    run(asking.first_round(4), trials)
    while found := asking.next_round(trials, [4]):
        run(found, trials)
    assert {trial.choice for trial in trials if len(trial.choice) == 1} == {
        (edit,) for edit in asking.mixture.edits
    }


def test_what_was_found_elsewhere_in_the_same_rounds_is_proposed_again() -> None:
    asked: list[list[Proposal]] = []
    for _ in range(2):
        asking, trials = proposer(), []
        run(asking.first_round(4), trials)
        asked.append(asking.next_round(trials, [6]))
    assert asked[0] == asked[1]


@pytest.mark.parametrize("broken", [float("inf"), 30.0])
def test_a_layer_that_breaks_the_model_is_left_alone(broken: float) -> None:
    def damage(choice: Sequence[Edit]) -> float:
        return broken if any(edit.first == 5 for edit in choice) else true_damage(choice)

    mixed = mixture()
    alone = np.array([damage([edit]) for edit in mixed.edits])
    asking = Proposer(mixed, Terms(alone, np.eye(len(alone))), depth_of, (Goal((float(DEPTH),)),))
    trials: list[Trial] = []
    measure: Callable[[Sequence[Edit]], float] = damage
    for proposal in asking.first_round(8):
        value = measure(proposal.choice)
        trials.append(Trial(**vars(proposal), number=len(trials), measured=Quality(1, divergence=value)))
    for proposal in asking.next_round(trials, [8]):
        assert not any(edit.first == 5 for edit in proposal.choice) or proposal.source == WINDOW


GOALS = [Goal((float(depth),), float(depth)) for depth in (15, 14, 13, 12)]


def trial(level: float, divergence: float) -> Trial:
    return Trial("key", "additive", (), level, number=0, measured=Quality(1, divergence=divergence))


def test_limits_are_kept_up_to_rounding() -> None:
    assert Goal((0.3,)).is_met((0.1 + 0.2,))
    assert not Goal((0.3, 1)).is_met((0.3, 1.001))


def test_all_levels_get_as_many_trials_in_the_end() -> None:
    assert evenly(GOALS, [], 6) == [2, 2, 1, 1]
    assert evenly(GOALS, [trial(15, 0.1), trial(15, 0.2), trial(13, 0.1)], 5) == [0, 2, 1, 2]


def test_trials_go_where_what_is_good_enough_ends() -> None:
    assert at_the_edge(GOALS, {15, 14}, 4) == [0, 1, 2, 1]
    assert at_the_edge(GOALS, {}, 4) == [1, 2, 1, 0]
    assert at_the_edge(GOALS, {12}, 3) == [0, 0, 0, 3], (
        "the cheapest level is met: better there, at least"
    )
