"""Memory by configuration alone against memory by a checkpoint, which is held against what ranks hold elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surgeon.checkpoint.config import open_stored
from surgeon.cost.deployment import most_texts, plan_on_paper, room
from surgeon.cost.hardware import RankShare
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import footprint
from tests.cost.examples import hardware, shapes


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "opt", "qwen3", "phi3"])
@pytest.mark.parametrize(
    ("program", "ranks"),
    [
        ("A0 F0 [A1 A2] [F1 F2]", 2),
        ("A0@q8,k4,v4,o8 F0~F1 A1/2:0", 1),
        ("[A0#2 A1#1] F0#12 F1#20@up5", 2),
        ("A0#1 F0#40/2:1", 1),
    ],
)
def test_a_configuration_says_what_a_checkpoint_does(
    family: str, program: str, ranks: int, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    of = ModelShapes.of("tiny", open_stored(tmp_path).config)
    plan = make_plan(tmp_path, ranks, 32, program)
    own = plan_on_paper(of, Program.parse(program), ranks, 32, "float32", "auto", "full")
    assert footprint(own, of) == footprint(plan)
    assert [
        of.matrix(one, "q" if one.kind == "A" else "up").shape
        for one in Program.parse(program).sublayers()
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_sinks_latents_and_experts(
    family: str, ranks: int, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    of, program = ModelShapes.of("tiny", open_stored(tmp_path).config), "A0 F0 [A1 A3] [F1 F3!e0,e2] A2"
    own = plan_on_paper(of, Program.parse(program), ranks, 32, "float32", "auto", "full")
    assert footprint(own, of) == footprint(make_plan(tmp_path, ranks, 32, program))
    assert room(of, own, hardware(), 1, 8).fits


def test_what_a_rank_needs_by_hand() -> None:
    small = shapes()
    plan = plan_on_paper(small, Program.dense(4), 2, 100, "bfloat16", "auto", "full")
    needed = room(small, plan, hardware(), texts=3, prompt=90)
    layer = (64 + 2 * 32 + 64) * 64 // 2 + 3 * 64 * 96 // 2
    assert needed.weights == 2 * (4 * layer + 2 * 50 * 64)
    blocks = -(-100 // 16)
    assert needed.cache == 3 * blocks * 16 * 2 * 4 * 2 * 32 // 2
    assert needed.needed == needed.weights + needed.cache + needed.activations
    assert needed.there == int(0.92 * 1e12)
    assert needed.fits


def test_how_many_texts_there_is_room_for() -> None:
    small = shapes()
    plan = plan_on_paper(small, Program.dense(4), 1, 100, "float32", "auto", "full")
    tight = hardware(memory="3e6")
    most = most_texts(small, plan, tight, 90, 1000)
    assert 0 < most < 999
    assert room(small, plan, tight, most, 90).fits
    assert not room(small, plan, tight, most + 1, 90).fits
    assert most_texts(small, plan, hardware(memory="1e3"), 90, 1000) == 0


def test_ranks_on_one_device_share_its_memory() -> None:
    small = shapes()
    plan = plan_on_paper(small, Program.dense(4), 4, 100, "float32", "auto", "full")
    alone = room(small, plan, hardware(), 1, 90)
    shared = replace(
        hardware(devices="2"), sharing={2: RankShare(hardware().device.shares, hardware().host)}
    )
    assert room(small, plan, shared, 1, 90).there == alone.there // 2
