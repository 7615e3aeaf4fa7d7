"""Sublayers: their ranks, widths and experts as text, and parameters counted from the shapes of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgeon.language.program import Program
from surgeon.language.sublayer import ROLES, LayerShapes, MixtureShapes, Sublayer


def test_ranks_are_part_of_what_a_sublayer_is() -> None:
    program = Program.parse("[A0@o8,q64 A1] F1/2:0@up3")
    assert str(program) == "[A0@q64,o8 A1] F1/2:0@up3"
    ranked, whole, sliced = program.sublayers()
    assert (ranked.rank("q"), ranked.rank("k"), whole.rank("q"), sliced.rank("up")) == (
        64,
        None,
        None,
        3,
    )
    assert ranked == Sublayer("A", (0,), None, (("q", 64), ("o", 8)))
    assert len({ranked, whole, Sublayer("A", (0,))}) == 3
    assert (program.effective_depth(), program.sync_points(2)) == (1, 2)


SHAPES = LayerShapes(
    matrices={
        "q": (32, 24),
        "k": (16, 24),
        "v": (16, 24),
        "o": (24, 32),
        "up": (48, 24),
        "down": (24, 48),
    },
    biases={"q": 32, "o": 24, "up": 48, "down": 24},
    norms={"A": 24, "F": 48},
    units={"A": 4, "F": 48},
)


def counted(sublayer: Sublayer) -> int:
    """The parameters of modules with these shapes."""
    total = SHAPES.norms[sublayer.kind]
    for role in ROLES[sublayer.kind]:
        if role not in SHAPES.matrices:
            continue
        matrix, bias = torch.empty(SHAPES.matrices[role]), torch.empty(SHAPES.biases.get(role, 0))
        if sublayer.width is not None:  # a KV group of q has 8 rows, of k and v 4
            dim, units = int(role in ("o", "down")), 4 if sublayer.kind == "A" else 48
            matrix = (
                matrix.unflatten(dim, (units, -1)).narrow(dim, 0, sublayer.width).flatten(dim, dim + 1)
            )
            bias = bias if dim or not len(bias) else bias.view(units, -1)[: sublayer.width].flatten()
        rank = sublayer.rank(role)
        left, right = (
            (matrix, None)
            if rank is None
            else (matrix[:, :1].expand(-1, rank), matrix[:1].expand(rank, -1))
        )
        if sublayer.piece is not None:
            index, count = sublayer.piece
            if role not in ("o", "down"):  # the rows are divided: of the left factor only
                left, bias = left.chunk(count)[index], bias.chunk(count)[index]
            else:
                bias = bias if index == 0 else bias[:0]
                left, right = (
                    (left.chunk(count, 1)[index], None)
                    if right is None
                    else (left, right.chunk(count, 1)[index])
                )
        total += left.numel() + (0 if right is None else right.numel()) + bias.numel()
    return total


@pytest.mark.parametrize(
    "text",
    [
        "A0",
        "F3",
        "A0~A1",
        "A0/2:0",
        "A0/8:3",
        "F0/4:0",
        "F0/4:1",
        "A1@q5,o7",
        "F1@up24",
        "A0/2:1@q3,k4,v5,o6",
        "F0/3:0@down9",
        "A0#3",
        "F0#7",
        "F1#12/2:1@up5",
        "A0#2/2:0@q7,o16",
    ],
)
def test_parameters_follow_from_shapes(text: str) -> None:
    (sublayer,) = Program.parse(text).sublayers()
    assert sublayer.parameters(SHAPES) == counted(sublayer)
    assert sublayer.weight_bytes(SHAPES, 2) == 2 * counted(sublayer)
    twice = Program.parse(f"{text} {text} A0")
    assert twice.parameters(SHAPES) == sum(counted(one) for one in set(twice.sublayers()))
    assert twice.weight_bytes(SHAPES, 4) == 4 * twice.parameters(SHAPES)


def test_shapes_that_do_not_fit_are_refused() -> None:
    for text, said in (
        ("A0@k17", "A0@k17: rank 17 of k is above that of a matrix of 16 x 24"),
        ("A0/3:0", "32 features of q do not divide into 3 slices"),
        ("A0#5", "A0#5 has more KV groups than the 4 of its layer; use at most 4"),
        ("F0#49", "F0#49 has more neurons than the 48 of its layer; use at most 48"),
        ("A0#2@v9", "rank 9 of v is above that of a matrix of 8 x 24"),
    ):
        with pytest.raises(ValueError, match=said):
            Program.parse(text).parameters(SHAPES)


def test_widths_are_part_of_what_a_sublayer_is() -> None:
    program = Program.parse("[A0#3 A1] F1#12/2:0@up3")
    narrow, whole, sliced = program.sublayers()
    assert (narrow.width, whole.width, sliced.width, sliced.piece, sliced.rank("up")) == (
        3,
        None,
        12,
        (0, 2),
        3,
    )
    assert str(program) == "[A0#3 A1] F1#12/2:0@up3"
    assert narrow != Sublayer("A", (0,))
    assert (program.effective_depth(), program.sync_points(2)) == (1, 2)


MIXTURE = LayerShapes(
    {
        "q": (8, 8),
        "k": (4, 8),
        "v": (4, 8),
        "o": (8, 8),
        "gate": (12, 8),
        "up": (12, 8),
        "down": (8, 12),
    },
    units={"A": 2, "F": 12},
    mixture=MixtureShapes(experts=4, top_k=2, router=8),
    others={1: LayerShapes({"gate": (20, 8), "up": (20, 8), "down": (8, 20)}, units={"F": 20})},
)


@pytest.mark.parametrize(
    "text", ["A0 F0!e0,e3", ">[F0!e2/2:1@gate4 F3!e0,e1,e2]", "{F1!e0 | F1!e1@down2}"]
)
def test_experts_are_text(text: str) -> None:
    assert str(Program.parse(text)) == text


@pytest.mark.parametrize(
    ("sublayer", "reason"),
    [
        ({"experts": ()}, "keeps one or more of its experts"),
        ({"experts": (3, 0)}, "in ascending order"),
        ({"experts": (0, 0)}, "in ascending order"),
        ({"kind": "A", "experts": (0,)}, "attention has no experts"),
        ({"layers": (0, 1), "experts": (0,)}, "experts of different layers are not averaged"),
    ],
)
def test_experts_that_cannot_be(sublayer: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Sublayer(**{"kind": "F", "layers": (0,)} | sublayer)


@pytest.mark.parametrize(
    ("text", "parameters", "active"),
    [
        ("F0", 4 * 288 + 32, 2 * 288 + 32),
        ("F0!e0,e3", 2 * 288 + 16, 2 * 288 + 16),
        ("F0!e2", 288 + 8, 288 + 8),
        ("F0/2:1", 4 * 144 + 32, 2 * 144 + 32),
        ("F0@gate3", 4 * (192 + 60) + 32, 2 * (192 + 60) + 32),
        ("F1", 480, 480),
        ("A0 F0 F0", 192 + 4 * 288 + 32, 192 + 2 * 288 + 32),
    ],
)
def test_parameters_of_mixtures(text: str, parameters: int, active: int) -> None:
    program = Program.parse(text)
    assert program.parameters(MIXTURE) == parameters
    assert program.active_parameters(MIXTURE) == active


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("F0!e4", "the experts of layer 0 are 0 to 3, so that it has no 4"),
        ("F1!e0", "the feed-forward of layer 1 is no mixture"),
        ("F0~F2", "experts of different layers are not averaged"),
        ("F0#3", "the neurons of a mixture's experts stay"),
    ],
)
def test_mixtures_that_cannot_be(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Program.parse(text).parameters(MIXTURE)
