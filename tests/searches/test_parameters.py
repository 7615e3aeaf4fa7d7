"""Edits as parameters of Optuna."""

from __future__ import annotations

import random

import pytest

from surgeon.opened import Model
from surgeon.searches.mixture import Mixture
from surgeon.searches.parameters import EditParameters
from surgeon.searches.spaces import SPACES, parse_spaces
from tests.tiny_models import tiny_model


def parameters(spaces: str, layers: int = 12) -> EditParameters:
    model = Model.of_config(tiny_model("llama", num_layers=layers).config, "tiny")
    return EditParameters(Mixture(parse_spaces(spaces), model))


def test_a_parameter_for_each_space_and_layer_with_the_edits_that_begin_there() -> None:
    found = parameters("pair:3,drop").categories
    assert len(found) == 11 + 12
    assert found["pair 00"].choices == ("", "pair 0:2", "pair 0:3")  # type: ignore[attr-defined]
    assert found["drop 11"].choices == ("", "drop 11:12", "drop 11:12 attention", "drop 11:12 mlp")  # type: ignore[attr-defined]
    halves = parameters("ladder:sublayers", 4).edits
    assert list(halves)[-2:] == ["ladder 3 attention", "ladder 3 mlp"], "both may be late"
    assert {len(edits) for edits in halves.values()} == {1}


@pytest.mark.parametrize("spaces", [*SPACES, "pair:4,drop,rank,ladder", "par,fuse,order:3"])
def test_every_choice_is_said_by_values_and_read_again(spaces: str) -> None:
    asked, dice = parameters(spaces), random.Random(0)
    mixture = asked.mixture
    assert sorted(edit for edits in asked.edits.values() for edit in edits) == sorted(mixture.edits)
    for _ in range(20):
        chosen = []
        for edit in dice.sample(mixture.edits, min(8, len(mixture.edits))):
            chosen += [edit] if mixture.is_free(chosen, edit) else []
        choice = tuple(sorted(chosen))
        values = asked.values(choice)
        assert asked.choice(values) == choice
        numbers = {name: asked.categories[name].choices.index(value) for name, value in values.items()}  # type: ignore[attr-defined]
        assert asked.choice(numbers) == choice


def test_of_edits_that_exclude_each_other_the_first_is_taken_and_an_attention_is_left() -> None:
    asked = parameters("pair,drop:layers", 4)
    every = {name: asked.categories[name].choices[1] for name in asked.edits}  # type: ignore[attr-defined]
    assert [str(edit) for edit in asked.choice(every)] == ["drop 0:1", "drop 1:2", "drop 2:3"]
    del every["drop 0"]
    assert [str(edit) for edit in asked.choice(every)] == ["pair 0:2", "drop 2:3", "drop 3:4"]
    with pytest.raises(ValueError, match="the parameter pair 0 is 'pair 1:3'; it should be one of '', 'pair 0:2'"):
        asked.choice({"pair 0": "pair 1:3"})
