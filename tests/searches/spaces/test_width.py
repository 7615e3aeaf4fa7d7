"""Shares of KV groups and neurons as edits, and the operations that they come to."""

from __future__ import annotations

import pytest

from surgeon.language.operations.applied import Edit
from surgeon.language.program import Program
from surgeon.language.recipe import parse_recipe
from surgeon.searches.mixture import Mixture
from surgeon.searches.spaces import parse_spaces
from surgeon.testing.spaces import small_model


def mixture(
    spaces: str, ranks: int = 2, heads: int = 8, kv_heads: int = 4, neurons: int = 48
) -> Mixture:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": neurons}
    return Mixture(parse_spaces(spaces, ranks), small_model(layers=3, **sizes))


def ways(found: Mixture) -> list[str]:
    return [edit.option for edit in found.edits if edit.first == 0]


def test_shares_of_groups_and_neurons() -> None:
    found = mixture("width")
    assert ways(found) == ["attention:0.25", "attention:0.75", "mlp:0.25", "mlp:0.5", "mlp:0.75"]
    choice = [
        Edit.parse(text)
        for text in ("width 0:1 mlp:0.5", "width 1:2 mlp:0.5", "width 1:2 attention:0.25")
    ]
    assert found.program(choice) == Program.parse("A0 F0#24 A1#1 F1#24 A2 F2")
    assert [operation.to_yaml() for operation in found.operations(choice)] == [
        'width: {layers: "1:2", heads: 1, by: "wanda"}',
        'width: {layers: "0:2", neurons: 24, by: "wanda"}',
    ]


def test_ranks_get_equally_many_where_there_are_enough() -> None:
    """Of 4 KV groups three quarters are 3, which two ranks cannot share equally; one has copies."""
    neurons = {ranks: mixture("width:0.77/0.2", ranks) for ranks in (1, 2, 5)}
    programs = {
        ranks: str(one.program([Edit.parse("width 0:1 mlp:0.77")])) for ranks, one in neurons.items()
    }
    assert programs == {
        ranks: f"A0 F0#{count} A1 F1 A2 F2" for ranks, count in ((1, 37), (2, 36), (5, 35))
    }
    assert str(mixture("width").program([Edit.parse("width 0:1 attention:0.75")])).startswith("A0#2 ")
    assert str(mixture("width", 1).program([Edit.parse("width 0:1 attention:0.75")])).startswith("A0#3 ")


def test_shares_that_come_to_the_same_are_one_edit_and_all_is_none() -> None:
    assert ways(mixture("width", kv_heads=2)) == ["attention:0.5", "mlp:0.25", "mlp:0.5", "mlp:0.75"]
    few = mixture("width:0.9", kv_heads=1, heads=4, neurons=2)
    with pytest.raises(
        ValueError, match="the space width has no edits of llama: such shares .* are all of them"
    ):
        few.require_edits()
    with pytest.raises(
        ValueError, match="width:2 should name the shares of KV groups and neurons that are kept"
    ):
        parse_spaces("width:2")


def test_what_is_narrow_has_no_ranks_and_no_slices() -> None:
    found = mixture("width,rank,tracks,pair,drop,ladder,repeat")
    wide = Edit.parse("width 0:1 mlp:0.5")
    for other, excluded in {
        "rank 0:1 mlp:0.6": True,
        "rank 0:1 attention:0.6": False,
        "tracks 0:1": True,
        "drop 0:1 mlp": True,
        "drop 0:1 attention": False,
        "pair 0:2": False,
        "width 0:1 attention:0.5": False,
        "width 0:1 mlp:0.25": True,
    }.items():
        assert found.exclude(wide, Edit.parse(other)) == excluded, other
    assert str(found.program([wide, Edit.parse("pair 0:2")])) == "[A0 A1] [F0#24 F1] A2 F2"


def test_recipes_name_the_text_of_the_search() -> None:
    found = mixture("width,pair").on_text({"data": "a.txt", "tokens": 64, "hash": "sha256:0"})
    recipe = found.recipe([Edit.parse("width 0:1 mlp:0.5"), Edit.parse("pair 0:2")], "small")
    (_, width) = parse_recipe(recipe.to_yaml()).operations
    assert width.parameters["calibration"] == {"data": "a.txt", "tokens": 64, "hash": "sha256:0"}
