"""How wide sublayers are after `width`, alone and with other operations, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from surgeon.language.operations.lowrank import lowrank, rank_for
from surgeon.language.operations.merge import merge
from surgeon.language.operations.pair import pair
from surgeon.language.operations.tracks import tracks
from surgeon.language.operations.width import width
from surgeon.language.program import Program
from surgeon.language.recipe import parse_recipe
from surgeon.language.sublayer import LayerShapes

DENSE = Program.dense(3)
SHAPES = LayerShapes(
    {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64), "up": (96, 64), "down": (64, 96)},
    units={"A": 4, "F": 96},
)


def test_shares_numbers_and_lists() -> None:
    assert (
        str(width(DENSE, range(1, 3), SHAPES, heads=0.5, neurons=0.25)) == "A0 F0 A1#2 F1#24 A2#2 F2#24"
    )
    assert str(width(DENSE, range(1, 2), SHAPES, heads=3)) == "A0 F0 A1#3 F1 A2 F2"
    assert str(width(DENSE, range(1, 2), SHAPES, heads=[3, 0])) == "A0 F0 A1#2 F1 A2 F2"
    assert (
        str(width(DENSE, range(2, 3), SHAPES, neurons=7, by="random", seed=4)) == "A0 F0 A1 F1 A2 F2#7"
    )
    assert str(width(DENSE, range(0, 1), SHAPES, heads=0.1, neurons=0.001)) == "A0#1 F0#1 A1 F1 A2 F2"
    # Rounded.
    assert str(width(DENSE, range(0, 1), SHAPES, heads=0.7, neurons=0.755)) == "A0#3 F0#72 A1 F1 A2 F2"
    assert width(DENSE, range(3), SHAPES, heads=1.0, neurons=96) == DENSE
    with pytest.warns(
        UserWarning, match="all 4 KV groups of layers 0:3 stay: 0.9 of them, rounded, is all"
    ):
        assert width(DENSE, range(3), SHAPES, heads=0.9) == DENSE


def test_it_applies_to_what_other_operations_made() -> None:
    assert (
        str(width(pair(DENSE, range(1, 3)), range(0, 3), SHAPES, heads=0.5))
        == "A0#2 F0 [A1#2 A2#2] [F1 F2]"
    )
    halves = width(
        tracks(DENSE, range(0, 1), count=2, depth=1), range(0, 1), SHAPES, heads=0.5, neurons=0.5
    )
    assert str(halves) == "{A0#2/2:0 F0#48/2:0 | A0#2/2:1 F0#48/2:1} A1 F1 A2 F2"
    narrow = width(width(DENSE, range(3), SHAPES, heads=1), range(1, 2), SHAPES, neurons=5)
    assert str(narrow) == "A0#1 F0 A1#1 F1#5 A2#1 F2"


def test_shares_of_parameters_are_of_what_is_left() -> None:
    narrow = width(DENSE, range(0, 1), SHAPES, heads=0.5, neurons=0.5)
    ranked = lowrank(narrow, range(0, 2), SHAPES, ["q", "down"], 0.5)
    ranks = [rank_for(0.5, *size) for size in ((32, 64), (64, 48), (64, 64), (64, 96))]
    assert str(ranked) == "A0#2@q{} F0#48@down{} A1@q{} F1@down{} A2 F2".format(*ranks)
    after = width(lowrank(DENSE, range(0, 1), SHAPES, ranks={"q": 12}), range(0, 1), SHAPES, heads=0.5)
    assert str(after) == "A0#2@q12 F0 A1 F1 A2 F2"


@pytest.mark.parametrize(
    ("start", "given", "said"),
    [
        (DENSE, {}, "give heads, neurons, or both: a share such as 0.75"),
        (DENSE, {"heads": 0.0}, "a share of KV groups is above 0 and at most 1, not 0"),
        (
            DENSE,
            {"neurons": 1.5},
            "a share of neurons is above 0 and at most 1, not 1.5; a number of them is written",
        ),
        (
            DENSE,
            {"neurons": 97},
            "of 96 neurons 1 to 96 can be kept, not 97; a share of them is written 0.75",
        ),
        (DENSE, {"heads": [4]}, r"different numbers from 0 to 3, as in \[0, 2\], not \[4\]"),
        (DENSE, {"heads": [1, 1]}, "KV groups to keep are different numbers"),
        (DENSE, {"heads": []}, "KV groups to keep are different numbers"),
        (
            DENSE,
            {"heads": 1, "by": "wanda", "seed": 3},
            "seed 3 is of a choice at random; give by: random, or leave",
        ),
        (DENSE, {"heads": 1, "seed": 0}, "seed 0 is of a choice at random"),
        (
            DENSE,
            {"heads": 1, "by": "random", "calibration": {"data": "a.txt"}},
            "by random goes by no text; leave cal",
        ),
        (DENSE, {"heads": 1, "by": "magnitude", "calibration": {}}, "or give by: activation or wanda"),
        (
            "A0#2 F0",
            {"heads": 1},
            "layers 0:1 overlap with what an earlier operation changed: A0#2 is narrow already",
        ),
        ("A0~A1 F0", {"heads": 1}, "A0~A1#1 cannot be: KV groups are chosen in each layer by itself"),
        ("A0/2:0 F0", {"heads": 3}, "the 3 KV groups of A0#3/2:0 do not divide into 2 slices"),
        ("A0@q40 F0", {"heads": 0.5}, "rank 40 of q is above that of a matrix of 32 x 64"),
    ],
)
def test_what_does_not_fit_is_refused(start: Program | str, given: dict[str, Any], said: str) -> None:
    program = Program.parse(start) if isinstance(start, str) else start
    with pytest.raises(ValueError, match=said):
        width(program, range(0, 1), SHAPES, **given)


def test_what_is_narrow_is_no_whole_layer_any_more() -> None:
    with pytest.raises(ValueError, match="overlap with what an earlier operation changed"):
        merge(width(DENSE, range(1, 2), SHAPES, heads=1), range(1, 3))


def test_recipes_say_it() -> None:
    text = "surgeon: 1\nmodel: demo\noperations:\n  - width: {{layers: ['0:1', '2:3'], {}}}\n"
    recipe = parse_recipe(text.format("heads: [0, 2], neurons: 0.5, by: random, seed: 3"))
    assert str(recipe.program(3, shapes=SHAPES)) == "A0#2 F0#48 A1 F1 A2#2 F2#48"
    with pytest.raises(
        ValueError, match="recipe:4: width: seed 3 is of a choice at random; give by: random, or leave"
    ):
        parse_recipe(text.format("heads: 1, by: magnitude, seed: 3")).program(3, shapes=SHAPES)
    with pytest.raises(ValueError, match="recipe:4: width: by: .*'magnitude', 'random', .* not 'size'"):
        parse_recipe(text.format("heads: 0.5, by: size"))
    with pytest.raises(ValueError, match="recipe:4: width: of 4 KV groups 1 to 4 can be kept, not 5"):
        parse_recipe(text.format("heads: 5")).program(3, shapes=SHAPES)
