"""Exported checkpoints compute what the program does, in every form; what cannot be proven is never written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.checkpoint.forms import FORMS, Form
from surgeon.checkpoint.stored import Checkpoint
from surgeon.exports import prove
from surgeon.exports.export import plan_export, write_export
from surgeon.language.program import Program, layer_nodes
from surgeon.models.families import family_of
from surgeon.opened import open_model
from surgeon.testing import FormContract
from tests.checkpoint.helpers import (
    BIASES,
    IDS,
    WITH_PADDING,
    load_shipped,
    logits_of,
    plain_logits,
    relative_error,
    run_export,
    save_source,
    weights_of,
)
from tests.reference import Reference
from tests.selection import one_in
from tests.tiny_models import DENSE_FAMILIES

PRUNED = "A0 F0 A2 F2 A3 F3 A5 F5"
SHUFFLED = "A0 F0 A3 F3 A1 F1 A2 F4"
MERGED = "A0 F0 A1~A2~A3 F1~F2~F3 A4 F4 A5 F5"
FACTORS = "A0 F0@up3 A1 F1 A2 F2 A3 F3 A4 F4 A5 F5"
PAIRS = "A0 F0 [A1 A2] [F1 F2] A3 F3 [A4 A5] [F4 F5]"
TRIPLET = "A0 F0 [A1 A2 A3] [F2 F1] A5 F5"
NARROW = "A0 F0 A1/2:1 F1/4:2 [A2/2:0 A2/2:1] [F2 F3/2:0]"
PARTLY = "F0 F1 A2 F2 [A3 A4] F5#12"
MERGED_PAIR = "[A0~A1 A2] [F0~F1 F2] A3 F3"
LADDER = "A0 F0 A1 F1 >A3 >F3 >A4 >F4"
LADDER_OVER_PAIRS = "A0 F0 >[A1 A2] >[F1 F2] >[A3 A4] >[F3 F4] A5 F5"
FORK = "A0 F0 {A1 F1 | A2 >F2 | A3~A4 F3~F4} A5 F5"
TRACKS = "A0 F0 {A1/2:0 F1/2:0 A2/2:0 F2/2:0 | A1/2:1 F1/2:1 A2/2:1 F2/2:1} A1 F5"
REPEATED = "A0 F0 A1 F1 A2 F2 A1 F1 A2 F2"
REPEATED_STEPS = "[A0 F0] [A1 F1] [A2 F2] [A1 F1] [A2 F2]"
PLAIN, PROGRAM = (PRUNED, SHUFFLED, MERGED), (LADDER, FORK, TRACKS)
FUSED = (PAIRS, PARTLY, TRIPLET, NARROW, MERGED_PAIR)
BY_FORM = {"plain": PLAIN, "fused": FUSED, "program": (*PROGRAM, LADDER_OVER_PAIRS)}
CASES = [(form, program) for form, programs in BY_FORM.items() for program in programs]


class TestForms(FormContract):
    @pytest.fixture(params=FORMS)
    def form(self, request: pytest.FixtureRequest) -> Form:
        return FORMS[request.param]

    @pytest.fixture
    def programs(self, form: Form) -> list[str]:
        return list(BY_FORM[form.name][:2])

    @pytest.fixture
    def refused(self, form: Form) -> dict[str, str]:
        return {} if form.name == "program" else {LADDER: "the step >A3 is late"}


def load_written(folder: Path, form: str) -> Any:
    if form == "plain":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return load_shipped(folder)


# The head, which no program touches, is stored or not: once in every form where the other cases have one of its own.
TIED = [(form, programs[0], True) for form, programs in BY_FORM.items()]


@pytest.mark.sampled
@pytest.mark.parametrize(("form", "program", "tied"), [*((*case, False) for case in CASES), *TIED])
def test_logits_equal_a_plain_computation(tmp_path: Path, form: str, program: str, tied: bool) -> None:
    model = save_source(tmp_path / "source", tie_word_embeddings=tied, **BIASES)
    proof = run_export(tmp_path / "source", tmp_path / "target", program)
    written = load_written(tmp_path / "target", form)
    expected = plain_logits(model, program)
    assert relative_error(logits_of(written), expected) < 1e-5
    assert relative_error(logits_of(surgeon.load(tmp_path / "target")), expected) < 1e-5
    assert json.loads((tmp_path / "target" / "surgeon.json").read_text())["form"] == form
    assert 0 <= proof.exact == proof.written < 1e-5
    assert ("lm_head.weight" in weights_of(tmp_path / "target")) is not tied


@pytest.mark.parametrize("family", one_in(6, DENSE_FAMILIES, 0))
def test_every_family_has_the_plain_form(tmp_path: Path, family: str) -> None:
    """Pruned and shuffled, loaded in the stock class: windows and attention types go with their layers."""
    model = save_source(tmp_path / "source", family, 4)
    layers = [layer_nodes(k, family_of(model.config).steps_per_layer) for k in (0, 3, 2)]
    run_export(tmp_path / "source", tmp_path / "target", str(Program(sum(layers, ()))), form="plain")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    assert type(stock) is type(model)
    reference = Reference(model)
    stream = reference.embed(IDS)
    for k in (0, 3, 2):
        stream = reference.layer(k, stream)
    assert relative_error(logits_of(stock), reference.logits(stream)) < 1e-5


@pytest.mark.parametrize(("form", "program"), [("plain", MERGED), ("fused", PAIRS), ("program", FORK)])
def test_cache_padding_and_saving_again(tmp_path: Path, form: str, program: str) -> None:
    save_source(tmp_path / "source", **WITH_PADDING)
    run_export(tmp_path / "source", tmp_path / "target", program)
    model = load_written(tmp_path / "target", form)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    cached = model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    assert torch.equal(
        cached, model.generate(IDS, attention_mask=torch.ones_like(IDS), use_cache=False, **options)
    )

    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), IDS], dim=1)
    mask = (torch.arange(13) >= 4).long().expand(2, 13)
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 4:], cached)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    unpadded = logits_of(model, padded, attention_mask=mask, position_ids=positions)[:, 4:]
    assert relative_error(unpadded, logits_of(model)) < 1e-5

    model.save_pretrained(tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    assert torch.equal(logits_of(again), logits_of(model))
    assert torch.equal(
        logits_of(surgeon.load(tmp_path / "again")), logits_of(surgeon.load(tmp_path / "target"))
    )
    assert logits_of(model).requires_grad is False
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_attention_that_occurs_twice_has_two_caches(tmp_path: Path) -> None:
    model = save_source(tmp_path / "source", num_layers=3)
    program = "A0 F0 >A1 F1 A1 F1 A0 F2"
    run_export(tmp_path / "source", tmp_path / "target", program)
    written = load_shipped(tmp_path / "target")
    assert len(written(input_ids=IDS).past_key_values.layers) == 4
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    grown = IDS
    for _ in range(8):
        grown = torch.cat([grown, plain_logits(model, program, grown)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(written.generate(IDS, **options), grown)


@pytest.mark.parametrize(("family", "program"), [("llama", REPEATED), ("gpt_neox", REPEATED_STEPS)])
def test_layers_that_run_twice_are_stored_once_unless_asked_for(
    family: str, program: str, tmp_path: Path
) -> None:
    model = save_source(tmp_path / "source", family, 4)
    run_export(tmp_path / "source", tmp_path / "shared", program)
    run_export(tmp_path / "source", tmp_path / "stock", program, form="plain")
    shared, stock = (
        json.loads((tmp_path / name / "surgeon.json").read_text()) for name in ("shared", "stock")
    )
    copied = "what runs several times, of layers 1 and 2, is stored as often as it runs"
    assert (shared["form"], stock["form"]) == ("program", "plain")
    assert (
        f"not plain or fused, because {copied} there; ask for it if other software is to load it"
        in shared["reason"]
    )
    assert (
        stock["reason"]
        == f"the program is a sequence of 5 whole layers, which any software loads; {copied}"
    )

    def numbers(name: str) -> list[int]:
        return [
            tensor.numel() for key, tensor in weights_of(tmp_path / name).items() if ".layers." in key
        ]

    assert sum(numbers("stock")) * 3 == sum(numbers("shared")) * 5
    reference = Reference(model)
    stream = reference.embed(IDS)
    for layer in (0, 1, 2, 1, 2):
        stream = reference.layer(layer, stream)
    expected = reference.logits(stream)
    for written in (load_shipped(tmp_path / "shared"), load_written(tmp_path / "stock", "plain")):
        assert relative_error(logits_of(written), expected) < 1e-5


@pytest.mark.parametrize(("family", "program"), [("llama", PAIRS), ("opt", PAIRS), ("qwen2", FACTORS)])
def test_both_roundings_are_proven_in_one_run_as_in_two(
    family: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases that have shifts folded in, and with two factors, too."""
    save_source(tmp_path / "source", family, dtype=torch.bfloat16)
    runs = list[int]()
    logits_of = prove._logits

    def counted(model: Any, tokens: Tensor, *others: Any, **more: Any) -> Tensor:
        runs.append(len(tokens))
        return logits_of(model, tokens, *others, **more)

    monkeypatch.setattr(prove, "_logits", counted)
    together = run_export(tmp_path / "source", tmp_path / "together", program)
    monkeypatch.setattr(prove, "_only_linear", lambda *_: False)
    apart = run_export(tmp_path / "source", tmp_path / "apart", program)
    assert runs == [2, 4, 2, 2, 2]  # each time the original first
    assert together.exact < 1e-5 < together.written
    assert together.exact == pytest.approx(apart.exact, abs=1e-6)
    assert together.written == pytest.approx(apart.written, rel=1e-3)


def test_a_plan_says_what_every_tensor_is_computed_from(tmp_path: Path) -> None:
    save_source(tmp_path / "source", dtype=torch.bfloat16)
    plan = plan_export(open_model(tmp_path / "source"), Program.parse(PAIRS))
    planned = {tensor.name: tensor for tensor in plan.tensors}
    copy, folded, columns = (
        planned[f"model.layers.{name}.weight"]
        for name in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj")
    )
    assert copy.sources == (copy.name,)
    assert copy.blocks is not None
    assert not copy.rounded
    of_pair = [
        f"model.layers.{k}.{name}.weight"
        for name in ("self_attn.q_proj", "input_layernorm")
        for k in (1, 2)
    ]
    assert folded.sources == tuple(of_pair)
    assert folded.blocks is None
    assert folded.rounded
    assert columns.sources == tuple(f"model.layers.{k}.mlp.down_proj.weight" for k in (1, 2))
    assert not columns.rounded


def test_folding_a_16_bit_model_is_proven_before_and_after_rounding(tmp_path: Path) -> None:
    model = save_source(tmp_path / "source", dtype=torch.bfloat16)
    proof = run_export(tmp_path / "source", tmp_path / "target", PAIRS)
    assert proof.dtype == "bfloat16"
    assert proof.exact < 1e-5
    assert 1e-5 < proof.written < 0.05
    weights = weights_of(tmp_path / "target")
    source = weights_of(tmp_path / "source")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert torch.equal(
        weights["model.layers.2.mlp.up_proj.weight"], source["model.layers.3.mlp.up_proj.weight"]
    )
    expected = plain_logits(model, PAIRS)
    found = relative_error(logits_of(load_shipped(tmp_path / "target")), expected)
    assert found == pytest.approx(proof.written, rel=2)  # on other tokens


@pytest.mark.parametrize("program", [PAIRS, LADDER])
def test_progress_reaches_its_end(tmp_path: Path, program: str) -> None:
    save_source(tmp_path / "source", dtype=torch.bfloat16)
    plan = plan_export(open_model(tmp_path / "source"), surgeon.Program.parse(program))
    told: list[float] = []
    write_export(plan, tmp_path / "target", advance=told.append)
    assert sum(told) == plan.passes * plan.weight_bytes
    assert len(told) > len(plan.tensors)


def test_copied_16_bit_weights_are_held_to_the_strict_bound(tmp_path: Path) -> None:
    save_source(tmp_path / "source", dtype=torch.float16)
    for program in (PRUNED, LADDER):
        proof = run_export(tmp_path / "source", tmp_path / "target", program, overwrite=True)
        assert (proof.tolerance, proof.dtype) == (1e-4, "float32")
        assert proof.written < 1e-5


def test_another_dtype_can_be_asked_for(tmp_path: Path) -> None:
    save_source(tmp_path / "source", dtype=torch.bfloat16)
    proof = run_export(tmp_path / "source", tmp_path / "wide", PAIRS, dtype="float32")
    assert proof.written == proof.exact < 1e-5
    proof = run_export(tmp_path / "source", tmp_path / "half", PRUNED, dtype="float16")
    assert proof.written > proof.exact
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"
    assert {tensor.dtype for tensor in weights_of(tmp_path / "half").values()} == {torch.float16}
    with pytest.raises(ValueError, match="unknown dtype 'float8'; did you mean"):
        run_export(tmp_path / "source", tmp_path / "other", PRUNED, dtype="float8")


def test_fused_tensors_are_what_the_equation_says(tmp_path: Path) -> None:
    save_source(tmp_path / "source", **BIASES)
    run_export(tmp_path / "source", tmp_path / "target", PAIRS)
    old, new = weights_of(tmp_path / "source"), weights_of(tmp_path / "target")

    def at(layer: int, path: str) -> Tensor:
        return old[f"model.layers.{layer}.{path}"]

    fused = {
        name.removeprefix("model.layers.1."): tensor
        for name, tensor in new.items()
        if ".layers.1." in name
    }
    for path, norm in (
        ("self_attn.k_proj", "input_layernorm"),
        ("mlp.up_proj", "post_attention_layernorm"),
    ):
        folded = [at(k, f"{path}.weight") @ torch.diag(at(k, f"{norm}.weight")) for k in (1, 2)]
        # The two KV groups take turns, that of layer 1 first; neurons do not.
        turns = (2, 8) if "self_attn" in path else (1, -1)
        weight = torch.cat([w.unflatten(0, turns) for w in folded], dim=1).flatten(0, 1)
        bias = torch.cat([at(k, f"{path}.bias").unflatten(0, turns) for k in (1, 2)], dim=1).flatten()
        torch.testing.assert_close(fused[f"{path}.weight"], weight)
        assert torch.equal(fused[f"{path}.bias"], bias)
        assert torch.equal(fused[f"{norm}.weight"], torch.ones(32))
    o_proj = [at(k, "self_attn.o_proj.weight").unflatten(1, (2, 16)) for k in (1, 2)]
    assert torch.equal(fused["self_attn.o_proj.weight"], torch.cat(o_proj, dim=2).flatten(1))
    torch.testing.assert_close(
        fused["mlp.down_proj.bias"], at(1, "mlp.down_proj.bias") + at(2, "mlp.down_proj.bias")
    )
    # Layer 3 stays as it was, now as layer 2.
    for path in ("input_layernorm.weight", "mlp.gate_proj.weight"):
        assert torch.equal(new[f"model.layers.2.{path}"], at(3, path))


def test_the_fused_config_is_what_vllm_reads(tmp_path: Path) -> None:
    save_source(tmp_path / "source")
    run_export(tmp_path / "source", tmp_path / "target", TRIPLET)
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["per_layer_config"] == {
        "1": {"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 96}
    }
    assert config["num_hidden_layers"] == 3
    assert config["head_dim"] == 8
    assert config["allow_global_per_layer_attribute_access"] is True
    assert (config["model_type"], config["base_model_type"]) == ("surgeon_fused", "llama")
    assert config["architectures"] == ["SurgeonFusedForCausalLM"]
    assert config["auto_map"] == {
        "AutoConfig": "modeling_surgeon_fused.SurgeonFusedConfig",
        "AutoModel": "modeling_surgeon_fused.SurgeonFusedModel",
        "AutoModelForCausalLM": "modeling_surgeon_fused.SurgeonFusedForCausalLM",
    }


def test_per_layer_lists_follow_the_layers(tmp_path: Path) -> None:
    kinds = [
        "sliding_attention",
        "full_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ]
    save_source(
        tmp_path / "source", "qwen3", 5, layer_types=kinds, sliding_window=4, use_sliding_window=True
    )
    path = tmp_path / "source" / "config.json"
    stored = json.loads(path.read_text()) | {
        "own_list": [10, 11, 11, 13, 14],
        "eos_token_id": [1, 2, 3, 4, 5],
    }
    path.write_text(json.dumps(stored))
    for program, kept in (
        ("A3 F3 A1~A2 F1~F2 A4 F4 A0 F0", [3, 1, 4, 0]),
        ("A4 F4 >A3 >F3 A1 F1", [1, 3, 4]),
    ):
        run_export(tmp_path / "source", tmp_path / "target", program, overwrite=True)
        config = json.loads((tmp_path / "target" / "config.json").read_text())
        assert config["layer_types"] == [kinds[k] for k in kept]
        assert config["own_list"] == [[10, 11, 11, 13, 14][k] for k in kept]
        assert config["eos_token_id"] == [1, 2, 3, 4, 5]
        edited = surgeon.edit(surgeon.load(tmp_path / "source"), program)
        assert relative_error(logits_of(surgeon.load(tmp_path / "target")), logits_of(edited)) < 1e-6
    written = load_shipped(tmp_path / "target")
    # While it runs: one per attention.
    assert written.config.layer_types == [kinds[k] for k in (4, 3, 1)]
    assert relative_error(logits_of(written), logits_of(edited)) < 1e-6


@pytest.mark.parametrize("program", [PRUNED, PAIRS, LADDER])
def test_shards_are_as_large_as_the_sources(tmp_path: Path, program: str) -> None:
    model = save_source(tmp_path / "source", shards="60KB")
    run_export(tmp_path / "source", tmp_path / "target", program)
    limit = max(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors"))
    files = sorted((tmp_path / "target").glob("*.safetensors"))
    assert len(files) > 1
    assert all(path.stat().st_size < limit + 4096 for path in files)  # the header comes on top
    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in files}
    target = Checkpoint(tmp_path / "target")
    assert index["metadata"]["total_size"] == sum(
        target.tensor(name).numel() * target.dtype(name).itemsize for name in target.names()
    )
    expected = plain_logits(model, program)
    assert relative_error(logits_of(surgeon.load(tmp_path / "target")), expected) < 1e-5


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    save_source(tmp_path / "source")
    proof = run_export(
        tmp_path / "source", tmp_path / "target", LADDER_OVER_PAIRS, recipe="surgeon: 1\n"
    )
    report = json.loads((tmp_path / "target" / "surgeon.json").read_text())
    assert report["surgeon"] == surgeon.__version__
    assert report["program"] == LADDER_OVER_PAIRS
    assert report["recipe"] == "surgeon: 1\n"
    assert report["source"] == {
        "model": "source",
        "num_layers": 6,
        "parameters": sum(weight.numel() for weight in weights_of(tmp_path / "source").values()),
        "model_hash": Checkpoint(tmp_path / "source").model_hash(),
        "card": {"metadata": {}, "notes": []},
    }
    assert report["effective_depth"] == 4
    assert report["sync_points_on_two_ranks"] == 8
    assert report["proof"]["tokens"] == proof.tokens == 128
    assert report["proof"]["exact"] == proof.exact
    assert str(tmp_path) not in json.dumps(report)


def test_plain_checkpoints_have_no_code_and_name_the_stock_class(tmp_path: Path) -> None:
    save_source(tmp_path / "source")
    run_export(tmp_path / "source", tmp_path / "target", PRUNED)
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in config
    assert not list((tmp_path / "target").glob("*.py"))


def test_a_plain_checkpoint_can_be_exported_again(tmp_path: Path) -> None:
    save_source(tmp_path / "source")
    run_export(tmp_path / "source", tmp_path / "pruned", PRUNED)
    run_export(tmp_path / "pruned", tmp_path / "again", "A0 F0 [A1 A2] [F1 F2] A3 F3")
    once = surgeon.edit(surgeon.load(tmp_path / "source"), "A0 F0 [A2 A3] [F2 F3] A5 F5")
    assert relative_error(logits_of(surgeon.load(tmp_path / "again")), logits_of(once)) < 1e-6
