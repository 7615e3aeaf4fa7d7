"""Where the parts of a program go, as texts; and over random programs, that all parts together are the program."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surgeon.language.program import Program, Step, steps_of
from surgeon.language.sublayer import Sublayer
from surgeon.runtime.plan.placement import (
    assigned_branches,
    groups_within,
    placed_parts,
    rank_work,
)


def parts(text: str, ranks: int) -> list[str]:
    """What each rank does, one text per rank."""
    program = Program.parse(text)
    work = [rank_work(program, rank, ranks) for rank in range(ranks)]
    return [
        " ".join(str(part.sublayer) for entry in entries for part in entry.parts) for entries in work
    ]


@pytest.mark.parametrize(
    ("program", "ranks", "expected"),
    [
        ("A0 F0", 1, ["A0 F0"]),
        ("A0 F0", 2, ["A0/2:0 F0/2:0", "A0/2:1 F0/2:1"]),
        ("[A1 A2] [F1 F2]", 2, ["A1 F1", "A2 F2"]),
        ("[A1 A2]", 4, ["A1/2:0", "A1/2:1", "A2/2:0", "A2/2:1"]),
        ("[A1 A2 A3]", 2, ["A1/2:0 A2/2:0 A3/2:0", "A1/2:1 A2/2:1 A3/2:1"]),
        ("[A1 A2 A3 A4]", 2, ["A1 A2", "A3 A4"]),
        ("[A1 F1]", 2, ["A1/2:0 F1/2:0", "A1/2:1 F1/2:1"]),
        (">A1 >[F1~F2 F3]", 2, ["A1/2:0 F1~F2", "A1/2:1 F3"]),
        ("{A1 F1 | A2 F2}", 2, ["A1 F1", "A2 F2"]),
        ("{A1 | A2 | A3}", 2, ["A1 A3", "A2"]),
        ("{A1 F1 | A2}", 4, ["A1/2:0 F1/2:0", "A1/2:1 F1/2:1", "A2/2:0", "A2/2:1"]),
        ("{A1/2:0 | A1/2:1}", 2, ["A1/2:0", "A1/2:1"]),
        ("{A1/2:0 | A1/2:1}", 4, ["A1/4:0", "A1/4:1", "A1/4:2", "A1/4:3"]),
        ("{A0 {A1 | A2} | F0}", 4, ["A0/2:0 A1", "A0/2:1 A2", "F0/2:0", "F0/2:1"]),
    ],
)
def test_shares(program: str, ranks: int, expected: list[str]) -> None:
    assert parts(program, ranks) == expected


def test_every_occurrence_of_an_attention_has_its_own_slot() -> None:
    work = rank_work(Program.parse("A0 F0 A0 [A1 A2] F0"), 0, 1)
    slots = [part.slot for entry in work for part in entry.parts]
    assert slots == [0, None, 1, 2, 3, None]


def test_groups() -> None:
    assert groups_within(Program.parse("A0 [A1 A2] {A3 | A4}"), 4) == [(0, 1), (2, 3)]
    assert groups_within(Program.parse("A0 {A1 | A2}"), 2) == []
    assert groups_within(Program.parse("{{A0 | A1} | A2}"), 8) == [
        (0, 1),
        (0, 1, 2, 3),
        (2, 3),
        (4, 5, 6, 7),
    ]


@pytest.mark.parametrize(
    ("program", "branches"),
    [
        ("{A0 | A1}", {0: ("A0", (0,)), 1: ("A1", (1, 2)), 2: ("A1", (1, 2))}),
        ("{A0 | A1 | A2 | A3}", {0: ("A0 A3", (0,)), 1: ("A1", (1,)), 2: ("A2", (2,))}),
    ],
)
def test_a_fork_that_does_not_spread_evenly(
    program: str, branches: dict[int, tuple[str, tuple[int, ...]]]
) -> None:
    (fork,) = Program.parse(program).nodes
    assert not isinstance(fork, Step)
    for rank, (own, group) in branches.items():
        found, members = assigned_branches(fork, rank, (0, 1, 2))
        assert " ".join(str(Program(branch)) for branch in found) == own
        assert members == group


# Machines are busy at times.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
sublayers = st.builds(
    lambda kind, layer, piece: Sublayer(kind, (layer,), piece),
    st.sampled_from("AF"),
    st.integers(0, 5),
    st.sampled_from([None, (0, 2), (2, 3)]),
)
steps = st.lists(sublayers, min_size=1, max_size=6).map(lambda found: Step(tuple(found)))


@unhurried
@given(steps, st.integers(1, 8))
def test_the_members_shares_make_up_the_step(step: Step, members: int) -> None:
    """In units of a 1/840th: every piece of every sublayer is computed by exactly one member."""
    fine = 840 * 6
    computed: dict[Sublayer, list[int]] = {}
    for member in range(members):
        for number, sublayer in placed_parts(step, member, members)[0]:
            index, count = sublayer.piece or (0, 1)
            whole = Sublayer(sublayer.kind, sublayer.layers)
            assert (step.sublayers[number].kind, step.sublayers[number].layers) == (
                whole.kind,
                whole.layers,
            )
            computed.setdefault(whole, []).extend(
                range(index * fine // count, (index + 1) * fine // count)
            )
    wanted: dict[Sublayer, list[int]] = {}
    for sublayer in step.sublayers:
        index, count = sublayer.piece or (0, 1)
        whole = Sublayer(sublayer.kind, sublayer.layers)
        wanted.setdefault(whole, []).extend(range(index * fine // count, (index + 1) * fine // count))
    assert {key: sorted(units) for key, units in computed.items()} == {
        key: sorted(u) for key, u in wanted.items()
    }


@unhurried
@given(st.lists(steps, min_size=1, max_size=5), st.integers(1, 6))
def test_ranks_visit_the_steps_in_the_programs_order(found: list[Step], ranks: int) -> None:
    program = Program(tuple(found))
    for rank in range(ranks):
        assert [entry.step for entry in rank_work(program, rank, ranks)] == list(steps_of(program.nodes))
