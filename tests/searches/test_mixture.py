"""Choices of edits of several spaces: which go together, and the programs and recipes that they come to."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.language.operations.applied import Choice, Edit, as_choice
from surgeon.language.program import Program
from surgeon.language.recipe import parse_recipe
from surgeon.models.edit import edit as edited
from surgeon.opened import Model
from surgeon.searches.mixture import Mixture
from surgeon.searches.spaces import SPACES, parse_spaces
from surgeon.testing.spaces import check_choice, small_model
from tests.checkpoint.helpers import IDS, plain_logits, relative_error
from tests.tiny_models import tiny_model

ALL = ",".join(SPACES)
WIDEST = "pair:4,par:4,ladder:sublayers,drop,order:4,tracks:8,desync,fuse,rank:0.9/0.7/0.5/0.3"


def mixture(spaces: str = ALL, family: str = "llama", layers: int = 6, ranks: int = 2) -> Mixture:
    return Mixture(parse_spaces(spaces, ranks), small_model(family, layers))


def choice(*texts: str) -> Choice:
    return as_choice(map(Edit.parse, texts))


# What is written of a choice, and the program that it comes to.
EXAMPLES = {
    ("pair 2:4", "pair 4:6"): (['pair: {layers: "2:6"}'], "A0 F0 A1 F1 [A2 A3] [F2 F3] [A4 A5] [F4 F5]"),
    ("par 0:2", "pair 3:5"): (
        ['pair: {layers: "3:5"}', 'pair: {layers: "0:2", form: "par"}'],
        "{A0 F0 | A1 F1} A2 F2 [A3 A4] [F3 F4] A5 F5",
    ),
    # One layer of a pair is to be late: the step that both share is.
    ("pair 2:4", "ladder 3:4"): (
        ['pair: {layers: "2:4"}', 'ladder: {layers: "2:4"}'],
        "A0 F0 A1 F1 >[A2 A3] >[F2 F3] A4 F4 A5 F5",
    ),
    ("fuse 1:2", "ladder 1:2", "ladder 2:3"): (
        ['fuse_attention_mlp: {layers: "1:2"}', 'ladder: {layers: "1:3"}'],
        "A0 F0 >[A1 F1] >A2 >F2 A3 F3 A4 F4 A5 F5",
    ),
    ("drop 0:1", "drop 2:3 attention", "rank 2:3 mlp:0.4"): (
        [
            'prune: {layers: "0:1"}',
            'prune: {layers: "2:3", sublayers: "attention"}',
            'lowrank: {layers: "2:3", weights: ["gate", "up", "down"], keep: 0.4}',
        ],
        "A1 F1 F2@gate7,up7,down7 A3 F3 A4 F4 A5 F5",
    ),
    ("tracks 0:2", "order 2:4 reversed", "desync 4:5"): (
        [
            'tracks: {layers: "0:2", count: 2, depth: 2}',
            'desync: {layers: "4:5", count: 2}',
            'reorder: {layers: "2:4", order: [3, 2]}',
        ],
        "{A0/2:0 F0/2:0 A1/2:0 F1/2:0 | A0/2:1 F0/2:1 A1/2:1 F1/2:1} A3 F3 A2 F2 {A4/2:0 F4/2:0 | A4/2:1 F4/2:1} A5 F5",
    ),
}


@pytest.mark.parametrize("edits", EXAMPLES)
def test_a_choice_is_a_recipe(edits: tuple[str, ...]) -> None:
    lines, program = EXAMPLES[edits]
    searching = mixture()
    assert [operation.to_yaml() for operation in searching.operations(choice(*edits))] == lines
    assert str(searching.program(choice(*edits))) == program
    check_choice(searching, choice(*edits))
    recipe = searching.recipe(choice(*edits), "demo", "ab" * 32)
    read = parse_recipe(recipe.to_yaml())
    assert (read.model, read.weights) == ("demo", "ab" * 32)
    assert str(read.program(6, shapes=searching.model.layer_shapes)) == program
    assert read.expect.effective_depth == Program.parse(program).effective_depth()


def test_no_edits_are_the_unedited_model() -> None:
    searching = mixture()
    assert searching.program(()) == searching.model.program
    assert searching.operations(()) == ()
    assert searching.recipe((), "demo").program(6) == searching.model.program


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("pair 1:3", "pair 2:4"),
        ("pair 1:3", "par 2:4"),
        ("par 1:3", "ladder 2:3"),
        ("tracks 0:4", "ladder 3:4"),
        ("desync 1:2", "tracks 0:2"),
        ("drop 3:4", "ladder 3:4"),
        ("drop 3:4", "rank 3:4 mlp:0.6"),
        ("drop 3:4 attention", "rank 3:4 attention:0.6"),
        ("drop 3:4 attention", "drop 3:4 mlp"),
        ("rank 3:4 attention:0.4", "rank 3:4 attention:0.6"),
        ("order 1:3 reversed", "fuse 2:3"),
    ],
)
def test_what_does_not_go_together_is_refused(one: str, other: str) -> None:
    searching, first, second = mixture(), Edit.parse(one), Edit.parse(other)
    assert searching.exclude(first, second)
    assert searching.exclude(second, first)
    assert not searching.is_free(choice("rank 5:6 mlp:0.6", one), second)
    with pytest.raises(
        ValueError, match="do not go together: both decide the .* of layer [123]"
    ) as refused:
        searching.program([first, second])
    assert one in str(refused.value)
    assert other in str(refused.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("pair 1:3", "ladder 2:3"),
        ("pair 1:3", "rank 2:3 mlp:0.6"),
        ("par 1:3", "rank 2:3 mlp:0.6"),
        ("tracks 0:4", "rank 3:4 attention:0.6"),
        ("drop 3:4 attention", "rank 3:4 mlp:0.6"),
        ("fuse 3:4", "ladder 3:4"),
        ("order 1:3 reversed", "ladder 1:2"),
        ("rank 3:4 attention:0.4", "rank 3:4 mlp:0.4"),
    ],
)
def test_what_goes_together(one: str, other: str) -> None:
    assert not mixture().exclude(Edit.parse(one), Edit.parse(other))
    check_choice(mixture(), choice(one, other))


def test_an_edit_of_another_search_is_refused() -> None:
    with pytest.raises(
        ValueError, match="fuse 2:3 is of none of the spaces that are searched: pair, ladder"
    ):
        mixture("pair,ladder").program(choice("fuse 2:3"))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_exclusions_are_those_of_every_two(family: str) -> None:
    searching = mixture(family=family, layers=4)
    every = [[searching.exclude(one, other) for other in searching.edits] for one in searching.edits]
    np.testing.assert_array_equal(searching.exclusions, every)
    assert searching.exclusions.diagonal().all()


def test_slices_that_cannot_be_are_left_out() -> None:
    """Tracks of three ranks would be slices of heads that three does not divide; branches go to any ranks."""
    sizes: dict[str, set[int]] = {"pair": set(), "par": set(), "tracks": set()}
    for edit in mixture("pair:3,par:3,tracks", ranks=3).edits:
        sizes[edit.space].add(len(edit.layers))
    assert sizes == {"pair": {2, 3}, "par": {2, 3}, "tracks": set()}


def test_edits_are_in_the_order_of_layers() -> None:
    edits = mixture().edits
    assert [edit.first for edit in edits] == sorted(edit.first for edit in edits)
    assert len(set(edits)) == len(edits)


@pytest.mark.parametrize(
    "edits", [("ladder 0:1", "pair 2:4"), ("drop 0:1", "ladder 1:2"), ("pair 0:2", "ladder 0:1")]
)
def test_the_first_step_misses_nothing(edits: tuple[str, ...]) -> None:
    """Late or not, it reads the same: the logits are those of the equations."""
    model = tiny_model("llama", 4, attention_bias=True)
    program = mixture(layers=4).program(choice(*edits))
    expected = plain_logits(model, str(program).removeprefix(">"))
    with torch.no_grad():
        found = edited(model, program)(input_ids=IDS, use_cache=False).logits
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_any_two_edits_of_any_spaces(family: str) -> None:
    """Of the widest spaces; the contract has larger choices."""
    searching = mixture(WIDEST, family, 3)
    for one, other in combinations(searching.edits, 2):
        if not searching.exclude(one, other):
            check_choice(searching, (one, other), written=False)


@settings(max_examples=30)
@given(st.data(), st.sampled_from(["llama", "gpt_neox", "opt", "gemma2"]), st.integers(1, 12))
def test_drawn_choices(data: st.DataObject, family: str, layers: int) -> None:
    ladder = data.draw(st.sampled_from(["ladder", "ladder:sublayers", "ladder:ranges"]))
    searching = mixture(WIDEST.replace("ladder:sublayers", ladder), family, layers)
    if not searching.edits:
        return
    found: list[Edit] = []
    for edit in data.draw(st.lists(st.sampled_from(searching.edits), max_size=12)):
        if searching.is_free(found, edit):
            found.append(edit)
    check_choice(searching, found)


def test_one_attention_is_left() -> None:
    mixed = mixture("drop,pair,rank", layers=3)
    most = choice("drop 0:1", "drop 1:2 attention")
    assert str(mixed.program(most)) == "F1 A2 F2"
    for last in ("drop 2:3", "drop 2:3 attention"):
        assert not mixed.is_free(most, Edit.parse(last))
        assert not mixed.allows((*most, Edit.parse(last)))
        with pytest.raises(
            ValueError,
            match=f"drop 1:2 attention, {last}: no attention is left; a program has to keep one",
        ):
            mixed.recipe((*most, Edit.parse(last)), "small")
    assert mixed.is_free(most, Edit.parse("drop 2:3 mlp"))
    assert str(mixed.program((*most, Edit.parse("drop 2:3 mlp")))) == "F1 A2"
    assert max(len(stretch) for stretch in mixture("drop:layers", layers=3).stretches()) == 2
    assert {edit.option for edit in mixture("drop", layers=1).edits} == {"mlp"}
    with pytest.raises(
        ValueError, match="the space drop has no edits of llama: the model has 1 layer; leave it out"
    ):
        mixture("drop:layers", layers=1).require_edits()


def mixed(spaces: str, layers: int = 12) -> Mixture:
    model = Model.of_config(tiny_model("llama", num_layers=layers).config, "tiny")
    return Mixture(parse_spaces(spaces), model)


def test_a_parameter_for_each_space_and_layer_with_the_edits_that_begin_there() -> None:
    found = mixed("pair:3,drop").categories
    assert len(found) == 11 + 12
    assert found["pair 00"].choices == ("", "pair 0:2", "pair 0:3")  # type: ignore[attr-defined]
    assert found["drop 11"].choices == ("", "drop 11:12", "drop 11:12 attention", "drop 11:12 mlp")  # type: ignore[attr-defined]
    halves = mixed("ladder:sublayers", 4).parameters
    assert list(halves)[-2:] == ["ladder 3 attention", "ladder 3 mlp"], "both may be late"
    assert {len(edits) for edits in halves.values()} == {1}


@pytest.mark.parametrize("spaces", [*SPACES, "pair:4,drop,rank,ladder", "par,fuse,order:3"])
def test_every_choice_is_said_by_values_and_read_again(spaces: str) -> None:
    mixture, dice = mixed(spaces), random.Random(0)
    asked = mixture
    assert sorted(edit for edits in mixture.parameters.values() for edit in edits) == sorted(
        mixture.edits
    )
    for _ in range(20):
        chosen = []
        for edit in dice.sample(mixture.edits, min(8, len(mixture.edits))):
            chosen += [edit] if mixture.is_free(chosen, edit) else []
        choice = tuple(sorted(chosen))
        values = asked.values(choice)
        assert asked.choice(values) == choice


def test_of_edits_that_exclude_each_other_the_first_is_taken_and_an_attention_is_left() -> None:
    asked = mixed("pair,drop:layers", 4)
    every = {name: asked.categories[name].choices[1] for name in asked.parameters}  # type: ignore[attr-defined]
    assert [str(edit) for edit in asked.choice(every)] == ["drop 0:1", "drop 1:2", "drop 2:3"]
    del every["drop 0"]
    assert [str(edit) for edit in asked.choice(every)] == ["pair 0:2", "drop 2:3", "drop 3:4"]
    with pytest.raises(
        ValueError, match="the parameter pair 0 is 'pair 1:3'; it should be one of '', 'pair 0:2'"
    ):
        asked.choice({"pair 0": "pair 1:3"})
