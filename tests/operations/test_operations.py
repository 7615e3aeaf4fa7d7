"""What each operation makes of a dense program, and what it refuses."""

from __future__ import annotations

import pytest

from surgeon.operations import OPERATIONS, ladder, merge, pair, parallel, permutation, prune, shuffle
from surgeon.program import Program
from surgeon.recipe import parse_recipe

DENSE = Program.dense(6)
FUSED = Program.dense(4, steps_per_layer=1)


def test_prune_leaves_layers_out() -> None:
    assert str(prune(DENSE, range(1, 4))) == "A0 F0 A4 F4 A5 F5"
    assert str(prune(FUSED, range(1, 3))) == "[A0 F0] [A3 F3]"


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
    with pytest.raises(ValueError, match="recipe:4: prune: sublayers: .*'attention' or 'mlp', not 'ffn'"):
        parse_recipe(text.format("ffn"))


def test_shuffle_runs_a_fixed_permutation() -> None:
    order = permutation(range(1, 5), seed=3)
    assert sorted(order) == [1, 2, 3, 4]
    expected = " ".join(f"A{k} F{k}" for k in [0, *order, 5])
    assert str(shuffle(DENSE, range(1, 5), seed=3)) == expected
    assert len({tuple(permutation(range(0, 6), seed)) for seed in range(20)}) > 10
    assert shuffle(DENSE, range(2, 3), seed=1) == DENSE


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
    assert str(ladder(pair(DENSE, range(2, 4)), range(2, 5))) == "A0 F0 A1 F1 >[A2 A3] >[F2 F3] >A4 >F4 A5 F5"
    with pytest.raises(ValueError, match="contain a fork"):
        ladder(parallel(DENSE, range(2, 4)), range(1, 5))
    with pytest.raises(ValueError, match="cut through"):
        ladder(pair(DENSE, range(2, 4)), range(3, 5))


def test_the_papers_llama_2_7b_configuration() -> None:
    program = pair(Program.dense(32), range(4, 30))
    assert program.effective_depth() == 19


@pytest.mark.parametrize("name", ["prune", "shuffle", "merge", "parallel", "pair", "ladder"])
def test_ranges_are_checked(name: str) -> None:
    apply = OPERATIONS[name].function
    with pytest.raises(ValueError, match=r"layers 4:9 are out of range: the model's layers are 0:6"):
        apply(DENSE, range(4, 9))
    with pytest.raises(ValueError, match="are empty"):
        apply(DENSE, range(4, 4))
    with pytest.raises(ValueError, match="overlap"):
        apply(prune(DENSE, range(1, 3)), range(2, 5))
    assert OPERATIONS[name].summary.endswith((".", ")."))


@pytest.mark.parametrize("name", ["prune", "shuffle", "merge", "parallel", "pair"])
def test_layers_another_operation_changed_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="overlap with what an earlier operation changed"):
        OPERATIONS[name].function(pair(DENSE, range(0, 4)), range(3, 6))
