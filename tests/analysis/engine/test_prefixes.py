"""States that outlive a plan: the same numbers, fewer sublayers, within a limit of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from surgeon.analysis.engine.machine import PlanMachine, run_plan
from surgeon.analysis.engine.prefixes import Place, PlanStates, Prefixes, StateCache, resume
from surgeon.analysis.engine.sharing import Reach, Take, share
from surgeon.language.execute import State
from surgeon.language.program import Program
from tests.tiny_models import VOCABULARY, tiny_model

IDS = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
WINDOWS = range(2)
TEXTS = [
    "A0 F0 A1 F1 A2 F2",
    "A0 F0 A1 F1 >A2 F2",
    "A0 F0 [A1 A2] [F1 F2]",
    "A0 {A1 F1 | A2 F2} F0",
    "A0 {A1 F1 | A2 F2 | F0} >F1",
    "A0 {A1 F1 | A2 F2} F0 A0",
    "A0 F0",
    "",
]
PROGRAMS = [Program.parse(text) for text in TEXTS]


def streams(
    programs: Sequence[Program], kept: StateCache | None
) -> tuple[dict[Program, torch.Tensor], int]:
    """The streams after programs, and how many sublayers ran."""
    model, ran, plan = tiny_model("llama", 3), [], share(programs)
    states = None if kept is None else PlanStates(kept, plan, kept.prefixes.registers(plan), WINDOWS)
    run = run_plan(
        plan if states is None else states.plan, PlanMachine(model, IDS), ran.append, cached=states
    )
    return dict(run), sum(ran)


def test_streams_from_kept_states_are_the_same_bit_for_bit() -> None:
    apart = {program: streams([program], None)[0][program] for program in PROGRAMS}
    kept = StateCache(1 << 30)
    total = 0
    for program in [*PROGRAMS, *reversed(PROGRAMS)]:
        found, ran = streams([program], kept)
        assert torch.equal(found[program], apart[program])
        total += ran
    # Each prefix ran once, but for F1, which had landed when a late step came, and two branches of a fork: those are
    # no prefixes.
    assert total == share(PROGRAMS).total_sublayers + 1 + 4
    together, ran = streams(PROGRAMS, kept)
    assert ran == 0
    assert all(torch.equal(together[program], apart[program]) for program in PROGRAMS)


def test_a_state_that_has_landed_does_not_serve_a_late_step() -> None:
    kept = StateCache(1 << 30)
    streams([PROGRAMS[0]], kept)
    late = Program.parse("A0 F0 A1 F1 >A2 F2")
    found, ran = streams([late], kept)
    assert ran == 3  # F1 again, whose output has to wait
    assert torch.equal(found[late], streams([late], None)[0][late])
    plain = Program.parse("A0 F0 A1 F1 F2")
    assert streams([plain], kept)[1] == 1  # what waits can land


@pytest.mark.parametrize("limit", [0, 1, 3000, 7000, 20000])
def test_a_limit_is_kept_and_changes_no_number(limit: int) -> None:
    kept = StateCache(limit)
    for program in PROGRAMS * 2:
        found, _ = streams([program], kept)
        assert kept.bytes <= limit
        assert kept.bytes == sum(one.bytes for one in kept._entries.values())
        assert torch.equal(found[program], streams([program], None)[0][program])


def state(numbers: int) -> State:
    return State(torch.zeros(numbers, dtype=torch.float32))


def test_the_least_useful_goes_first() -> None:
    kept = StateCache(24)
    nodes = Program.dense(2).nodes
    prefixes = [0]
    for node in nodes:
        prefixes.append(kept.prefixes.number(prefixes[-1], node))
    places = [Place(0, 1, prefix) for prefix in prefixes]
    for place in places[1:4]:
        kept.put(place, state(2))
    kept.take(places[1])  # used twice now: as good as one twice as deep
    kept.take(places[1])
    kept.put(places[4], state(2))
    assert [kept.find(place, landed=True) is not None for place in places[1:]] == [
        True,
        False,
        True,
        True,
    ]
    kept.put(places[2], state(6))  # large, and saves little: dropped itself
    assert kept.bytes == 24
    kept.shrink(8)
    assert kept.find(places[4], landed=True) is not None
    assert kept.bytes == 8


def test_what_a_plan_will_take_stays_until_then() -> None:
    """Also when the limit falls, and when another plan runs in between."""
    kept, program = StateCache(1 << 30), PROGRAMS[0]
    expected = streams([program], kept)[0][program]
    plan = share([program, PROGRAMS[2]])
    states = PlanStates(kept, plan, kept.prefixes.registers(plan), WINDOWS)
    run = run_plan(states.plan, PlanMachine(tiny_model("llama", 3), IDS), cached=states)
    kept.shrink(0)
    found = dict(run)
    assert kept.bytes == 0
    assert torch.equal(found[program], expected)
    assert torch.equal(found[PROGRAMS[2]], streams([PROGRAMS[2]], None)[0][PROGRAMS[2]])


def test_prefixes_are_numbered_by_what_leads_to_them() -> None:
    prefixes = Prefixes()
    plans = [share([program]) for program in PROGRAMS]
    ends = []
    for plan in plans:
        numbers = prefixes.registers(plan)
        ends.append(next(numbers[task.source] for task in plan.tasks if isinstance(task, Reach)))
    assert len(set(ends)) == len(PROGRAMS)
    assert [prefixes.sublayers[end] for end in ends] == [sum(1 for _ in p.sublayers()) for p in PROGRAMS]
    again = prefixes.registers(plans[0])
    assert set(again.values()) == set(range(len(PROGRAMS[0].nodes) + 1))


def test_a_resumed_plan_starts_from_the_longest_prefix() -> None:
    plan = share([PROGRAMS[0], PROGRAMS[2]])
    prefixes = Prefixes()
    numbers = prefixes.registers(plan)
    middle = prefixes.number(prefixes.number(0, PROGRAMS[0].nodes[0]), PROGRAMS[0].nodes[1])
    resumed = resume(plan, numbers, lambda number, _: number in (1, middle))
    takes = [task for task in resumed.tasks if isinstance(task, Take)]
    assert [task.prefix for task in takes] == [middle]
    assert resumed.total_sublayers == 8
    assert resume(plan, numbers, lambda *_: False).tasks == plan.tasks
