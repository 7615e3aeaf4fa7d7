"""Mixtures with fewer experts, in programs alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from surgeon.language.operations.experts import experts
from surgeon.language.operations.lowrank import lowrank
from surgeon.language.operations.pair import pair
from surgeon.language.program import Program
from surgeon.language.recipe import parse_recipe
from surgeon.language.sublayer import LayerShapes, MixtureShapes

_DENSE = LayerShapes({"gate": (40, 16), "up": (40, 16), "down": (16, 40)}, units={"F": 40})
_MIXTURE = replace(
    _DENSE, matrices={"gate": (12, 16), "up": (12, 16), "down": (16, 12)}, units={"F": 12}
)
SHAPES = replace(_MIXTURE, mixture=MixtureShapes(4, 2, 16), others={2: _DENSE})  # layer 2 is dense
DENSE = Program.dense(4)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"keep": [3, 0]}, "A0 F0 A1 F1!e0,e3 A2 F2 A3 F3!e0,e3"),
        ({"keep": [[0], [1], [1, 2]]}, "A0 F0 A1 F1!e0 A2 F2 A3 F3!e1,e2"),
        ({"drop": 1}, "A0 F0 A1 F1!e0,e2,e3 A2 F2 A3 F3!e0,e2,e3"),
        ({"drop": [1, 2]}, "A0 F0 A1 F1!e0,e3 A2 F2 A3 F3!e0,e3"),
        ({"keep": [0, 1, 2, 3]}, str(DENSE)),
    ],
)
def test_the_experts_that_stay(parameters: dict[str, Any], text: str) -> None:
    assert str(experts(DENSE, range(1, 4), SHAPES, **parameters)) == text


def test_some_drawn_by_a_seed() -> None:
    drawn = [experts(DENSE, range(4), SHAPES, keep=2, seed=seed) for seed in range(9)]
    assert {
        len(one.experts or ()) for program in drawn for one in program.sublayers() if one.kind == "F"
    } == {0, 2}
    assert len(set(drawn)) > 5


def test_steps_that_others_made() -> None:
    program = experts(pair(DENSE, range(0, 2)), range(0, 2), SHAPES, drop=3)
    assert str(program) == "[A0 A1] [F0!e0,e1,e2 F1!e0,e1,e2] A2 F2 A3 F3"


@pytest.mark.parametrize(
    ("layers", "parameters", "reason"),
    [
        ((0, 4), {}, "give either keep or drop"),
        ((0, 4), {"keep": [1], "drop": 2}, "give either keep or drop"),
        ((0, 4), {"keep": 2}, "drawn by a seed"),
        ((0, 4), {"keep": [2], "seed": 1}, "drawn by a seed"),
        ((0, 4), {"keep": 5, "seed": 1}, "of 4 experts 1 to 4 can be kept, not 5"),
        ((0, 4), {"keep": [4]}, "different numbers from 0 to 3"),
        ((0, 4), {"keep": [1, 1]}, "different numbers from 0 to 3"),
        ((0, 4), {"keep": []}, "different numbers from 0 to 3"),
        ((0, 4), {"drop": [0, 1, 2, 3]}, "all 4 experts of layer 0 would be left out"),
        ((0, 4), {"keep": [[1], [2]]}, "there are 2 lists of experts for the 4 layers 0:4"),
        ((2, 3), {"keep": [1]}, "none of the layers 2:3 is a mixture"),
    ],
)
def test_what_is_refused(layers: tuple[int, int], parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        experts(DENSE, range(*layers), SHAPES, **parameters)


def test_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="F0!e0,e1 has not all experts of its layer"):
        experts(experts(DENSE, range(0, 1), SHAPES, keep=[0, 1]), range(0, 2), SHAPES, drop=0)


def test_factors_are_of_one_expert_s_matrices_and_of_each_layer_s_own() -> None:
    program = lowrank(DENSE, range(1, 4), SHAPES, weights=["down"], keep=0.5)
    assert str(program) == "A0 F0 A1 F1@down3 A2 F2@down5 A3 F3@down3"
    given = lowrank(DENSE, range(1, 3), SHAPES, ranks={"up": [4, 11]})
    assert str(given) == "A0 F0 A1 F1@up4 A2 F2@up11 A3 F3"
    with pytest.raises(ValueError, match="rank 13 of up must be from 1 to 12"):
        lowrank(DENSE, range(1, 3), SHAPES, ranks={"up": 13})


def test_averages_of_mixtures_are_refused_on_their_line() -> None:
    recipe = parse_recipe('surgeon: 1\nmodel: m\noperations:\n  - merge: {layers: "0:2"}\n', "r.yaml")
    with pytest.raises(
        ValueError, match=r"r.yaml:4: merge: F0~F1 cannot be: experts of different layers"
    ):
        recipe.program(4, shapes=SHAPES)
