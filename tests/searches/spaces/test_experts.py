"""Choices of experts as edits, the operations that they come to, and what they cost."""

from __future__ import annotations

import pytest

from surgeon.cost.deployment import Deployment
from surgeon.language.operations.applied import Edit
from surgeon.language.program import Program
from surgeon.searches.mixture import Mixture
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import Aspect
from surgeon.searches.spaces import parse_spaces
from surgeon.testing.spaces import small_model


def mixture(spaces: str, **config: object) -> Mixture:
    return Mixture(parse_spaces(spaces), small_model("qwen3_moe", layers=3, **config))


def test_the_most_salient_stay_and_one_near_the_edge_is_exchanged() -> None:
    found = mixture("experts:2", num_experts=6).by_saliency({1: [5, 0, 3, 1, 2, 4]})
    ways = [
        edit.option for space in found.spaces for edit in space.edits(found.model) if edit.first == 1
    ]
    assert ways == ["0,5", "3,5", "1,5", "0,3", "0,1"], "first those of REAP"
    (first, *_) = (stretch for stretch in found.stretches() if stretch[0].first == 0)
    assert [edit.option for edit in first] == ["0,1", "0,5", "0,1"], (
        "layers of no known order have their own"
    )


def test_a_choice_is_written_by_layers() -> None:
    found = mixture("experts:2,drop", mlp_only_layers=[])
    choice = [Edit.parse(text) for text in ("experts 0:1 0,1", "experts 1:2 1,2")]
    assert found.program(choice) == Program.parse("A0 F0!e0,e1 A1 F1!e1,e2 A2 F2")
    assert [one.to_yaml() for one in found.operations(choice)] == [
        'experts: {layers: "0:2", keep: [[0, 1], [1, 2]]}'
    ]
    assert found.exclude(choice[0], Edit.parse("drop 0:1 mlp"))
    assert not found.exclude(choice[0], Edit.parse("drop 0:1 attention"))


def test_experts_are_counted_as_a_mean_over_mixtures() -> None:
    model = small_model("qwen3_moe", layers=3, mlp_only_layers=[0])
    pricing = Pricing(model, (Aspect("experts"), Aspect("params")), Deployment(2))
    assert next(iter(pricing.dense.values())) == 4
    found = Mixture(parse_spaces("experts:2"), model)
    assert {edit.first for edit in found.edits} == {1, 2}
    costs = [[pricing.price(one, program) for one in pricing.aspects] for program in found.single_edits]
    assert {cost[0] for cost in costs} == {3.0}
    gone = 2 * (3 * 16 * 32 + 32)  # two experts' matrices, and their rows of the router
    assert {[*pricing.dense.values()][1] - cost[1] for cost in costs} == {gone}


def test_what_is_no_choice() -> None:
    with pytest.raises(ValueError, match="experts:2.5 should say how many experts a mixture keeps"):
        parse_spaces("experts:2.5")
    with pytest.raises(
        ValueError, match="the space experts has no edits of qwen3_moe: its mixtures have 4 experts"
    ):
        mixture("experts:4").require_edits()
    dense = Mixture(parse_spaces("experts"), small_model("llama"))
    with pytest.raises(
        ValueError, match="no edits of llama: none of its layers is a mixture of experts"
    ):
        dense.require_edits()
