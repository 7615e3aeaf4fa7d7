"""What the cost model counts of a step against what the runtime launches for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.cost.kernels import Kernel
from surgeon.cost.work import Forward, RankWork
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.placement import rank_work
from tests.runtime.model.test_triton_decode import launches_of
from tests.tiny_models import tiny_model

pytest.importorskip("triton", reason="triton is not installed")

CASES = [
    ("llama", "A0 F0", "A1 F1"),
    ("llama", "A0 F0", "[A1 A2] [F1 F2]"),
    ("llama", "A0 F0 >A1 >F1", ">A2 >F2"),
    ("llama", "A0 F0 >A1 >F1", ">[A2 A3] >[F2 F3]"),
    ("llama", "A0 F0", "A1@q4,k4,v4,o4 F1@gate4,up4"),
    ("gemma2", "A0 F0", "A1 F1"),
    ("gpt2", "A0 F0", "A1 F1"),
]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize(("before", "new"), [(0, 1), (0, 13), (7, 1), (4, 1), (5, 6), (9, 20)])
def test_keys_and_pairs_are_counted(before: int, new: int, window: int, chunked: bool) -> None:
    places = range(before, before + new)
    firsts = [place - place % window if chunked else max(0, place - window + 1) for place in places]
    forward = Forward(3, new, before)
    assert forward.keys(window, chunked) == before + new - firsts[0]
    assert forward.pairs(window, chunked) == sum(
        place - first + 1 for place, first in zip(places, firsts, strict=True)
    )


@pytest.mark.parametrize(("family", "before", "steps"), CASES)
def test_launches_are_those_of_the_runtime(family: str, before: str, steps: str, tmp_path: Path) -> None:
    """Those of some steps, behind others, in a pass that adds one token to each of two texts."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    shapes = ModelShapes.of(family, model.config)

    def counted(text: str) -> int:
        plan = make_plan(tmp_path, 1, 64, text)
        work = RankWork(plan, shapes, lambda _: False)
        items = (
            item
            for step in rank_work(Program.parse(text), 0, 1)
            for item in work.items(step, Forward(2, 1, 9))
        )
        return sum(item.launches for item in items if isinstance(item, Kernel))

    whole = f"{before} {steps}"
    launched = launches_of(tmp_path, whole) - launches_of(tmp_path, before)
    assert counted(whole) - counted(before) == launched.total(), launched
