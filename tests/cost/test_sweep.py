"""Ranges of sweeps, and which numbers of ranks would do."""

from __future__ import annotations

import pytest

from surgeon.cost.candidates import Candidate, cell, parse_sweep, ranks_with_room, sweep
from surgeon.cost.deployment import Deployment, Workload
from surgeon.language.operations.variants import variant
from surgeon.language.program import Program
from tests.cost.examples import hardware, model

DENSE = Program.dense(4)
SMALL = Candidate("small", model(), lambda _: DENSE)
TRACKS = Candidate("tracks", model(), lambda ranks: variant("tracks:2", DENSE, range(4), ranks))
LOAD = Workload(1, 20, 8)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("ranks=1..8", {"ranks": [1, 2, 4, 8]}),
        ("batch=3..20, new=5", {"batch": [3, 6, 12, 20], "new": [5]}),
        ("prompt=64..64", {"prompt": [64]}),
    ],
)
def test_ranges_double_and_end_where_they_say(text: str, axes: dict[str, list[int]]) -> None:
    assert parse_sweep(text) == axes


def test_an_axis_stands_once() -> None:
    with pytest.raises(ValueError, match="ranks is there twice; keep one of them"):
        parse_sweep("ranks=1..2,ranks=4")


def test_every_combination_of_everything_in_order() -> None:
    cells = sweep([SMALL, TRACKS], hardware(), Deployment(), LOAD, {"batch": [1, 2], "ranks": [2, 4]})
    assert [(one.deployment.ranks, one.workload.batch, one.candidate.name) for one in cells] == [
        (ranks, batch, name) for ranks in (2, 4) for batch in (1, 2) for name in ("small", "tracks")
    ]
    assert all(one.prediction is not None and not one.refused for one in cells)
    made = [one.prediction.plan.program for one in cells if one.prediction]
    assert made[1] == str(variant("tracks:2", DENSE, range(4), 2))
    assert made[5] == str(variant("tracks:2", DENSE, range(4), 4))


def test_ranks_that_have_room_can_share_the_program() -> None:
    tight = hardware(memory="6e5")
    alone = cell(SMALL, tight, Deployment(1), LOAD)
    assert alone.refused == "does not fit into memory"
    found = list(ranks_with_room(alone, tight))
    assert found[:4] == [2, 3, 4, 5]
    assert not any(cell(SMALL, tight, Deployment(ranks), LOAD).refused for ranks in found[:8])
