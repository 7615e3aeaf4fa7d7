"""Calibration: known hardware is found again in what passes would take on it, and real ranks give a whole file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from surgeon.cost.calibrate import MachineCalibration, check_ranks, hardware_text
from surgeon.cost.deployment import Deployment
from surgeon.cost.fit import Fit, rising
from surgeon.cost.hardware import Hardware
from surgeon.cost.hardware_file import parse_hardware
from surgeon.cost.kernels import Kernel, RankSpeed
from surgeon.cost.plans import plan_on_paper
from surgeon.cost.predict import predict
from surgeon.cost.samples import EXCHANGES, SHORT, SIZES, WHOLE, PassSample, Round, loads
from surgeon.cost.work import Forward, RankWork
from surgeon.cost.workload import Workload
from surgeon.language.operations import fuse_attention_mlp, ladder, pair
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.placement import rank_work
from surgeon.runtime.plan.specification import Plan
from tests.cost.examples import shapes

TRUE = """\
name: known
devices: 1
device:
  memory: 1e10
  bandwidth: 2e10
  flops: {float32: 1e11}
  shares:
    flops: {1: 0.05, 8: 0.2, 32: 0.5, 512: 0.9}
    bandwidth: 1
    copies: 0.2
    cache: 0.5
    attention: 0.3
host:
  launch: 1e-6
  launches: {product: 3e-6, join: 5e-6, gathered: 9e-6, norm: 11e-6, place: 30e-6, activation: 6e-6,
             attention: {1: 15e-6, 16: 50e-6},
             add: 4e-6, embedding: 20e-6, best: 40e-6}
  graph: 1e-6
  collective: 0
  forward: {1: 2e-4, 8: 4e-4, 32: 9e-4}
  asynchronous: false
links:
  shm: {bandwidth: 5e9, algorithms: [{kind: shared-memory, base: 8e-6, hop: 0, share: 1}]}
sharing:
  2:
    shares: {flops: {1: 0.04, 8: 0.1, 32: 0.3, 512: 0.45}, bandwidth: 0.7, copies: 0.15, cache: 0.4, attention: 0.2}
    host:
      launch: 2e-6
      launches: {product: 4e-6, join: 6e-6, gathered: 9e-6, norm: 12e-6, place: 33e-6, activation: 7e-6, add: 5e-6,
                 attention: {1: 16e-6, 16: 55e-6}}
      graph: 2e-6
      collective: 7e-6
      forward: {1: 3e-4, 8: 5e-4, 32: 1e-3}
      asynchronous: false
"""
WIDE = {"hidden_size": 256, "intermediate_size": 704, "head_dim": 32, "vocab_size": 512}


class TrueMachine:
    """What would be measured on hardware that is known, with nothing in the way."""

    def __init__(self, hardware: Hardware, model: ModelShapes, plan: Plan) -> None:
        self.hardware, self.plan = hardware, plan
        self.speed = RankSpeed.of(hardware, plan.dtype, plan.ranks)
        self.rank_work = RankWork(plan, model, lambda _: False, static=False, adding=False)
        self.works = rank_work(Program.parse(plan.program), 0, plan.ranks)
        self.attentions = [work for work in self.works if work.parts[0].sublayer.kind == "A"]

    def round(self) -> Round:
        host = self.speed.host
        found = Round(launches={name: host.launches[name].at(1) for name in ("product", "join", "gathered")})
        found.launches["operation"] = host.launch
        for layers, texts in loads(self.plan.max_tokens):
            layered = self.plan.layers if layers == WHOLE else 2
            found.passes.append(self.sample(layers, layered, texts.batch, texts.prompt, 0))
            found.passes.append(self.sample(layers, layered, texts.batch, 1, texts.prompt + 4))
        if self.plan.ranks > 1:
            for size in SIZES:
                once = size / 5e9
                found.starting["shm", size] = host.collective + once
                found.waiting["shm", size] = 8e-6 + self.plan.ranks * once
        return found

    def sample(self, layers: str, count: int, texts: int, new: int, cached: int) -> PassSample:
        forward = Forward(texts, new, cached)
        parts: dict[str, float] = {}
        for kind, work in zip("AF", self.works[:2], strict=True):
            kernels = [one for one in self.rank_work.items(work, forward) if isinstance(one, Kernel)]
            reading, *writing = (one for one in kernels if one.nature == "product")  # of a mixture all of its experts'
            parts |= {f"norm {kind}": self.seconds(kernels[0]), f"reading {kind}": self.seconds(reading)}
            parts |= {f"writing {kind}": sum(map(self.seconds, writing))}
            if kind == "A":
                items = (one for each in self.attentions for one in self.rank_work.items(each, forward))
                attending = (one for one in items if isinstance(one, Kernel) and one.nature == "attention")
                parts["attending"] = fmean(map(self.seconds, attending))  # layers may look back differently far
                kernels = [one for one in kernels if one.nature != "attention"]
            parts[f"sublayer {kind}"] = sum(self.seconds(one) for one in kernels[:-1])
            parts[f"sublayer {kind}"] += parts["attending"] if kind == "A" else 0.0
            parts[f"add {kind}"] = self.seconds(kernels[-1])
        numbers, plan = self.rank_work.numbers, self.plan
        rows = -(-plan.vocabulary // plan.ranks)
        parts["norm"] = self.seconds(numbers.copy("norm", 2 * texts * plan.hidden))
        parts["head"] = self.seconds(numbers.product("head", texts, rows, plan.hidden))
        parts["best"] = self.seconds(numbers.copy("best", texts * rows))
        parts["embedding"] = self.seconds(numbers.copy("embedding", 2 * forward.tokens * plan.hidden))
        counts = {name: 1 if name in ("norm", "head", "best", "embedding") else count for name in parts}
        inside = ("norm ", "reading", "writing", "attending")
        seconds = sum(parts[name] * counts[name] for name in parts if not name.startswith(inside))
        return PassSample(layers, texts, new, cached, seconds + self.speed.host.forward.at(texts), parts, counts)

    def seconds(self, kernel: Kernel) -> float:
        host = self.speed.host
        launching = kernel.launches * host.launching(kernel.name, kernel.nature, kernel.rows)
        return launching + self.speed.seconds(kernel)


def test_where_norms_add_what_additions_take_is_theirs() -> None:
    hardware, model = parse_hardware(TRUE), shapes(**WIDE)
    plan = plan_on_paper(model, Program.dense(4), 1, 480, "float32", "auto", "full")
    measured = TrueMachine(hardware, model, plan).round()
    apart, together = (Fit(plan, model, measured, adding).figures(()) for adding in (False, True))
    added = apart.pop("host.launches.add.1")
    assert added > 0
    assert together == apart | {"host.launches.norm.1": apart["host.launches.norm.1"] + added}


def test_experts_are_timed_together() -> None:
    """What all of their products take is not what the last of them does."""
    hardware = parse_hardware(TRUE)
    model = shapes("qwen3_moe", **WIDE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512})
    plan = plan_on_paper(model, Program.dense(4), 1, 480, "float32", "auto", "full")
    measured = TrueMachine(hardware, model, plan).round()
    found = parse_hardware(hardware_text("found", MachineCalibration(model, {1: plan}, ways=()), {1: [measured] * 3}))
    for load in (Workload(1, 64, 16), Workload(8, 64, 16)):
        expected, again = (predict(model, Program.dense(4), one, load, Deployment()) for one in (hardware, found))
        assert again.per_token == pytest.approx(expected.per_token, rel=0.15)
        assert again.first_token == pytest.approx(expected.first_token, rel=0.15)


def test_known_hardware_is_found_again_as_far_as_predictions_go() -> None:
    hardware, model = parse_hardware(TRUE), shapes(**WIDE)
    dense = Program.dense(4)
    plans = {ranks: plan_on_paper(model, dense, ranks, 480, "float32", "auto", "full") for ranks in (1, 2)}
    rounds = {ranks: [TrueMachine(hardware, model, plan).round()] * 3 for ranks, plan in plans.items()}
    found = parse_hardware(hardware_text("found", MachineCalibration(model, plans, ways=("shm",)), rounds))
    programs = [dense, pair(dense, range(4)), ladder(dense, range(4)), fuse_attention_mlp(dense, range(4))]
    for ranks in (1, 2):
        for program in programs:
            for batch, prompt in ((1, 16), (8, 16), (32, 16), (4, 100), (1, 400)):
                workload, deployment = Workload(batch, prompt, 8), Deployment(ranks, "float32")
                right, own = (predict(model, program, each, workload, deployment) for each in (hardware, found))
                assert own.first_token == pytest.approx(right.first_token, rel=0.05)
                assert own.per_token == pytest.approx(right.per_token, rel=0.05)


def test_figures_are_medians_between_the_least_and_the_largest() -> None:
    hardware, model = parse_hardware(TRUE), shapes(**WIDE)
    plan = plan_on_paper(model, Program.dense(4), 1, 480, "float32", "auto", "full")
    right = TrueMachine(hardware, model, plan).round()
    rounds = [_times(right, factor) for factor in (1.0, 1.5, 4.0)]
    text = hardware_text("found", MachineCalibration(model, {1: plan}, rounds=3, ways=("shm",)), {1: rounds})
    found = parse_hardware(text)
    assert found.host.launches["norm"].at(1) == pytest.approx(1.5 * 11e-6, rel=0.05)
    low, high = found.intervals["host.launches.norm.1"]
    assert (low, high) == (pytest.approx(11e-6, rel=0.05), pytest.approx(4 * 11e-6, rel=0.05))
    assert found.device.peak("float32") == pytest.approx(0.9 * 1e11 / 1.5, rel=0.05)
    assert "from the medians of 3 rounds" in " ".join(text.replace("\n#", "").split())
    assert max(map(len, text.splitlines())) < 140
    assert len(found.intervals) > 30


def _found(model: ModelShapes) -> str:
    plan = plan_on_paper(model, Program.dense(4), 1, 480, "float32", "auto", "full")
    measured = TrueMachine(parse_hardware(TRUE), model, plan).round()
    return hardware_text("found", MachineCalibration(model, {1: plan}, ways=()), {1: [measured] * 3})


def test_of_layers_that_look_back_differently_far_the_mean_is_counted() -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
    found = parse_hardware(_found(shapes("ministral", **WIDE, **layers))).device
    assert found.shares.cache is not None
    assert found.bandwidth * found.shares.cache.at(1) == pytest.approx(0.5 * 2e10, rel=0.01)


def test_what_windows_hide_is_said_and_left_out() -> None:
    text = _found(shapes("mistral", **WIDE, sliding_window=5))
    assert "No shares.cache: with this model's windows" in " ".join(text.replace("\n#", "").split())
    found = parse_hardware(text)
    assert found.device.shares.cache is None
    assert "device.shares.attention" in found.intervals


def _times(one: Round, factor: float) -> Round:
    def times(parts: Mapping[str, float]) -> dict[str, float]:
        return {name: factor * seconds for name, seconds in parts.items()}

    passes = [replace(each, seconds=factor * each.seconds, parts=times(each.parts)) for each in one.passes]
    return Round(passes, times(one.launches))


def test_real_ranks_give_a_whole_file(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surgeon.cost.samples.EXCHANGES", EXCHANGES // 10)
    plans = {ranks: make_plan(tiny_checkpoint, ranks, 64) for ranks in (1, 2)}
    model = shapes(num_hidden_layers=plans[1].layers, **_sizes(tiny_checkpoint))
    calibration = MachineCalibration(model, plans, rounds=2)
    done: list[float] = []
    measured = calibration.measure(done.append)
    assert sum(done) == calibration.steps
    assert [len(each) for each in measured.values()] == [2, 2]
    kinds = {(one.layers, one.texts, one.new) for one in measured[2][0].passes}
    assert {(WHOLE, 32, 16), (WHOLE, 32, 1), (SHORT, 8, 1), (WHOLE, 1, 54)} <= kinds
    for one in measured[1][0].passes:  # a part takes less than what it is a part of, in every pass and so in the median
        assert 0 < one.parts["attending"] < one.parts["sublayer A"] < one.seconds
    found = parse_hardware(hardware_text("tiny", calibration, measured))
    assert set(found.sharing) == {2}
    assert set(found.links) == {"shm", "gloo"}
    assert all(found.link(way).algorithms[0].base.at(2) > 0 for way in ("shm", "gloo"))
    assert found.sharing[2].host.collective > 0
    predicted = predict(model, Program.dense(4), found, Workload(2, 16, 4), Deployment(2, "float32"))
    assert 1e-4 < predicted.per_token < 10


def _sizes(folder: Path) -> dict[str, Any]:
    from surgeon.checkpoint.load import open_stored

    config = open_stored(folder).config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return {name: getattr(config, name) for name in names}


@pytest.mark.parametrize("ranks", [[2], [1, 2, 2], []])
def test_one_rank_is_among_those_measured_and_none_is_named_twice(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="name each number once, and 1 among them, as in 1,2,4"):
        check_ranks(ranks)


def test_what_ranks_wait_longer_the_more_they_compute_counts_as_computing() -> None:
    hardware, model = parse_hardware(TRUE), shapes(**WIDE)
    plans = {ranks: plan_on_paper(model, Program.dense(4), ranks, 480, "float32", "auto", "full") for ranks in (1, 2)}
    alone, two = (TrueMachine(hardware, model, plan).round() for plan in plans.values())
    two.passes = [_waiting(each, min(two.waiting.values()) + 1e-4, 0.5) for each in two.passes]
    calibration = MachineCalibration(model, plans, rounds=1, ways=("shm",))
    found = parse_hardware(hardware_text("found", calibration, {1: [alone], 2: [two]}))
    host = found.sharing[2].host
    assert host.launches["norm"].at(1) == pytest.approx(1.5 * 12.7e-6, rel=0.02)
    assert host.launch == pytest.approx(1.5 * 2e-6, rel=0.01)
    assert host.forward.at(8) == pytest.approx(5e-4, rel=0.08)  # which nobody waits for
    share = found.sharing[2].shares.flops.at(512) * found.device.peak("float32")
    assert share == pytest.approx(0.45e11 / 1.5, rel=0.05)
    assert found.link().algorithms[0].base.at(2) == pytest.approx(8e-6 + 1e-4, rel=0.02)


def _waiting(one: PassSample, each: float, uneven: float) -> PassSample:
    """A pass whose every collective waits so long, and for so much of what is computed before it."""
    counts = {**one.counts, "waiting": 2 * one.counts["sublayer A"]}
    waited = each + uneven * sum(one.parts[f"sublayer {kind}"] for kind in "AF") / 2
    seconds = one.seconds + waited * counts["waiting"]
    return replace(one, seconds=seconds, parts={**one.parts, "waiting": waited}, counts=counts)


def test_a_disturbed_product_reaches_what_fewer_rows_did() -> None:
    measured = {"shares.flops.8": 5.0, "shares.flops.128": 2.0, "shares.flops.16": 6.0, "shares.flops.512": 7.0}
    expected = {"shares.flops.8": 5.0, "shares.flops.128": 6.0, "shares.flops.16": 6.0, "shares.flops.512": 7.0}
    assert rising({**measured, "host.launch": 3.0}) == {**expected, "host.launch": 3.0}


def test_parts_that_seem_longer_than_their_sublayer_make_no_figure_below_nothing() -> None:
    hardware, model = parse_hardware(TRUE), shapes(**WIDE)
    plan = plan_on_paper(model, Program.dense(4), 1, 480, "float32", "auto", "full")
    disturbed = TrueMachine(hardware, model, plan).round()
    for number, one in enumerate(disturbed.passes):
        shorter = {name: 0.4 * seconds for name, seconds in one.parts.items() if name.startswith("sublayer")}
        disturbed.passes[number] = replace(one, parts={**one.parts, **shorter})
    text = hardware_text("found", MachineCalibration(model, {1: plan}, rounds=1, ways=("shm",)), {1: [disturbed]})
    assert all(figure.at(1) >= 0 for figure in parse_hardware(text).host.launches.values())
