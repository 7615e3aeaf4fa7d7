"""Which ranks the operation `lowrank` gives, and what it refuses."""

from __future__ import annotations

import re
import warnings
from fractions import Fraction
from typing import Any

import pytest

from surgeon.language.operations.lowrank import lowrank, rank_for
from surgeon.language.operations.merge import merge
from surgeon.language.operations.pair import pair
from surgeon.language.operations.prune import prune
from surgeon.language.operations.tracks import tracks
from surgeon.language.program import Program
from surgeon.language.recipe import parse_recipe
from surgeon.language.sublayer import LayerShapes

SHAPES = LayerShapes(
    {"q": (64, 64), "k": (16, 64), "v": (16, 64), "o": (64, 64), "up": (96, 64), "down": (64, 96)}
)
DENSE = Program.dense(3)


def made(layers: range, program: Program = DENSE, **given: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return str(lowrank(program, layers, SHAPES, **given))


def test_keep_is_a_share_of_parameters() -> None:
    text = made(range(1, 2), keep=0.5)
    assert text == "A0 F0 A1@q16,k6,v6,o16 F1@up19,down19 A2 F2"
    program = Program.parse(text)
    whole = sum(out * inside for out, inside in SHAPES.matrices.values())
    spared = Program.dense(3).parameters(SHAPES) - program.parameters(SHAPES)
    assert 0.5 * whole < spared < 0.55 * whole
    assert made(range(0, 1), keep=0.5, weights=["v", "down"]) == "A0@v6 F0@down19 A1 F1 A2 F2"


@pytest.mark.parametrize("size", [(4, 4), (64, 16), (7, 96), (1, 9)])
def test_no_rank_above_the_share_none_below_it_is_left_out(size: tuple[int, int]) -> None:
    out, inside = size
    for percent in range(1, 101):
        keep = Fraction(percent, 100)
        within = [r for r in range(1, min(size) + 1) if r * (out + inside) <= keep * out * inside] or [1]
        best = max(within)
        expected = best if best * (out + inside) < out * inside else None
        assert rank_for(percent / 100, out, inside) == expected


def test_ranks_by_matrix_and_layer() -> None:
    assert made(range(0, 2), ranks={"q": 8, "down": 4}) == "A0@q8 F0@down4 A1@q8 F1@down4 A2 F2"
    by_layer = made(range(0, 3), ranks={"q": [8, None, 3], "v": [None, 2, None]})
    assert by_layer == "A0@q8 F0 A1@v2 F1 A2@q3 F2"


def test_it_edits_what_other_operations_made() -> None:
    paired = pair(DENSE, range(1, 3))
    assert made(range(1, 2), paired, ranks={"q": 8}) == "A0 F0 [A1@q8 A2] [F1 F2]"
    sliced = tracks(DENSE, range(0, 1), count=2, depth=1)
    assert "A0/2:1@q8" in made(range(0, 1), sliced, ranks={"q": 8})
    merged = merge(DENSE, range(1, 3))
    assert made(range(1, 3), merged, ranks={"up": 8}) == "A0 F0 A1~A2 F1~F2@up8"
    once = lowrank(DENSE, range(0, 2), SHAPES, ranks={"q": 8})
    assert made(range(1, 3), once, ranks={"o": 5}) == "A0@q8 F0 A1@q8,o5 F1 A2@o5 F2"
    fused = Program.dense(2, steps_per_layer=1)
    assert made(range(0, 1), fused, ranks={"q": 8, "up": 3}) == "[A0@q8 F0@up3] [A1 F1]"


def test_what_saves_nothing_stays_whole_and_is_said() -> None:
    expected = (
        "lowrank: k of layers 0:2 stays whole: two factors of rank 13 save nothing of a matrix of 16 x 64",
        "lowrank: q of layers 0:2 stays whole: two factors of rank 32 save nothing of a matrix of 64 x 64",
    )
    with pytest.warns(UserWarning, match="stays whole") as said:
        program = lowrank(DENSE, range(0, 2), SHAPES, ranks={"k": [13, 12], "q": 32})
    assert str(program) == "A0 F0 A1@k12 F1 A2 F2"
    assert tuple(str(one.message) for one in said) == expected
    with pytest.warns(
        UserWarning, match="q of layers 0:2 stays whole: two factors with keep 1 save nothing"
    ) as said:
        program = lowrank(DENSE, range(0, 2), SHAPES, keep=1.0, weights=["q", "k"])
    assert str(program) == "A0@k12 F0 A1@k12 F1 A2 F2"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give either keep, a share of each matrix's parameters such as 0.6, or ranks, by matrix"),
        ({"keep": 0.5, "ranks": {"q": 4}}, "give either keep"),
        ({"keep": 0.0}, "keep must be more than 0 and at most 1, not 0"),
        ({"keep": 1.01}, "keep must be more than 0 and at most 1, not 1.01"),
        ({"keep": float("nan")}, "keep must be more than 0 and at most 1, not nan"),
        (
            {"keep": 0.5, "weights": ["gate"]},
            "the model's layers have no matrix 'gate'; known: q, k, v, o, up, down",
        ),
        ({"ranks": {"gate": 3}}, "the model's layers have no matrix 'gate'"),
        (
            {"ranks": {"q": 3}, "weights": ["q"]},
            "weights are the keys of ranks; leave one of the two out",
        ),
        ({"ranks": {"q": 0}}, "rank 0 of q must be from 1 to 64, the matrix's full rank"),
        ({"ranks": {"k": 17}}, "rank 17 of k must be from 1 to 16, the matrix's full rank"),
        (
            {"ranks": {"k": [4]}},
            "there are 1 ranks of k for the 2 layers 1:3; give one rank for all of them, or one",
        ),
        (
            {"keep": 0.5, "allocation": "damage"},
            "allocation damage has to be measured: surgeon spectrum, with this and",
        ),
        ({"keep": 0.5, "alpha": 1.5}, "alpha must be from 0 to 1, not 1.5"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        lowrank(DENSE, range(1, 3), SHAPES, **given)


def test_layers_that_do_not_fit_are_refused() -> None:
    once = lowrank(DENSE, range(0, 2), SHAPES, ranks={"q": 8})
    with pytest.raises(
        ValueError, match="overlap with what an earlier operation changed: A1@q8 has factors in place of"
    ):
        lowrank(once, range(1, 3), SHAPES, keep=0.5)
    merged = merge(DENSE, range(1, 3))
    with pytest.raises(
        ValueError, match="layers 0:2 cut through A1~A2; take in all of its layers, or none"
    ):
        lowrank(merged, range(0, 2), SHAPES, keep=0.5)
    with pytest.raises(ValueError, match="the layers of A1~A2 are given different ranks"):
        lowrank(merged, range(1, 3), SHAPES, ranks={"q": [8, 7]})
    with pytest.raises(
        ValueError, match="layers 0:3 overlap with what an earlier operation removed: layer 1"
    ):
        lowrank(prune(DENSE, range(1, 2)), range(0, 3), SHAPES, keep=0.5)


RECIPE = """\
surgeon: 1
model: demo
operations:
  - lowrank: {{layers: "0:2", {}}}
"""


def test_recipes_say_ranks_and_how_values_are_made() -> None:
    given = "ranks: {q: [8, null]}, method: whitened, calibration: {data: text.txt, tokens: 64, sequential: true}"
    recipe = parse_recipe(RECIPE.format(given))
    assert str(recipe.program(3, shapes=SHAPES)) == "A0@q8 F0 A1 F1 A2 F2"
    again = parse_recipe(recipe.to_yaml())
    assert again.operations[0].parameters == recipe.operations[0].parameters
    with pytest.raises(
        ValueError, match="recipe:4: lowrank: lowrank depends on the shapes of the model's layers"
    ):
        recipe.program(3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("keep: 0", "recipe:4: lowrank: keep must be more than 0 and at most 1, not 0"),
        (
            "keep: 0.5, method: magic",
            "recipe:4: lowrank: method: Input should be 'plain', 'activation' or 'whitened'",
        ),
        ("keep: 0.5, weights: [w]", "recipe:4: lowrank: weights.0: Input should be 'q', 'g', 'k'"),
        ("ranks: {w: 3}", "recipe:4: lowrank: ranks.w: Input should be 'q', 'g', 'k'"),
        (
            "keep: 0.5, calibration: {file: a.txt}",
            "recipe:4: unknown key 'file'; known: data, tokens",
        ),
        (
            "keep: 0.5, calibration: {data: a, tokens: x}",
            "recipe:4: lowrank: calibration.tokens: Input should be a valid",
        ),
    ],
)
def test_recipes_with_mistakes(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_recipe(RECIPE.format(given)).program(3, shapes=SHAPES)
