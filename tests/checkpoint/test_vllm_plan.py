"""How unmodified vLLM divides low-rank checkpoints: the modeling file's plan, ranks made by hand, and what is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surgeon.checkpoint.forms import PROGRAM, lay_out
from surgeon.checkpoint.remote_code import modeling_surgeon_program as shipped
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.families import FAMILIES, family_of
from surgeon.models.weights import family_entry
from tests.checkpoint.helpers import (
    IDS,
    load_shipped,
    logits_of,
    plain_logits,
    relative_error,
    run_export,
    save_source,
)
from tests.tiny_models import tiny_model

DIVIDED = sorted(
    name
    for name, family in FAMILIES.items()
    if family.mixture is None
    and not family.attention.counts
    and not family.attention.joins_heads
    and not family.attention.apart  # gated, which ranks do not run
)
EVERYWHERE = "A0@q5,k3,v4,o6 F0@gate7,up9,down9 A1@q5,k3,v4,o6 F1@gate7,up9,down9"
MIXED = "A0 F0@gate9 A1@q5,k3,o6 F1@gate7,down9"
WHOLE = "A0 F0 A1 F1"


def program_for(family: str, program: str) -> str:
    """The program in steps of the family's layers, with the roles that it has."""
    known = FAMILIES[family]

    def own(sublayer: Sublayer) -> Sublayer:
        roles = {projection.role for projection in known.spec(sublayer.kind).projections}
        return Sublayer(
            sublayer.kind, sublayer.layers, None, tuple(r for r in sublayer.ranks if r[0] in roles)
        )

    wanted = {(one.kind, one.layers): own(one) for one in Program.parse(program).sublayers()}
    return str(
        Program.dense(2, known.steps_per_layer).map_sublayers(lambda one: wanted[one.kind, one.layers])
    )


def style_of(plan: dict[str, str], name: str) -> str:
    """As vLLM finds it: the first rule that a module's name begins with; without any it is whole on every rank."""
    return next(
        (style for rule, style in plan.items() if re.match(f"model.{rule}", f"model.{name}")),
        "replicate",
    )


def on_ranks(module: Any, name: str, plan: dict[str, str], inputs: list[Tensor]) -> list[Tensor]:
    """What every rank has after a projection of which it has a share."""
    if isinstance(module, shipped.FactoredLinear):
        between = on_ranks(module.first, f"{name}.first", plan, inputs)
        return on_ranks(module.second, f"{name}.second", plan, between)
    assert isinstance(module, nn.Linear)
    style, ranks = style_of(plan, name), len(inputs)
    if style == "rowwise":
        shares = zip(inputs, module.weight.chunk(ranks, 1), strict=True)
        total = sum(x @ weight.T for x, weight in shares) + (0 if module.bias is None else module.bias)
        return [total] * ranks
    divided = {"colwise": ranks, "replicate": 1}[style]
    weights = module.weight.chunk(divided) * (ranks // divided)
    biases = [None] * ranks if module.bias is None else module.bias.chunk(divided) * (ranks // divided)
    return [nn.functional.linear(*one) for one in zip(inputs, weights, biases, strict=True)]


def written(family: str, program: str, suffix: str = "Model") -> Any:
    """A random model of the class that vLLM builds, without a head, or of another one."""
    config = tiny_model(family, 2).config
    entries = {
        "surgeon_program": program,
        "surgeon_family": family_entry(family_of(config), config)._asdict(),
    }
    stem = PROGRAM.shipped.stem(family)
    own = getattr(shipped, f"{stem}Config").from_dict(config.to_dict() | entries)
    model = getattr(shipped, f"{stem}{suffix}")(own).requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("family", DIVIDED)
def test_ranks_compute_what_the_projections_do(family: str) -> None:
    for program in (EVERYWHERE, MIXED, WHOLE):
        model = written(family, program_for(family, program))
        (path,) = (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
        for index, layer in enumerate(model.get_submodule(path)):
            for place in model.family.reads + model.family.writes:
                check_projection(layer.get_submodule(place), f"{path}.{index}.{place}", model, place)


def check_projection(projection: Any, name: str, model: Any, place: str) -> None:
    """Outputs on two ranks side by side, or their sum, are those of the whole projection."""
    if isinstance(projection, shipped.TakenApart):
        for role, one in projection.named_children():
            check_projection(one, f"{name}.{role}", model, place)
        return
    reads = place in model.family.reads
    first = projection.first if isinstance(projection, shipped.FactoredLinear) else projection
    x = torch.randn(3, first.in_features)
    found = on_ranks(projection, name, model.tp_plan, [x, x] if reads else list(x.chunk(2, 1)))
    expected = projection(x)
    for got, wanted in zip(found, expected.chunk(2, 1) if reads else [expected] * 2, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_plan_in_words() -> None:
    """Nothing but the factors' rules differs from the stock plan, and rules are for all layers where these agree."""
    low, mixed, whole = (written("llama", program).tp_plan for program in (EVERYWHERE, MIXED, WHOLE))
    assert whole == tiny_model("llama", 2).model.tp_plan
    attention, mlp = "layers.*.self_attn", "layers.*.mlp"
    factors = {
        **{f"{attention}.{role}_proj.second": "colwise" for role in "qkv"},
        **{f"{mlp}.{role}_proj.second": "colwise" for role in ("gate", "up")},
        f"{attention}.o_proj.first": "rowwise",
        f"{mlp}.down_proj.first": "rowwise",
    }
    others = {rule: style for rule, style in whole.items() if not rule.startswith("layers.")}
    assert low == factors | others
    assert mixed["layers.0.self_attn.q_proj"] == mixed["layers.1.self_attn.q_proj.second"] == "colwise"
    assert not [rule for rule in mixed if "*" in rule]
    causal = written("llama", EVERYWHERE, "ForCausalLM").tp_plan
    assert {f"model.{rule}": style for rule, style in factors.items()}.items() <= causal.items()


@pytest.mark.parametrize("family", ["phi3", "olmo2"])
def test_attention_that_needs_all_its_heads_has_the_stock_plan(family: str) -> None:
    assert written(family, "A0@q5 F0 A1 F1").tp_plan == tiny_model(family, 2).model.tp_plan


def test_modules_with_factors_have_classes_of_their_own() -> None:
    """What vLLM finds in the first module of a class it applies to the others."""
    first, second = written("llama", "A0@q5 F0 A1@q6 F1").layers
    third, fourth = written("llama", "A0 F0 A1@k5 F1@up9").layers
    classes = [type(layer.self_attn) for layer in (first, second, third, fourth)]
    assert classes[0] is classes[1]
    assert len(set(classes)) == 3
    assert {one.__name__ for one in classes} == {"LlamaAttention"}
    assert all(issubclass(one, classes[2]) for one in classes)
    assert type(third.mlp) is not type(fourth.mlp)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_program_in_stock_order_is_left_to_the_stock_decoder(family: str, tmp_path: Path) -> None:
    program = program_for(family, MIXED)
    model = save_source(tmp_path / "source", family, num_layers=2)
    run_export(tmp_path / "source", tmp_path / "low", program)
    again = load_shipped(tmp_path / "low")
    assert not any(isinstance(module, shipped.ProgramLayers) for module in again.modules())
    assert relative_error(logits_of(again), plain_logits(model, program)) < 1e-5
    assert len(again(input_ids=IDS, output_hidden_states=True).hidden_states) == 3


@pytest.mark.parametrize(
    "program",
    [
        "F0 A0 F1 A1",
        "A0 F0 [A1 F1]",
        "A0 F0 >A1 F1",
        "A0/2:0 F0 A1 F1",
        "A0 F0",
        "{A0 F0 | A1 F1}",
        "A1 F1 A0 F0",
    ],
)
def test_other_programs_are_not_in_stock_order(program: str) -> None:
    assert not shipped.in_stock_order(shipped.parse(program), 2, 2)
    assert shipped.in_stock_order(shipped.parse("A0@q5 F0 A1 F1@up9"), 2, 2)
    assert shipped.in_stock_order(shipped.parse("[A0 F0@up9] [A1 F1]"), 1, 2)
    assert not shipped.in_stock_order(shipped.parse("[A0 F0] [A1 F1]"), 2, 2)


@pytest.mark.parametrize(
    ("family", "program", "why"),
    [
        ("llama", "A0@q5 F0 A1 F1", None),
        ("gpt_neox", "[A0@q5 F0] [A1 F1]", None),
        ("gemma2", "A0@q5 F0 A1 F1", None),
        ("llama", "A0@q5 F0 >A1 F1", "the program is another than one layer after the other"),
        ("opt", "A0@q5 F0 A1 F1", "OPT's attention in transformers goes by the number of all heads"),
        (
            "olmo2",
            "A0@q5 F0 A1 F1",
            "in OLMo2 queries and keys of all heads are normed together, of which a rank has some",
        ),
        ("phi3", "A0@q5 F0 A1 F1", "Phi3's attention in transformers goes by the number of all heads"),
    ],
)
def test_who_runs_it_is_said(family: str, program: str, why: str | None) -> None:
    config = tiny_model(family, 2).config
    reason = lay_out(Program.parse(program), family_of(config), config).reason
    if why is None:
        assert reason.startswith(
            "transformers and unmodified vLLM load it with the modeling file inside"
        )
        assert "plugin" not in reason
    else:
        assert f"vLLM needs surgeon's plugin, because {why}" in reason


def test_one_kv_head_is_not_divided() -> None:
    config = tiny_model("llama", 2, num_key_value_heads=1).config
    assert (
        "because ranks cannot divide one KV head"
        in lay_out(Program.parse("A0@q5 F0"), family_of(config), config).reason
    )


def test_vllm_is_told_of_the_factor_on_logits(tmp_path: Path) -> None:
    model = save_source(tmp_path / "source", "granite", num_layers=2)
    run_export(tmp_path / "source", tmp_path / "low", "A0@q5 F0 A1 F1")
    config = json.loads((tmp_path / "low" / "config.json").read_text())
    assert config["logit_scale"] * model.config.logits_scaling == pytest.approx(1)
