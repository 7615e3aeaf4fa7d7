"""Shares of parameters as edits, and the operations that they come to."""

from __future__ import annotations

import warnings

import pytest

from surgeon.language.operations.applied import Edit
from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.searches.mixture import Mixture
from surgeon.searches.spaces import parse_spaces
from surgeon.testing.spaces import small_model


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_share_is_kept_of_every_matrix(family: str) -> None:
    model = small_model(
        family, 3, **({"ffn_dim": 48, "word_embed_proj_dim": 32} if family == "opt" else {})
    )
    space = Mixture(parse_spaces("rank:0.5"), model)
    shapes = model.layer_shapes
    dense = model.program.parameters(shapes)
    left = space.program(space.edits).parameters(shapes)
    assert 0.45 * dense < left <= 0.5 * dense
    halves = [space.program([edit]).parameters(shapes) for edit in space.edits if edit.first == 0]
    assert sum(dense - one for one in halves) * 3 == dense - left
    matrices = {
        role for sublayer in space.program(space.edits).sublayers() for role, _ in sublayer.ranks
    }
    assert matrices == set(shapes.matrices)


def test_one_operation_for_each_share_and_kind() -> None:
    space = Mixture(parse_spaces("rank"), small_model(layers=4))
    choice = map(
        Edit.parse,
        ["rank 0:1 mlp:0.6", "rank 1:2 mlp:0.6", "rank 3:4 mlp:0.6", "rank 1:2 attention:0.4"],
    )
    assert [operation.to_yaml() for operation in space.operations(choice)] == [
        'lowrank: {layers: "1:2", weights: ["q", "k", "v", "o"], keep: 0.4}',
        'lowrank: {layers: ["0:2", "3:4"], weights: ["gate", "up", "down"], keep: 0.6}',
    ]


def narrow(kv_heads: int, head_dim: int, neurons: int, heads: int = 4) -> Model:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return small_model(layers=2, intermediate_size=neurons, **sizes)


def test_matrices_that_factors_save_nothing_of_stay_whole() -> None:
    """Keys and values of 1 x 32: two factors have at least 33 numbers. Nothing warns of them."""
    space = Mixture(parse_spaces("rank:0.6"), narrow(kv_heads=1, head_dim=1, neurons=48))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [str(edit) for edit in space.edits if edit.first == 0] == [
            "rank 0:1 attention:0.6",
            "rank 0:1 mlp:0.6",
        ]
        (operation,) = space.operations([Edit.parse("rank 0:1 attention:0.6")])
        assert operation.to_yaml() == 'lowrank: {layers: "0:1", weights: ["q", "o"], keep: 0.6}'
        assert space.program([Edit.parse("rank 0:1 attention:0.6")]) == Program.parse(
            "A0@q2,o2 F0 A1 F1"
        )


def test_shares_that_come_to_the_same_ranks_are_one_edit() -> None:
    """Of neurons so few that every share leaves rank 1, the largest is named; of one, there is none."""
    few = Mixture(parse_spaces("rank:0.8/0.6/0.4"), narrow(kv_heads=2, head_dim=8, neurons=2))
    assert [str(edit) for edit in few.edits if edit.first == 0 and "mlp" in edit.option] == [
        "rank 0:1 mlp:0.8"
    ]
    none = Mixture(parse_spaces("rank"), narrow(kv_heads=1, head_dim=1, neurons=1, heads=1))
    with pytest.raises(
        ValueError, match="the space rank has no edits of llama: two factors .* save nothing; leave it"
    ):
        none.require_edits()
    one = Mixture(parse_spaces("rank:0.8/0.6/0.4"), narrow(kv_heads=2, head_dim=8, neurons=1))
    assert {edit.option for edit in one.edits} == {"attention:0.8", "attention:0.6", "attention:0.4"}
