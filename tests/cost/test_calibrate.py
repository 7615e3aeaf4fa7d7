"""Calibration: known hardware is found again in what passes would take on it, and real ranks give a whole file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surgeon.cost.calibrate import (
    BATCHES,
    EXCHANGES,
    NEW,
    PROMPT,
    ROWS,
    SHORT,
    SIZES,
    TURNS,
    WHOLE,
    MachineCalibration,
    Round,
    check_ranks,
    fit,
    hardware_text,
    matrices_of,
    merge_rounds,
    short_plan,
    time_launches,
    time_products,
)
from surgeon.cost.deployment import Deployment, Workload, plan_on_paper
from surgeon.cost.hardware import Hardware, parse_hardware
from surgeon.cost.kernels import RankSpeed
from surgeon.cost.predict import PredictedRanks, predict
from surgeon.cost.work import Forward, RankWork
from surgeon.language.operations import fuse_attention_mlp, ladder, pair
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from tests.cost.examples import shapes
from tests.pretended import pretended_gpus

TRUE = """\
name: known
devices: 1
device:
  memory: 1e10
  bandwidth: 2e10
  flops: {float32: 1e11}
  shares: {flops: {1: 0.15, 8: 0.2, 32: 0.5, 512: 0.9}, bandwidth: 1}
host:
  launch: 4e-6
  launches: {attention: {1: 15e-6, 16: 50e-6}}
  graph: 4e-6
  collective: 0
  forward: {1: 2e-4, 8: 4e-4, 32: 9e-4}
  asynchronous: false
links:
  shm: {bandwidth: 5e9, algorithms: [{kind: shared-memory, base: 8e-6, hop: 0, share: 1}]}
sharing:
  2:
    shares: {flops: {1: 0.12, 8: 0.13, 32: 0.3, 512: 0.45}, bandwidth: 0.7}
    host:
      launch: 5e-6
      launches: {attention: {1: 16e-6, 16: 55e-6}}
      graph: 5e-6
      collective: 7e-6
      forward: {1: 3e-4, 8: 5e-4, 32: 1e-3}
      asynchronous: false
"""
WIDE = {"hidden_size": 256, "intermediate_size": 704, "head_dim": 32, "vocab_size": 512}
TINY_PRODUCT = 1e-6


def true_round(hardware: Hardware, model: ModelShapes, plan: Plan) -> Round:
    """What would be measured on hardware that is known, with nothing in the way."""
    speed = RankSpeed.of(hardware, plan.dtype, plan.ranks)
    work = RankWork(plan, model, lambda _: False)
    found = Round(launches={"operation": 1e-6, "product": TINY_PRODUCT})
    for rows in ROWS:
        products = [work.product("", rows, width, plan.hidden) for width in matrices_of(plan, model)]
        found.products[rows] = sum(TINY_PRODUCT + speed.seconds(one) for one in products)
    for layers, own in ((WHOLE, plan), (SHORT, short_plan(plan))):
        ranks = PredictedRanks(model, own, hardware, Deployment(plan.ranks))
        for texts in BATCHES:
            found.prompts[layers, texts] = ranks.forward(
                Forward(texts, PROMPT, asked=1), graphs=False
            ).seconds
            found.passes[layers, texts] = ranks.forward(
                Forward(texts, 1, PROMPT + NEW // 2), graphs=False
            ).seconds
    if plan.ranks > 1:
        for size in SIZES:
            once = size / 5e9
            found.starting["shm", size] = speed.host.collective + once
            found.waiting["shm", size] = 8e-6 + plan.ranks * once
    return found


def on_paper(model: ModelShapes, ranks: int = 1) -> Plan:
    return plan_on_paper(model, Program.dense(4), ranks, 480, "float32", "auto", "full")


def test_experts_are_products_too() -> None:
    hardware = parse_hardware(TRUE)
    model = shapes(
        "qwen3_moe", **WIDE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    )
    plan = on_paper(model)
    assert sum(matrices_of(plan, model)) * plan.hidden > 4 * 2 * 3 * 512 * plan.hidden
    measured = true_round(hardware, model, plan)
    found = parse_hardware(
        hardware_text("found", MachineCalibration(model, {1: plan}, ways=()), {1: [measured] * 3})
    )
    for load in (Workload(1, 64, 16), Workload(8, 64, 16)):
        expected, again = (
            predict(model, Program.dense(4), one, load, Deployment()) for one in (hardware, found)
        )
        assert again.per_token == pytest.approx(expected.per_token, rel=0.15)
        assert again.first_token == pytest.approx(expected.first_token, rel=0.15)


def test_known_hardware_is_found_again_as_far_as_predictions_go() -> None:
    hardware, model = parse_hardware(TRUE), shapes(**WIDE)
    dense = Program.dense(4)
    plans = {ranks: on_paper(model, ranks) for ranks in (1, 2)}
    rounds = {ranks: [true_round(hardware, model, plan)] * 3 for ranks, plan in plans.items()}
    found = parse_hardware(
        hardware_text("found", MachineCalibration(model, plans, ways=("shm",)), rounds)
    )
    programs = [
        dense,
        pair(dense, range(4)),
        ladder(dense, range(4)),
        fuse_attention_mlp(dense, range(4)),
    ]
    for ranks in (1, 2):
        for program in programs:
            for batch, prompt in ((1, 16), (8, 16), (32, 16), (4, 100), (1, 400)):
                workload, deployment = Workload(batch, prompt, 8), Deployment(ranks, "float32")
                right, own = (
                    predict(model, program, each, workload, deployment) for each in (hardware, found)
                )
                assert own.first_token == pytest.approx(right.first_token, rel=0.05)
                assert own.per_token == pytest.approx(right.per_token, rel=0.05)


def test_passes_are_found_again_whatever_their_parts_take() -> None:
    """Of launches that differ by kernel, and of slower copies and caches, too."""
    shares = "flops: {1: 0.15, 8: 0.2, 32: 0.5, 512: 0.9}, bandwidth: 1"
    other = TRUE.replace(shares, f"{shares}, copies: 0.2, cache: 0.5").replace(
        "launches: {attention: {1: 15e-6, 16: 50e-6}}",
        "launches: {norm: 11e-6, place: 30e-6, activation: 6e-6, attention: {1: 15e-6, 16: 50e-6}}",
    )
    assert other.count("norm: 11e-6") == other.count("copies: 0.2") == 1
    hardware = parse_hardware(other)
    model = shapes(**WIDE)
    plan = on_paper(model)
    measured = true_round(hardware, model, plan)
    found = parse_hardware(
        hardware_text("found", MachineCalibration(model, {1: plan}, ways=()), {1: [measured]})
    )
    ranks = PredictedRanks(model, plan, found, Deployment())
    for texts in BATCHES:
        again = ranks.forward(Forward(texts, 1, PROMPT + NEW // 2), graphs=False).seconds
        assert again == pytest.approx(measured.passes[WHOLE, texts], rel=0.03)
        again = ranks.forward(Forward(texts, PROMPT, asked=1), graphs=False).seconds
        assert again == pytest.approx(measured.prompts[WHOLE, texts], rel=0.15)


def test_figures_are_medians_over_the_rounds() -> None:
    hardware, model = parse_hardware(TRUE), shapes(**WIDE)
    plan = on_paper(model)
    right = true_round(hardware, model, plan)
    rounds = [_times(right, factor) for factor in (1.0, 1.5, 4.0)]
    text = hardware_text("found", MachineCalibration(model, {1: plan}, rounds=3, ways=()), {1: rounds})
    found = parse_hardware(text)
    assert found.host.launch == pytest.approx(1.5 * 4e-6, rel=0.05)
    assert found.device.peak("float32") == pytest.approx(0.9 * 1e11 / 1.5, rel=0.05)
    assert "from the medians of 3 rounds" in " ".join(text.replace("\n#", "").split())
    assert max(map(len, text.splitlines())) < 140


def _times(one: Round, factor: float) -> Round:
    return Round(*({key: factor * each for key, each in table.items()} for table in vars(one).values()))


def test_a_round_in_place_of_several_has_the_median_of_each() -> None:
    rounds = [_times(Round(products={1: 1.0}, passes={(WHOLE, 8): 2.0}), factor) for factor in (1, 5, 3)]
    assert merge_rounds(rounds) == Round(products={1: 3.0}, passes={(WHOLE, 8): 6.0})


def test_real_ranks_give_a_whole_file(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surgeon.cost.calibrate.EXCHANGES", EXCHANGES // 10)
    plans = {ranks: make_plan(tiny_checkpoint, ranks, 64) for ranks in (1, 2)}
    model = shapes(num_hidden_layers=plans[1].layers, **_sizes(tiny_checkpoint))
    calibration = MachineCalibration(model, plans, rounds=2)
    done: list[float] = []
    measured = calibration.measure(done.append)
    assert sum(done) == calibration.steps
    assert [len(each) for each in measured.values()] == [2, 2]
    for one in measured[2]:
        assert set(one.passes) == {(layers, texts) for layers in (WHOLE, SHORT) for texts in BATCHES}
        assert set(one.products) == set(ROWS)
        assert all(seconds > 0 for table in vars(one).values() for seconds in table.values())
    found = parse_hardware(hardware_text("tiny", calibration, measured))
    assert set(found.sharing) == {2}
    assert set(found.links) == {"shm", "gloo"}
    assert all(found.link(way).algorithms[0].base.at(2) > 0 for way in ("shm", "gloo"))
    assert found.sharing[2].host.collective > 0
    predicted = predict(model, Program.dense(4), found, Workload(2, 16, 4), Deployment(2, "float32"))
    assert 1e-4 < predicted.per_token < 10


def _sizes(folder: Path) -> dict[str, Any]:
    from surgeon.checkpoint.config import open_stored

    config = open_stored(folder).config
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    return {name: getattr(config, name) for name in names}


@pytest.mark.parametrize("ranks", [[2], [1, 2, 2], []])
def test_one_rank_is_among_those_measured_and_none_is_named_twice(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="name each number once, and 1 among them, as in 1,2,4"):
        check_ranks(ranks)


def test_a_disturbed_product_reaches_what_fewer_rows_did() -> None:
    model = shapes(**WIDE)
    calibration = MachineCalibration(model, {1: on_paper(model)}, ways=())
    measured = true_round(parse_hardware(TRUE), model, calibration.plans[1])
    disturbed = replace(measured, products=measured.products | {16: 100 * measured.products[16]})
    right, found = (fit(calibration, 1, one).flops for one in (measured, disturbed))
    assert found == right | {16: right[8]}


def test_launches_that_seem_longer_than_products_make_no_figure_below_nothing() -> None:
    model = shapes(**WIDE)
    calibration = MachineCalibration(model, {1: on_paper(model)}, rounds=1, ways=())
    measured = true_round(parse_hardware(TRUE), model, calibration.plans[1])
    disturbed = replace(
        measured,
        launches={"operation": 1.0, "product": 1.0},
        passes={
            key: (0.1 if key[0] == WHOLE else 1.0) * seconds for key, seconds in measured.passes.items()
        },
    )
    host = parse_hardware(hardware_text("found", calibration, {1: [disturbed]})).host
    assert host.launch == 0
    assert all(seconds >= 0 for _, seconds in host.forward.points)


def test_on_gpus_products_are_timed_from_recordings_as_passes_are() -> None:
    """Else a small model's would be those of their launches."""
    rank: Any = SimpleNamespace(device=torch.device("cuda", 0))
    with pretended_gpus(1) as noted:
        time_products(rank, [8, 24], 16, "float32")
        assert noted.launches["graph"] == len(ROWS) * (1 + TURNS)
        noted.clear()
        found = time_launches(rank)
        assert noted.launches["graph"] == TURNS
    assert {name: len(seconds) for name, seconds in found.items()} == dict.fromkeys(found, TURNS)
