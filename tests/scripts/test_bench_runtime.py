"""scripts/bench_runtime.py: the programs it compares, and what it expects of them, from measurements made by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from surgeon.program import Program
from surgeon.runtime.bench import Candidate, Load, Measurement, Result, Split
from surgeon.runtime.collectives import Counts

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_runtime.py"
STEP, REST, DELAY = 0.002, 0.003, 0.001


@pytest.fixture(scope="module")
def script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("bench_runtime", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


class Plan:
    """As much of one as the script looks at."""

    def __init__(self, program: Program) -> None:
        self.program = str(program)


def result(name: str, program: Program, waiting: float, per_token: float) -> Result:
    """Two equal rounds in which every step takes the same time to compute."""
    steps = (STEP,) * len(program)
    split = Split(0, waiting, sum(steps) + REST, steps, Counts(), Counts())
    one = Measurement(0.1, 0.1, 7 * per_token, per_token, 1 / per_token, split, split)
    plan: Any = Plan(program)
    return Result(Candidate(name, plan, name != "upper bound"), Load(1, 4, 8), [one, one])


def test_the_programs_compared(script: ModuleType) -> None:
    found = {name: (program.effective_depth(), program.sync_points(2)) for name, program in script.programs().items()}
    assert found == {
        "dense": (24, 48),
        "LP to 18 layers": (18, 36),
        "attention \\|\\| MLP": (14, 28),
        "ladder": (24, 48),
        "ladder over LP": (18, 36),
        "tracks, D = 4": (24, 13),
        "upper bound": (24, 48),  # the dense program, on ranks that are not connected
    }


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("dense", 48 * (STEP + DELAY) + REST + 2 * DELAY),
        ("LP to 18 layers", 36 * (STEP + DELAY) + REST + 2 * DELAY),
        ("attention \\|\\| MLP", 28 * (STEP + DELAY) + REST + 2 * DELAY),
        # 40 late steps hide their predecessors' delays; 8 of the 48 are in front of steps that wait, or of the end.
        ("ladder", 48 * STEP + 8 * DELAY + REST + 2 * DELAY),
        ("upper bound", 48 * STEP + REST),
    ],
)
def test_what_is_expected_of_a_known_link(name: str, seconds: float, script: ModuleType) -> None:
    programs = script.programs()
    dense, own = (result(one, programs[one], 0.05, 0.2) for one in ("dense", name))
    way = script.parse_way("1ms")
    assert way.delay == DELAY
    assert script.expected(own, dense, script.delays(way, dense)) == pytest.approx(seconds)


def test_other_delays_are_what_dense_waited(script: ModuleType) -> None:
    dense = result("dense", script.programs()["dense"], 0.05, 0.2)
    assert script.delays(script.parse_way("shm"), dense) == [0.05 / 50] * 2


def test_a_row(script: ModuleType) -> None:
    programs = script.programs()
    dense, ladder = result("dense", programs["dense"], 0.05, 0.2), result("ladder", programs["ladder"], 0.01, 0.11)
    cells = script.row(script.parse_way("1ms"), ladder, dense).strip("| ").split(" | ")
    assert len(cells) == script.HEAD.splitlines()[0].count("|") - 1
    assert cells == ["1", "ladder", "24", "48", "9.1", "1.82", "100.0", "99.0", "10.0", "110.0", "109.0", "+1%"]
