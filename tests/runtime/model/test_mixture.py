"""Mixtures of experts by every way of computing them, against one token and one expert at a time in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.models.families.mixtures import MIXTURE
from surgeon.models.routing import Routing
from surgeon.models.weights import Tensors
from surgeon.runtime.kernels.functions import kernels
from surgeon.runtime.kernels.recording import Arena, Recording
from surgeon.runtime.model import layers, mixture
from surgeon.runtime.model.mixture import Experts, MixtureOfExperts, Stacked, can_group
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from tests.tiny_models import HIDDEN, tiny_model

EXPERTS, NEURONS, TOP = 6, 20, 2
ROUTINGS = {
    "softmax": Routing(TOP),
    "normalised": Routing(TOP, normalise=True),
    "groups": Routing(TOP, "sigmoid", normalise=True, scale=2.5, groups=3, top_groups=2, group_best=2),
}


def with_arithmetic(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, arithmetic=replace(plan.arithmetic, **changes))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder: Path = tmp_path_factory.mktemp("mixture")
    tiny_model("llama").save_pretrained(folder)
    return with_arithmetic(make_plan(folder, 1, 8), routing=ROUTINGS["normalised"])


def drawn(biased: bool = False, shared: int = 0, weighed: bool = False, rank: int = 0) -> Tensors:
    """A mixture's tensors by role."""
    generator = torch.Generator().manual_seed(5)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    sizes = {"gate": (NEURONS, HIDDEN), "up": (NEURONS, HIDDEN), "down": (HIDDEN, NEURONS)}
    found = {"norm.weight": 1 + some(HIDDEN), "router.weight": 3 * some(EXPERTS, HIDDEN)}
    for role, (outputs, inputs) in sizes.items():
        if rank:
            found[f"{role}.first.weight"] = some(EXPERTS, rank, inputs)
            found[f"{role}.second.weight"] = some(EXPERTS, outputs, rank)
        else:
            found[f"{role}.weight"] = some(EXPERTS, outputs, inputs)
        if biased:
            found[f"{role}.bias"] = some(EXPERTS, outputs)
        if shared:
            wide = (shared, HIDDEN) if role != "down" else (HIDDEN, shared)
            found[f"shared_{role}.weight"] = some(*wide)
    if biased:
        found |= {"router.bias": some(EXPERTS), "router.correction": some(EXPERTS)}
    return found | ({"shared_router.weight": some(1, HIDDEN)} if weighed else {})


def expected(tensors: Tensors, stream: Tensor, plan: Plan, experts: range = range(EXPERTS)) -> Tensor:
    """One token and one expert at a time."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    for role in ("gate", "up", "down"):
        if f"{role}.first.weight" in w:
            w[f"{role}.weight"] = w[f"{role}.second.weight"] @ w[f"{role}.first.weight"]
    x = F.rms_norm(stream.double(), (HIDDEN,), w["norm.weight"], plan.arithmetic.epsilon)
    found = torch.zeros_like(x)
    routing = plan.arithmetic.routing
    assert routing is not None
    for token, one in enumerate(x):
        logits = w["router.weight"] @ one + w.get("router.bias", 0)
        scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1)
        ranked = scores + w.get("router.correction", 0)
        if routing.groups > 1:
            groups = ranked.view(routing.groups, -1)
            best = groups.sort(-1, descending=True).values[:, : routing.group_best].sum(-1)
            for group in best.argsort()[: routing.groups - routing.top_groups].tolist():
                groups[group] = -torch.inf
        chosen = ranked.argsort(descending=True)[: routing.top_k].tolist()
        total = scores[chosen].sum() if routing.divides else 1.0
        for expert in set(chosen) & set(experts):
            gate, up = (w[f"{role}.weight"][expert] @ one for role in ("gate", "up"))
            if "gate.bias" in w:
                gate, up = gate + w["gate.bias"][expert], up + w["up.bias"][expert]
            if plan.arithmetic.clamped_gate is not None:
                alpha, limit = plan.arithmetic.clamped_gate
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
                wide = gate * (alpha * gate).sigmoid() * up
            else:
                wide = F.silu(gate) * up
            made = w["down.weight"][expert] @ wide
            made = made + w["down.bias"][expert] if "down.bias" in w else made
            found[token] += scores[expert] / total * routing.scale * made
        if "shared_gate.weight" in w:
            beside = w["shared_down.weight"] @ (
                F.silu(w["shared_gate.weight"] @ one) * (w["shared_up.weight"] @ one)
            )
            weight = (w["shared_router.weight"] @ one).sigmoid() if "shared_router.weight" in w else 1.0
            found[token] += weight * beside
    return found


def close(found: Tensor, right: Tensor) -> bool:
    return bool((found.double() - right).norm() < 1e-5 * right.norm())


@pytest.fixture(params=["kernels", "grouped", "one by one"])
def by_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param != "kernels":
        for module in (layers, mixture):
            monkeypatch.setattr(module, "plan_kernels", lambda *_: None)
    elif kernels() is None:
        pytest.skip("there is no C++ compiler")
    if request.param == "one by one":
        monkeypatch.setattr(mixture, "can_group", lambda _: False)
    return bool(request.param == "kernels")


KINDS = ["plain", "clamped", "shared", "shared and weighed", "two factors", "two factors and biases"]


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize(
    ("kind", "routing"),
    [(kind, "normalised") for kind in KINDS] + [("biased", "softmax"), ("biased", "groups")],
)
@torch.inference_mode()
def test_every_way(kind: str, routing: str, tokens: int, by_kernels: bool, plan: Plan) -> None:
    """With and without waiting, of all experts and of some."""
    own = with_arithmetic(
        plan, routing=ROUTINGS[routing], clamped_gate=(1.7, 0.4) if kind == "clamped" else None
    )
    biased, shared = (
        kind in ("biased", "clamped") or kind.endswith("biases"),
        12 * kind.startswith("shared"),
    )
    tensors = drawn(biased, shared, kind.endswith("weighed"), 5 * kind.startswith("two"))
    stream = torch.randn(tokens, HIDDEN)
    made = MixtureOfExperts(tensors, MIXTURE, own)
    assert made.by_kernels == (by_kernels and kind in ("plain", "biased", "clamped", "shared"))
    right = expected(tensors, stream, own)
    for waits in (True, False):
        assert close(made(stream, waits), right)
    if shared:
        return
    some = {
        name: tensor[2:5] if name.startswith(("gate", "up", "down")) else tensor
        for name, tensor in tensors.items()
    }
    right = expected(tensors, stream, own, range(2, 5))
    for waits in (True, False):
        found = MixtureOfExperts(some, MIXTURE, own, first=2)(stream, waits)
        assert close(found, right) if right.norm() else not found.any()


@torch.inference_mode()
def test_many_tokens_go_through_the_kernel_in_parts(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "AT_ONCE", 7)
    tensors, stream = drawn(biased=True), torch.randn(23, HIDDEN)
    assert close(MixtureOfExperts(tensors, MIXTURE, plan)(stream), expected(tensors, stream, plan))


@pytest.mark.skipif(kernels() is None, reason="there is no C++ compiler")
@torch.inference_mode()
def test_a_recorded_mixture_goes_by_what_comes_later(plan: Plan) -> None:
    """Other tokens, that go to other experts, are computed right by what was recorded with the first ones."""
    own_kernels = kernels()
    assert own_kernels is not None
    own = with_arithmetic(plan, routing=ROUTINGS["groups"])
    tensors, stream = drawn(biased=True, shared=12), torch.randn(3, HIDDEN)
    made, recording = MixtureOfExperts(tensors, MIXTURE, own), Recording(own_kernels, Arena())
    assert not isinstance(made.experts, Experts)
    with recording.during():
        output = made(stream, waits=False)
    replay = recording.finish()
    assert replay is not None, recording.problem
    for _ in range(5):
        stream.copy_(torch.randn(3, HIDDEN))
        replay(False)
        assert close(output, expected(tensors, stream, own))


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="PyTorch is older than 2.10")
def test_what_is_grouped() -> None:
    assert can_group(Stacked(drawn(), "gate"))
    assert not can_group(Stacked(drawn(rank=5), "gate"))  # rows of 20 bytes


@torch.inference_mode()
def test_nothing_depends_on_data_without_waiting(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, whose tensors hold no numbers to wait for, both ways give the shape alone."""
    monkeypatch.setattr(layers, "plan_kernels", lambda *_: None)
    monkeypatch.setattr(mixture, "plan_kernels", lambda *_: None)
    tensors = {name: tensor.to("meta") for name, tensor in drawn(biased=True, shared=12).items()}
    made = MixtureOfExperts(tensors, MIXTURE, plan)
    assert isinstance(made.experts, Experts)
    for tokens in (1, 8):
        stream = torch.empty(tokens, HIDDEN, device="meta")
        assert made(stream, waits=False).shape == stream.shape
        with pytest.raises((RuntimeError, NotImplementedError)):
            made(stream, waits=True)
