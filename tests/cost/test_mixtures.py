"""What is predicted of mixtures against what the runtime computes, and against all choices that routers have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from surgeon.checkpoint.random_weights import open_weights
from surgeon.cost.deployment import Deployment, Workload, plan_on_paper
from surgeon.cost.kernels import Kernel
from surgeon.cost.predict import PredictedRanks, predict
from surgeon.cost.work import Forward, RankWork, divided_load, sliced_load
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.comm.collectives import Alone, Peers
from surgeon.runtime.model import layers, linear, mixture
from surgeon.runtime.model.attending import Pass
from surgeon.runtime.model.layers import Attention
from surgeon.runtime.model.mixture import Experts, MixtureOfExperts
from surgeon.runtime.model.program import RankProgram
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.placement import rank_work
from surgeon.runtime.plan.specification import Arithmetic
from tests.cost.examples import SIZES, hardware
from tests.cost.test_passes import Nobody, counted
from tests.tiny_models import HIDDEN, tiny_model

MIXED: dict[str, Any] = SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def drawn(experts: int, chosen: int, tokens: int, ranks: int) -> tuple[float, float]:
    """Experts that are hit, and on the rank with most of them: the means over all choices."""
    choices = list(combinations(range(experts), chosen))
    hit = [set().union(*each) for each in product(choices, repeat=tokens)]
    owners = [next(r for r in range(ranks) if e < experts * (r + 1) // ranks) for e in range(experts)]
    most = [max(sum(owners[expert] == rank for expert in one) for rank in range(ranks)) for one in hit]
    return mean(map(len, hit)), mean(most)


@pytest.mark.parametrize(
    ("experts", "chosen", "tokens", "ranks"),
    [(8, 2, 1, 2), (7, 3, 1, 2), (8, 4, 1, 4), (6, 2, 3, 2), (8, 2, 2, 4)],
)
def test_loads_are_the_means_of_all_choices(experts: int, chosen: int, tokens: int, ranks: int) -> None:
    hit, most = drawn(experts, chosen, tokens, ranks)
    whole, divided = sliced_load(experts, chosen, tokens), divided_load(experts, chosen, tokens, ranks)
    assert whole.hit == pytest.approx(hit)
    assert whole.pairs == tokens * chosen
    assert divided.hit == pytest.approx(most, rel=1e-9 if tokens == 1 else 0.06)
    assert divided.pairs / divided.hit == pytest.approx(whole.pairs / whole.hit)


def test_many_tokens_hit_all_experts_evenly() -> None:
    assert divided_load(64, 8, 4000, 4) == pytest.approx((16, 8000))
    assert sliced_load(4, 8, 3) == (4, 12)  # a token goes to no more than there are


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own operations, whose floating-point ones are counted."""
    for module in (layers, mixture):
        monkeypatch.setattr(module, "plan_kernels", lambda *_: None)
    monkeypatch.setattr(linear, "kernels_for", lambda _: None)
    monkeypatch.setattr(mixture, "can_group", lambda _: False)  # whose operations are not counted


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("program", ["F0", "F0!e0,e1,e3", "F0@gate5,down3", "F2"])
@pytest.mark.parametrize(
    ("texts", "new", "static"), [(1, 6, False), (2, 1, False), (1, 1, True), (9, 1, True)]
)
def test_arithmetic_is_that_of_the_runtime(
    program: str, texts: int, new: int, static: bool, tmp_path: Path
) -> None:
    """Of passes that wait for the router, and of those that do not: few tokens, and more of them."""
    model = tiny_model("qwen3_moe", num_layers=3)
    model.save_pretrained(tmp_path)
    plan, shapes = make_plan(tmp_path, 1, 64, program), ModelShapes.of("tiny", model.config)
    runtime = RankProgram(plan, Peers(Alone()), torch.device("cpu"))
    rank = RankWork(plan, shapes, lambda _: False, static)
    (work,) = rank_work(Program.parse(program), 0, 1)
    foretold = sum(
        item.flops for item in rank.items(work, Forward(texts, new)) if isinstance(item, Kernel)
    )
    runtime.load(open_weights(plan.folder, plan.family, plan.head_dim))
    (made,) = runtime.sublayers.values()
    stream = torch.randn(texts * new, HIDDEN)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        made(stream, not (static and new == 1)) if isinstance(made, MixtureOfExperts) else made(stream)  # type: ignore
    mixed = counter.get_total_flops()
    if static and texts == 9 and program != "F2":  # what weighs the experts of a token is a product here
        mixed -= 2 * texts * HIDDEN * (3 if "e" in program.partition("@")[0] else 4)
    assert foretold == mixed


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("family", "program", "ranks"),
    [
        ("gpt_oss", "A0", 1),
        ("gpt_oss", "A1", 2),
        ("gpt_oss", "F0", 1),
        ("deepseek_v2", "A0", 1),  # queries are made of the stream
        ("deepseek_v3", "A1", 2),  # of a latent
        ("deepseek_v3", "F0", 2),  # dense
        ("deepseek_v3", "F1", 1),  # with shared experts
    ],
)
def test_arithmetic_of_other_attentions_and_experts(
    family: str, program: str, ranks: int, tmp_path: Path
) -> None:
    """What a rank multiplies with; attending itself is counted elsewhere."""
    model = tiny_model(family, num_layers=2)
    model.save_pretrained(tmp_path)
    shapes = ModelShapes.of("tiny", model.config)
    plan, tokens = make_plan(tmp_path, ranks, 64, program), 5
    for rank in range(ranks):
        runtime = RankProgram(plan, Peers(Nobody(rank, tuple(range(ranks)))), torch.device("cpu"))
        (work,) = rank_work(Program.parse(program), rank, ranks)
        items = RankWork(plan, shapes, lambda _: False, static=False).items(work, Forward(1, tokens))
        products = [item for item in items if isinstance(item, Kernel) and item.nature == "product"]
        runtime.load(open_weights(plan.folder, plan.family, plan.head_dim))
        (made,) = runtime.sublayers.values()
        angles = torch.zeros(tokens, 1, plan.head_dim // 2)
        unread = Pass(lambda _, queries, *__: queries.flatten(1), ((angles, angles),))
        stream = torch.randn(tokens, HIDDEN)
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            made(stream, 0, unread) if isinstance(made, Attention) else made(stream)  # type: ignore[call-arg]
        assert sum(kernel.flops for kernel in products) == counter.get_total_flops()


@pytest.mark.usefixtures("plain")
def test_experts_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By routers of random weights, the mean of many passes."""
    tiny_model("mixtral", num_layers=1, num_local_experts=16).save_pretrained(tmp_path)
    runtime, read, tokens = (
        RankProgram(make_plan(tmp_path, 1, 64, "F0"), Peers(Alone()), torch.device("cpu")),
        list[int](),
        5,
    )
    runtime.load(open_weights(tmp_path, runtime.plan.family, runtime.plan.head_dim))
    (made,) = runtime.sublayers.values()
    assert isinstance(made, MixtureOfExperts)
    compute: Callable[..., Tensor] = Experts._compute_experts

    def noting(self: Experts, x: Tensor, which: Any) -> Tensor:
        read.append(which.start)
        return compute(self, x, which)

    monkeypatch.setattr(Experts, "_compute_experts", noting)
    generator, passes = torch.Generator().manual_seed(0), 60
    with torch.inference_mode():
        for _ in range(passes):
            router = torch.randn(16, HIDDEN, generator=generator)
            monkeypatch.setattr(made, "router", lambda x, router=router: x @ router.t())
            made(torch.randn(tokens, HIDDEN, generator=generator))
    assert len(read) / passes == pytest.approx(sliced_load(16, 2, tokens).hit, rel=0.05)


COLLECTIVES = ["A0 F0 A1 F1", "[A0 A1] [F0 F1!e0,e3]", "A0 >F0!e0,e1 >F1", "{A0 F0 | A1 F1}"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("family", "program"),
    [
        *(("qwen3_moe", one) for one in COLLECTIVES),
        ("gpt_oss", COLLECTIVES[1]),
        ("deepseek_v3", "A1 >F1!e0,e3"),
    ],
)
def test_collectives_are_those_that_the_runtime_counts(family: str, program: str, ranks: int) -> None:
    config = tiny_model(family).config
    if family == "qwen3_moe":
        width = 48 if program == COLLECTIVES[2] else 47  # of which experts are divided among ranks
        config = AutoConfig.for_model(family, **MIXED | {"moe_intermediate_size": width})
    shapes = ModelShapes.of("tiny", config)
    plan = plan_on_paper(shapes, Program.parse(program), ranks, 8, "float32", "auto", "full")
    routing = shapes.family.mlp.mixture.routing(config)  # type: ignore[union-attr]
    plan = replace(plan, arithmetic=Arithmetic(activation="silu", routing=routing))
    predicted = PredictedRanks(shapes, plan, hardware(), Deployment(ranks)).forward(
        Forward(1, 3), graphs=False
    )
    assert predicted.layers == counted(
        config, PredictedRanks(shapes, plan, hardware(), Deployment(ranks)), 0, None
    )
    assert predicted.layers.all_reduces == Program.parse(program).sync_points(ranks)


def test_more_texts_read_more_experts() -> None:
    """By hand, of one layer without attention, on a device that moves 1e9 bytes a second and computes at once."""
    shapes = ModelShapes.of(
        "tiny", AutoConfig.for_model("qwen3_moe", **MIXED | {"num_hidden_layers": 1})
    )
    machine = hardware(asynchronous="false", float32="1e30")

    def seconds(program: str, texts: int) -> float:
        load = Workload(texts, 8, 3)
        found = predict(shapes, Program.parse(program), machine, load, Deployment(dtype="float32"))
        return found.per_token

    matrices, hidden, neurons, experts = 3 * 64 * 48, 64, 48, 8
    for texts in (1, 6):
        hit, pairs = sliced_load(8, 2, texts)
        # Experts.
        numbers = (
            hit * matrices + pairs * (3 * (hidden + neurons) + 3 * neurons + hidden) + texts * hidden
        )
        numbers += experts * hidden + texts * (hidden + experts)  # the router
        numbers += texts * (experts + 2 * 2) + 5 * texts * hidden  # the choice, norm and sum
        more = seconds("A0 F0", texts) - seconds("A0", texts)
        assert more == pytest.approx(4 * numbers / 1e9, rel=1e-6)
