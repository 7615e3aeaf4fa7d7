"""A teacher whose pass begins with the student's stream: the same losses and gradients, and fewer modules called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import surgeon
from surgeon.language.program import Program
from surgeon.training.distiller import Distiller, shared_prefix
from surgeon.training.scope import add_adapters, choose_parameters
from surgeon.training.settings import Distillation
from tests.tiny_models import VOCABULARY, tiny_model

PAIRED = "A0 F0 A1 F1 [A2 A3] [F2 F3]"
SETTINGS = Distillation(logits=0.7, hidden=0.3, text=0.2, temperature=2.0)


def pair_of(family: str, program: str) -> tuple[Any, Any]:
    """A student whose edited sublayers are trained, a little already, and its original."""
    student, teacher = tiny_model(family, dropout=0.0), tiny_model(family, dropout=0.0)
    choose_parameters(surgeon.edit(student, program), "edited", Program.parse(program))
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * parameter.std().nan_to_num() * torch.randn_like(parameter))
    return student, surgeon.edit(teacher, Program.dense(4, 1 if family == "gpt_neox" else 2))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize(
    ("family", "program", "nodes"),
    [
        ("llama", PAIRED, 4),
        ("gemma2", "A0 F0 A1 F1 A2 >F2 >A3 >F3", 4),  # F2 reads as A2 did
        ("gemma2", "A0 F0 A1 F1 A2 F2 >A3 >F3", 5),
        ("llama", "A0 F0 A1 F1 A3 F3", 2),  # on both sides of a gap it is trained
        ("gpt_neox", "[A0 F0] [A1 F1] [A2 F2 A3 F3]", 2),
        ("qwen3", "A0 F0 {A1 F1 | A2 F2} A3 F3", 2),
        ("llama", "A0 F0 A1 F1 A2@q3 F2 A3 F3", 4),
    ],
)
def test_one_pass_for_both(family: str, program: str, nodes: int) -> None:
    student, teacher = pair_of(family, program)
    apart, shared = (Distiller(SETTINGS, Program.parse(program), teacher) for _ in range(2))
    shared.shared = shared_prefix(student, shared.teacher, Program.parse(program))
    assert shared.shared == nodes
    called: list[str] = []
    spies = [
        module.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, module in teacher.named_modules()
        if name.endswith(("self_attn", "attention"))
    ]
    found = []
    for distiller in (apart, shared):
        called.clear()
        student.zero_grad()
        parts = distiller.loss(student, batch())
        parts["loss"].backward()
        found.append((parts, {name: one.grad for name, one in student.named_parameters()}, len(called)))
    for spy in spies:
        spy.remove()
    (parts, slopes, all_called), (ours, own, few) = found
    assert few < all_called == 4
    for name, part in parts.items():
        assert torch.allclose(ours[name], part, rtol=1e-5), name
    for name, slope in slopes.items():
        assert (own[name] is None) == (slope is None)
        assert slope is None or torch.allclose(own[name], slope, rtol=1e-4, atol=1e-6), name


def shared_in(student: Any, program: str = PAIRED, **teacher: Any) -> int:
    original = surgeon.edit(tiny_model("llama", dropout=0.0, **teacher), Program.dense(4))
    return shared_prefix(student, original, Program.parse(program))


def paired(**config: Any) -> Any:
    return surgeon.edit(tiny_model("llama", **{"dropout": 0.0} | config), PAIRED)


def chosen(scope: str, **config: Any) -> Any:
    model = paired(**config)
    choose_parameters(model, scope, Program.parse(PAIRED))
    return model


def test_what_trains_or_differs_is_not_shared() -> None:
    assert shared_in(chosen("edited")) == shared_in(chosen("edited-norms")) == 4
    assert shared_in(add_adapters(paired(), "edited", Program.parse(PAIRED), 2)) == 4
    assert shared_in(chosen("all")) == shared_in(chosen("norms")) == 0
    assert shared_in(add_adapters(paired(), "all", Program.parse(PAIRED), 2)) == 0
    assert shared_in(chosen("edited", attention_dropout=0.1)) == 0
    assert shared_in(chosen("edited"), hidden_size=64) == 0
    healed = chosen("edited")
    with torch.no_grad():
        healed.model.layers.get_submodule("1.mlp.up_proj").weight[0, 0] += 1
    assert shared_in(healed) == 3
    with torch.no_grad():
        healed.model.embed_tokens.weight[0, 0] += 1
    assert shared_in(healed) == 0
