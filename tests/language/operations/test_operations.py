"""What each operation makes of a dense program, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from surgeon.language.operations import (
    OPERATIONS,
    Operation,
    desync,
    fuse_attention_mlp,
    ladder,
    merge,
    pair,
    parallel,
    prune,
    reorder,
    repeat,
    shuffle,
    tracks,
)
from surgeon.language.operations.shuffle import permutation
from surgeon.language.program import Program
from surgeon.language.recipe import parse_recipe
from surgeon.language.sublayer import MixtureShapes
from surgeon.testing import OperationContract
from surgeon.testing.operations import SHAPES

MIXTURES = replace(SHAPES, mixture=MixtureShapes(4, 2, 32))

DENSE = Program.dense(6)
FUSED = Program.dense(4, steps_per_layer=1)
PARAMETERS: dict[str, dict[str, Any]] = {
    "tracks": {"count": 2, "depth": 2},
    "desync": {"count": 2},
    "reorder": {"order": [5, 2, 4, 3]},
}


def test_prune_leaves_layers_out() -> None:
    assert str(prune(DENSE, range(1, 4))) == "A0 F0 A4 F4 A5 F5"
    assert str(prune(FUSED, range(1, 3))) == "[A0 F0] [A3 F3]"


def test_layers_may_be_written_as_recipes_do() -> None:
    operations: Any = OPERATIONS
    assert operations["prune"].function(DENSE, "1:4") == prune(DENSE, range(1, 4))
    assert operations["pair"].function(DENSE, layers="1:5", size=2) == pair(DENSE, range(1, 5))
    with pytest.raises(ValueError, match="layers '1-4' are no range; write \"4:30\" for layers 4 to 29"):
        operations["prune"].function(DENSE, "1-4")


def test_prune_leaves_out_one_half_of_layers() -> None:
    assert str(prune(DENSE, range(1, 4), sublayers="attention")) == "A0 F0 F1 F2 F3 A4 F4 A5 F5"
    assert str(prune(DENSE, range(1, 4), sublayers="mlp")) == "A0 F0 A1 A2 A3 A4 F4 A5 F5"
    assert str(prune(FUSED, range(1, 3), sublayers="attention")) == "[A0 F0] F1 F2 [A3 F3]"
    assert str(prune(FUSED, range(1, 3), sublayers="mlp")) == "[A0 F0] A1 A2 [A3 F3]"
    assert prune(DENSE, range(1, 4), sublayers="both") == prune(DENSE, range(1, 4))
    assert prune(DENSE, range(0, 6), sublayers="mlp").effective_depth() == 3
    with pytest.raises(ValueError, match="overlap with what an earlier operation changed"):
        prune(prune(DENSE, range(1, 3), sublayers="mlp"), range(2, 4))


def test_recipes_know_which_half_to_prune() -> None:
    text = 'surgeon: 1\nmodel: demo\noperations:\n  - prune: {{layers: "1:3", sublayers: {}}}\n'
    assert str(parse_recipe(text.format("attention")).program(4)) == "A0 F0 F1 F2 A3 F3"
    with pytest.raises(
        ValueError, match="recipe:4: prune: sublayers: .*'attention' or 'mlp', not 'ffn'"
    ):
        parse_recipe(text.format("ffn"))


def test_shuffle_runs_a_fixed_permutation() -> None:
    order = permutation(range(1, 5), seed=3)
    assert sorted(order) == [1, 2, 3, 4]
    expected = " ".join(f"A{k} F{k}" for k in [0, *order, 5])
    assert str(shuffle(DENSE, range(1, 5), seed=3)) == expected
    assert len({tuple(permutation(range(0, 6), seed)) for seed in range(20)}) > 10
    assert shuffle(DENSE, range(2, 3), seed=1) == DENSE
    assert {tuple(permutation(range(4, 6), seed)) for seed in range(20)} == {(5, 4)}


def test_reorder_runs_the_order_given() -> None:
    assert str(reorder(DENSE, range(1, 4), order=[3, 1, 2])) == "A0 F0 A3 F3 A1 F1 A2 F2 A4 F4 A5 F5"
    assert str(reorder(FUSED, range(0, 2), order=[1, 0])) == "[A1 F1] [A0 F0] [A2 F2] [A3 F3]"
    assert reorder(DENSE, range(1, 4), order=[1, 2, 3]) == DENSE
    drawn = permutation(range(0, 6), seed=2)
    assert reorder(DENSE, range(0, 6), order=drawn) == shuffle(DENSE, range(0, 6), seed=2)


@pytest.mark.parametrize("order", [[1, 2], [1, 2, 2], [1, 2, 4], [], [1, 2, 3, 3]])
def test_an_order_has_every_layer_once(order: list[int]) -> None:
    with pytest.raises(
        ValueError, match=r"must have every layer of 1:4 once, as in \[3, 2, 1\]"
    ) as raised:
        reorder(DENSE, range(1, 4), order=order)
    assert str(order) in str(raised.value)


def test_merge_averages() -> None:
    assert str(merge(DENSE, range(1, 4))) == "A0 F0 A1~A2~A3 F1~F2~F3 A4 F4 A5 F5"
    assert str(merge(FUSED, range(1, 3))) == "[A0 F0] [A1~A2 F1~F2] [A3 F3]"


def test_parallel_is_a_fork_of_layers() -> None:
    assert str(parallel(DENSE, range(2, 5))) == "A0 F0 A1 F1 {A2 F2 | A3 F3 | A4 F4} A5 F5"


def test_pair_forms_and_sizes() -> None:
    assert str(pair(DENSE, range(0, 4))) == "[A0 A1] [F0 F1] [A2 A3] [F2 F3] A4 F4 A5 F5"
    assert str(pair(DENSE, range(0, 5), form="par")) == "{A0 F0 | A1 F1} {A2 F2 | A3 F3} A4 F4 A5 F5"
    assert str(pair(DENSE, range(0, 6), size=3)) == "[A0 A1 A2] [F0 F1 F2] [A3 A4 A5] [F3 F4 F5]"
    assert str(pair(FUSED, range(0, 2))) == "[A0 F0 A1 F1] [A2 F2] [A3 F3]"
    with pytest.raises(ValueError, match="size must be at least 2 layers a group, not 1"):
        pair(DENSE, range(0, 4), size=1)


def test_ladder_makes_steps_late_also_over_pairs() -> None:
    assert str(ladder(DENSE, range(1, 3))) == "A0 F0 >A1 >F1 >A2 >F2 A3 F3 A4 F4 A5 F5"
    assert (
        str(ladder(pair(DENSE, range(2, 4)), range(2, 5)))
        == "A0 F0 A1 F1 >[A2 A3] >[F2 F3] >A4 >F4 A5 F5"
    )
    with pytest.raises(ValueError, match="contain a fork"):
        ladder(parallel(DENSE, range(2, 4)), range(1, 5))
    with pytest.raises(ValueError, match="cut through"):
        ladder(pair(DENSE, range(2, 4)), range(3, 5))


def test_ladder_of_one_half_of_layers() -> None:
    assert (
        str(ladder(DENSE, range(1, 3), sublayers="attention")) == "A0 F0 >A1 F1 >A2 F2 A3 F3 A4 F4 A5 F5"
    )
    assert str(ladder(DENSE, range(1, 3), sublayers="mlp")) == "A0 F0 A1 >F1 A2 >F2 A3 F3 A4 F4 A5 F5"
    assert ladder(DENSE, range(1, 3), sublayers="both") == ladder(DENSE, range(1, 3))
    halves = ladder(ladder(DENSE, range(1, 3), sublayers="mlp"), range(1, 3), sublayers="attention")
    assert halves == ladder(DENSE, range(1, 3))
    paired = pair(DENSE, range(2, 4))
    assert (
        str(ladder(paired, range(1, 4), sublayers="mlp")) == "A0 F0 A1 >F1 [A2 A3] >[F2 F3] A4 F4 A5 F5"
    )
    with pytest.raises(ValueError, match=r"layers 3:4 cut through \[F2 F3\]; take in all"):
        ladder(paired, range(3, 4), sublayers="mlp")
    with pytest.raises(
        ValueError, match=r'sublayers mlp cut through \[A1 F1\], which reads once; use "both"'
    ):
        ladder(FUSED, range(1, 3), sublayers="mlp")
    # A step that is not of this half may be shared with layers outside.
    lone = Program.parse("A0 A1 [F0 F1] A2 F2")
    assert str(ladder(lone, range(1, 2), sublayers="attention")) == "A0 >A1 [F0 F1] A2 F2"


def test_tracks_meet_every_few_layers() -> None:
    assert str(tracks(DENSE, range(1, 3), count=2, depth=2)) == (
        "A0 F0 {A1/2:0 F1/2:0 A2/2:0 F2/2:0 | A1/2:1 F1/2:1 A2/2:1 F2/2:1} A3 F3 A4 F4 A5 F5"
    )
    # Of three layers at depth 2 the last one is a fork of its own.
    assert str(tracks(DENSE, range(0, 3), count=2, depth=2)) == (
        "{A0/2:0 F0/2:0 A1/2:0 F1/2:0 | A0/2:1 F0/2:1 A1/2:1 F1/2:1} {A2/2:0 F2/2:0 | A2/2:1 F2/2:1} A3 F3 A4 F4 A5 F5"
    )
    assert str(tracks(FUSED, range(2, 4), count=2, depth=2)) == (
        "[A0 F0] [A1 F1] {[A2/2:0 F2/2:0] [A3/2:0 F3/2:0] | [A2/2:1 F2/2:1] [A3/2:1 F3/2:1]}"
    )
    whole = tracks(Program.dense(8), range(0, 8), count=4, depth=4)
    # L / D instead of 2L, in the same depth.
    assert (whole.sync_points(4), whole.effective_depth()) == (2, 8)


def test_what_tracks_refuse() -> None:
    for count, depth, message in [
        (1, 2, "count must be at least 2 slices and at most 1024, not 1"),
        (2, 0, "at least 1 layer, not 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            tracks(DENSE, range(0, 4), count=count, depth=depth)
    with pytest.raises(ValueError, match="tracks of depth 1 .* use a depth of 2"):
        tracks(FUSED, range(0, 4), count=2, depth=1)


def test_desync_joins_after_the_feed_forward_only() -> None:
    assert str(desync(Program.dense(3), range(1, 3), count=2)) == (
        "A0 F0 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1} {A2/2:0 F2/2:0 | A2/2:1 F2/2:1}"
    )
    assert desync(DENSE, range(0, 6), count=3).sync_points(3) == 6
    assert desync(DENSE, range(1, 5), count=2) == tracks(DENSE, range(1, 5), count=2, depth=1)
    with pytest.raises(ValueError, match="nothing to drop; use tracks"):
        desync(FUSED, range(0, 2), count=2)
    with pytest.raises(ValueError, match="at least 2 slices and at most 1024, not 1"):
        desync(DENSE, range(0, 2), count=1)


def test_fused_attention_and_feed_forward_are_one_step() -> None:
    assert str(fuse_attention_mlp(DENSE, range(1, 3))) == "A0 F0 [A1 F1] [A2 F2] A3 F3 A4 F4 A5 F5"
    assert fuse_attention_mlp(Program.dense(4), range(0, 4)) == FUSED
    assert FUSED.sync_points(2) == 4
    with pytest.raises(ValueError, match="read the same stream already"):
        fuse_attention_mlp(FUSED, range(0, 2))


def test_repeated_layers_run_again_with_the_same_weights() -> None:
    assert str(repeat(DENSE, range(2, 4))) == "A0 F0 A1 F1 A2 F2 A3 F3 A2 F2 A3 F3 A4 F4 A5 F5"
    assert str(repeat(FUSED, range(1, 2), times=3)) == "[A0 F0] [A1 F1] [A1 F1] [A1 F1] [A2 F2] [A3 F3]"
    assert repeat(DENSE, range(2, 4), times=3).effective_depth() == 10
    assert repeat(repeat(DENSE, range(2, 4)), range(2, 4)) == repeat(DENSE, range(2, 4), times=4)
    for times in (1, 0, 2000):
        with pytest.raises(ValueError, match=f"times must be at least 2 and at most 1024, not {times}"):
            repeat(DENSE, range(0, 2), times=times)


def test_what_is_there_of_layers_is_repeated() -> None:
    assert str(repeat(pair(DENSE, range(2, 4)), range(2, 4))) == (
        "A0 F0 A1 F1 [A2 A3] [F2 F3] [A2 A3] [F2 F3] A4 F4 A5 F5"
    )
    assert str(repeat(ladder(DENSE, range(1, 2)), range(1, 3))) == (
        "A0 F0 >A1 >F1 A2 F2 >A1 >F1 A2 F2 A3 F3 A4 F4 A5 F5"
    )
    assert str(repeat(Program.parse("A0 F0@up4 F1"), range(0, 2))) == "A0 F0@up4 F1 A0 F0@up4 F1"
    # A fork of these layers alone runs again; with others in it, every branch repeats its own part.
    assert str(repeat(parallel(DENSE, range(2, 4)), range(2, 4))) == (
        "A0 F0 A1 F1 {A2 F2 | A3 F3} {A2 F2 | A3 F3} A4 F4 A5 F5"
    )
    assert str(repeat(tracks(Program.dense(3), range(0, 3), 2, 3), range(1, 2))) == (
        "{A0/2:0 F0/2:0 A1/2:0 F1/2:0 A1/2:0 F1/2:0 A2/2:0 F2/2:0 | "
        "A0/2:1 F0/2:1 A1/2:1 F1/2:1 A1/2:1 F1/2:1 A2/2:1 F2/2:1}"
    )
    once_more = repeat(repeat(Program.dense(4), range(0, 3)), range(1, 3))
    assert str(once_more).split()[::2] == [f"A{layer}" for layer in (0, 1, 2, 1, 2, 0, 1, 2, 1, 2, 3)]
    with pytest.raises(
        ValueError, match=r"layers 1:3 cut through \[A2 A3\]; take in all of its layers, or none"
    ):
        repeat(pair(DENSE, range(2, 4)), range(1, 3))
    with pytest.raises(ValueError, match="layers 0:2 do not run in a row: A0 runs apart from A1"):
        repeat(reorder(DENSE, range(1, 4), order=[3, 2, 1]), range(0, 2))


def test_operations_change_repeated_layers_wherever_they_run() -> None:
    twice = repeat(Program.dense(5), range(1, 4))
    assert str(pair(twice, range(1, 3))) == "A0 F0 [A1 A2] [F1 F2] A3 F3 [A1 A2] [F1 F2] A3 F3 A4 F4"
    assert str(prune(twice, range(2, 3))) == "A0 F0 A1 F1 A3 F3 A1 F1 A3 F3 A4 F4"
    assert str(pair(twice, range(3, 5))) == "A0 F0 A1 F1 A2 F2 A3 F3 A1 F1 A2 F2 [A3 A4] [F3 F4]"
    assert pair(twice, range(1, 3)) == repeat(pair(Program.dense(5), range(1, 3)), range(1, 4))
    assert ladder(twice, range(1, 4)) == repeat(ladder(Program.dense(5), range(1, 4)), range(1, 4))


def test_recipes_know_slices() -> None:
    text = 'surgeon: 1\nmodel: demo\noperations:\n  - tracks: {layers: "1:3", count: 2, depth: 2}\n'
    assert parse_recipe(text).program(3) == tracks(Program.dense(3), range(1, 3), count=2, depth=2)
    text = 'surgeon: 1\nmodel: demo\noperations:\n  - desync: {layers: ["0:1", "2:3"], count: 4}\n'
    assert parse_recipe(text).program(3).sync_points(4) == 4
    with pytest.raises(ValueError, match="recipe:4: tracks: depth: Field required"):
        parse_recipe(text.replace("desync", "tracks"))


def test_the_papers_llama_2_7b_configuration() -> None:
    program = pair(Program.dense(32), range(4, 30))
    assert program.effective_depth() == 19


class TestOperations(OperationContract):
    @pytest.fixture(params=sorted(set(OPERATIONS) - {"experts", "ladder", "lowrank", "repeat", "width"}))
    def operation(self, request: pytest.FixtureRequest) -> Operation:
        return OPERATIONS[request.param]

    @pytest.fixture
    def given(self, operation: Operation) -> dict[str, Any]:
        return PARAMETERS.get(operation.name, {})


class TestLadder(OperationContract):
    edits_steps = True

    @pytest.fixture
    def operation(self) -> Operation:
        return OPERATIONS["ladder"]


class TestRepeat(OperationContract):
    edits_steps = True

    @pytest.fixture
    def operation(self) -> Operation:
        return OPERATIONS["repeat"]


class TestLowrank(OperationContract):
    edits_steps = True
    parameters: ClassVar[dict[str, Any]] = {"keep": 0.5}

    @pytest.fixture
    def operation(self) -> Operation:
        return OPERATIONS["lowrank"]


class TestExperts(OperationContract):
    edits_steps = True
    parameters: ClassVar[dict[str, Any]] = {"keep": 3, "seed": 5}
    shapes = MIXTURES

    @pytest.fixture
    def operation(self) -> Operation:
        return OPERATIONS["experts"]


class TestWidth(OperationContract):
    edits_steps, draws_weights = True, True
    parameters: ClassVar[dict[str, Any]] = {"heads": 0.5, "neurons": 0.25, "by": "random"}

    @pytest.fixture
    def operation(self) -> Operation:
        return OPERATIONS["width"]
