"""Which matrices and ranks are meant, and that any of them can be read and replaced."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
import torch

from surgeon.analysis.factors.matrices import Matrices, choose_weights, find_matrices
from surgeon.analysis.spectrum import request
from surgeon.findings.spectrum import TargetRank, parse_ranks
from surgeon.models.families import FAMILIES, family_of
from tests.tiny_models import DENSE_FAMILIES, tiny_model


def test_ranks() -> None:
    ranks = parse_ranks(" 1/8, 0.5 ,32,1/2,1.0,1,4/8")
    shares, counts = (
        [Fraction(1, 8), Fraction(1, 2), Fraction(1)],
        [TargetRank(Fraction(n), False) for n in (32, 1)],
    )
    eighth, half, whole = (TargetRank(share, True) for share in shares)
    assert ranks == (eighth, half, counts[0], whole, counts[1])
    assert [str(rank) for rank in ranks] == ["1/8", "1/2", "32", "1/1", "1"]
    assert parse_ranks(",".join(map(str, ranks))) == ranks
    assert [rank.resolve(64) for rank in ranks] == [8, 32, 32, 64, 1]
    assert [rank.resolve(5) for rank in ranks] == [1, 3, 32, 5, 1], (
        "shares are rounded, and give at least 1"
    )
    assert parse_ranks("0.1")[0].resolve(15) == 2, (
        "1.5 is rounded up, whatever binary fractions make of 0.1"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rank is given"),
        (" , ", "no rank is given"),
        ("0", "rank 0 must be more than 0"),
        ("1/2,-3", "rank -3 must be more than 0"),
        ("0.0", "rank 0.0 must be more than 0"),
        ("3/2", "rank 3/2 is above the full rank"),
        (
            "32.0",
            "rank 32.0 is above the full rank; a share is at most 1.0, a whole number has no point",
        ),
        ("half", "'half' is no rank; write a share such as 1/8"),
        ("1/0", "'1/0' is no rank"),
        ("1/2/3", "'1/2/3' is no rank"),
        ("nan", "'nan' is no rank"),
    ],
)
def test_what_is_no_rank(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_ranks(text)


def test_weights_and_layers() -> None:
    llama = FAMILIES["llama"]
    assert choose_weights(llama, ["up", "q", "up"]) == ("q", "up")
    assert choose_weights(FAMILIES["gpt_neox"], None) == ("q", "k", "v", "o", "up", "down")
    config = tiny_model("llama", 4).config
    assert request(config).layers == range(4)
    for wrong in (range(2, 2), range(3, 5), range(-1, 2)):
        with pytest.raises(ValueError, match="out of range: the model's layers are 0:4"):
            request(config, layers=wrong)
    found = find_matrices(llama, range(1, 3), ("o", "gate"))
    assert [str(matrix) for matrix in found] == [
        "o of layer 1", "gate of layer 1", "o of layer 2", "gate of layer 2"
    ]  # fmt: skip


def test_layers_that_differ_have_their_own() -> None:
    """Linear attentions and experts have none; of four layers one is dense."""
    family = family_of(tiny_model("qwen3_next", 4).config)
    found = find_matrices(family, range(1, 4), choose_weights(family, None))
    assert [str(one) for one in found if one.layer > 1] == [f"{role} of layer 2" for role in "qgkvo"] + [
        f"{role} of layer 2" for role in ("gate", "up", "down")
    ]
    assert [one.role for one in found if one.layer == 1] == list("qgkvo")


@pytest.mark.parametrize("name", DENSE_FAMILIES)
def test_every_matrix_of_every_family_can_be_replaced(name: str) -> None:
    """What is put in place is read back, and the matrices that are packed beside it stay."""
    model = tiny_model(name, 2)
    family, matrices = family_of(model.config), Matrices(model)
    all_of_them = find_matrices(family, range(2), choose_weights(family, None))
    matrices.check(all_of_them)
    before = {matrix: matrices.read(matrix).clone() for matrix in all_of_them}
    for replaced in all_of_them:
        values = torch.randn(before[replaced].shape, dtype=torch.float64)
        with matrices.replace(replaced, values):
            for matrix in all_of_them:
                wanted = values.float() if matrix == replaced else before[matrix]
                assert torch.equal(matrices.read(matrix), wanted)
    assert all(torch.equal(matrices.read(matrix), before[matrix]) for matrix in all_of_them)
