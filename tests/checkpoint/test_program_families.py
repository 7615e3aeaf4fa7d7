"""The program form's modeling file, for every architecture, against plain computations; and in the world around it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import surgeon
from surgeon.checkpoint.forms import PROGRAM
from surgeon.checkpoint.remote_code import modeling_surgeon_program as shipped
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.language.program import Program
from surgeon.language.sublayer import KINDS, Sublayer
from surgeon.models.families import FAMILIES, family_of
from surgeon.models.weights import ModelWeights, ModuleStore, family_entry
from tests.checkpoint.helpers import (
    IDS,
    load_shipped,
    logits_of,
    plain_logits,
    relative_error,
    run_export,
    save_source,
)
from tests.selection import one_in
from tests.tiny_models import DENSE_FAMILIES, TEXT, save_checkpoint, tiny_model

TRACKS = "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A1/2:0 F1/2:0 [A1/2:1 F1/2:1] A2 F2"
UNSLICED = "{A0 F0 | F1 A1} >A2 >F2"
PROGRAMS = (
    "A0 F0 [A1 A2] [F1 F2]",
    "A0 F0 >A1 >F1 >[A2 A0] >[F2 F0] A1 F1",  # a ladder, over LP, with layers that run twice
    "A0 {A1 F1 | {A2 | F0} F2} [A0 F1]",
)
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 4,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MERGED = {True: "A0 F0 >A1~A2 F1~F2", False: "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A1~A2 F1~F2"}
BIASED = {"llama": {"attention_bias": True, "mlp_bias": True}}


def tracks_of(family: str) -> str:
    """A program of slices, where the architecture has them."""
    return UNSLICED if FAMILIES[family].mlp.norms_output else TRACKS


def model_running(model: Any, program: str) -> Any:
    """The shipped class with a stock model's weights."""
    model_class = PROGRAM.shipped.model_class(model.config.model_type)
    row = family_entry(family_of(model.config), model.config)
    own = {"surgeon_program": program, "surgeon_family": row._asdict()}
    config = model_class.config_class.from_dict(model.config.to_dict() | own)
    running = model_class(config)
    running.load_state_dict(model.state_dict())
    return running.eval()


def projections_of(layer: nn.Module, family: str) -> list[nn.Module]:
    spec = FAMILIES[family]
    paths = {projection.path for projection in (*spec.attention.projections, *spec.mlp.projections)}
    return [layer.get_submodule(path) for path in sorted(paths)]


@pytest.mark.sampled
@pytest.mark.parametrize("family", one_in(2, DENSE_FAMILIES, 0))
def test_programs_equal_a_plain_computation(family: str) -> None:
    model = tiny_model(family, 3, **BIASED.get(family, {}))
    for program in (*PROGRAMS, tracks_of(family)):
        running = model_running(model, program)
        assert relative_error(logits_of(running), plain_logits(model, program)) < 1e-5, program
    # The last one generates too: as without a cache, in a batch with padding, and as surgeon does.
    expected = surgeon.edit(copy.deepcopy(model), program).generate(IDS, **OPTIONS)
    assert torch.equal(running.generate(IDS, use_cache=False, **OPTIONS), expected)
    short = IDS[:1, 3:]
    ids = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), short], dim=1), IDS])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    padded = running.generate(ids, attention_mask=mask, **OPTIONS)
    assert torch.equal(padded[1:], expected)
    assert torch.equal(padded[:1, 3:], running.generate(short, **OPTIONS))
    # What is more than its weight is called whole.
    for layer in layers_of(running):
        for projection in projections_of(layer, family):
            projection.register_forward_hook(lambda *_: None)
    assert relative_error(logits_of(running), plain_logits(model, program)) < 1e-5


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_dropout_and_positions_without_attention(family: str) -> None:
    """In training it drops what the stock model drops; without attentions the cache counts tokens all the same."""
    model = tiny_model(family, 2)
    dense = Program.dense(2, family_of(model.config).steps_per_layer)
    found = []
    for trained in (model, model_running(model, str(dense))):
        torch.manual_seed(5)
        found.append(logits_of(trained.train()))
    assert torch.equal(*found)
    running, cache, steps = model_running(model, "F0 F1"), None, []
    for ids in IDS.split([4, 1, 4], 1):
        out = running(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, steps = out.past_key_values, [*steps, out.logits]
    torch.testing.assert_close(torch.cat(steps, 1), logits_of(running))


def layers_of(running: Any) -> list[nn.Module]:
    replaced = next(module for module in running.modules() if isinstance(module, shipped.ProgramLayers))
    return list(replaced.children())


@pytest.mark.sampled
@pytest.mark.parametrize("family", one_in(2, DENSE_FAMILIES, 1))
def test_checkpoints_load_as_they_were_exported(family: str, tmp_path: Path) -> None:
    program = MERGED[FAMILIES[family].mlp.norms_output]
    model = save_source(tmp_path / "source", family, num_layers=3)
    run_export(tmp_path / "source", tmp_path / "target", program, form="program")
    expected = plain_logits(model, program)
    written = load_shipped(tmp_path / "target")
    assert relative_error(logits_of(written), expected) < 1e-5
    assert relative_error(logits_of(surgeon.load(tmp_path / "target")), expected) < 1e-5
    for load in (AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            load(tmp_path / "target", trust_remote_code=False)
    # The configuration of a model that lives, saved by itself, describes the stored layers again.
    written.config.save_pretrained(tmp_path / "again")
    config = type(written.config).from_pretrained(tmp_path / "again")
    assert config.num_hidden_layers == written.config.num_hidden_layers - ("/" in program) == 2
    assert (
        relative_error(
            logits_of(type(written).from_pretrained(tmp_path / "target", config=config)), expected
        )
        < 1e-5
    )


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_it_slices_as_surgeon_does(family: str) -> None:
    model = tiny_model(family, 1)
    stock = family_of(model.config)
    weights = ModelWeights(ModuleStore(model), stock, stock.head_dim(model.config))
    row = family_entry(stock, model.config)
    packed = {path: shares for path, shares in row.packed.items() if path not in row.turns}

    def kept(kind: str, path: str, index: int) -> Tensor:
        """The indices of a slice's features in its module."""
        roles = [
            projection.role for projection in stock.spec(kind).projections if projection.path == path
        ]
        found: Any = [weights.matrix(Sublayer(kind, (0,), (index, 2)), role) for role in roles]
        return torch.cat([matrix.features for matrix in found]).sort().values

    for kind, path in {
        (one, projection.path) for one in KINDS for projection in stock.spec(one).projections
    }:
        slices = [kept(kind, path, index) for index in (0, 1)]
        whole = torch.cat(slices).sort().values
        assert torch.equal(whole, torch.arange(len(whole)))
        for index in (0, 1):
            assert torch.equal(
                shipped.part(whole, (index, 2), tuple(packed.get(path, (1,)))), slices[index]
            ), path


def test_a_layer_is_whole_again_after_a_slice_that_failed() -> None:
    running = model_running(tiny_model("phi3", 3), TRACKS)
    attention: Any = layers_of(running)[0].self_attn
    before = dict(attention.named_modules())

    def fail(*_: Any) -> None:
        assert attention.num_key_value_heads == 1
        raise RuntimeError("no")

    hook = attention.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        logits_of(running)
    hook.remove()
    assert dict(attention.named_modules()) == before
    assert (attention.num_key_value_heads, running.config.num_attention_heads) == (2, 4)


@pytest.mark.parametrize("family", ["opt", "phi3", "gpt2"])
def test_lora_on_slices(family: str) -> None:
    model = tiny_model(family, 3)
    row = family_entry(FAMILIES[family], model.config)
    names = {path.rpartition(".")[2] for path in row.reads + row.writes}
    options = LoraConfig(
        target_modules=sorted(names), r=2, init_lora_weights=False, lora_bias=family != "phi3"
    )
    torch.manual_seed(0)
    lora = get_peft_model(model_running(model, TRACKS), options)
    adapted = logits_of(lora)
    assert relative_error(adapted, plain_logits(model, TRACKS)) > 1e-2
    lora(input_ids=IDS, labels=IDS).loss.backward()
    assert all(
        p.grad is not None and p.grad.abs().max() > 0 for p in lora.parameters() if p.requires_grad
    )
    merged = lora.merge_and_unload()
    model.load_state_dict(merged.state_dict())
    assert relative_error(adapted, plain_logits(model, TRACKS)) < 1e-5
    assert relative_error(logits_of(merged), plain_logits(model, TRACKS)) < 1e-5


def test_lora_on_factors_of_experts() -> None:
    """Adapters wrap the maps of experts, which have to be called for that."""
    model = tiny_model("mixtral", 2)
    entry = family_entry(family_of(model.config), model.config)._asdict()
    own = {"surgeon_program": "A0 F0@gate4,down6 A1 F1", "surgeon_family": entry}
    model_class = PROGRAM.shipped.model_class("mixtral")
    running = model_class(model_class.config_class.from_dict(model.config.to_dict() | own)).eval()
    torch.manual_seed(0)
    for parameter in running.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape)
    before = logits_of(running)
    names = [f"experts.{name}.weight" for name in ("gate.first", "gate.second", "down.second")]
    lora = get_peft_model(running, LoraConfig(r=2, target_parameters=names, init_lora_weights=False))
    adapted = logits_of(lora.eval())
    assert relative_error(adapted, before) > 1e-4
    assert relative_error(logits_of(lora.merge_and_unload()), adapted) < 1e-5


@pytest.mark.parametrize("program", ["A0 F0@gate4,down6", "A0 F0!e0,e2", "A0 F0!e0@up4", "A0#1 F0"])
def test_a_model_made_of_its_configuration_has_numbers(program: str) -> None:
    """Memory that nothing was written to holds what was there before."""
    model = tiny_model("qwen3_moe", 1)
    entry = family_entry(family_of(model.config), model.config)._asdict()
    own = {"surgeon_program": program, "surgeon_family": entry}
    config = type(model.config).from_dict(model.config.to_dict() | own)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        made = PROGRAM.shipped.model_class("qwen3_moe")(config)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(parameter.isfinite().all() for parameter in made.parameters())
    assert all(
        parameter.abs().max() > 0 for name, parameter in made.named_parameters() if "bias" not in name
    )
    assert logits_of(made.eval()).isfinite().all()


def gradients(model: Any, **inputs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, **inputs).loss.backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("family", ["llama", "gpt_neo", "gpt_neox"])
def test_gradients_with_and_without_checkpointing(family: str) -> None:
    model = tiny_model(family, 3, dropout=0.0)
    expected = gradients(surgeon.edit(copy.deepcopy(model), PROGRAMS[1]))
    running = model_running(model, PROGRAMS[1]).train()
    for _ in range(2):
        found = gradients(running)
        assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
        running.gradient_checkpointing_enable()


def test_what_only_layers_could_give_is_refused() -> None:
    running = model_running(tiny_model("gpt_neo", 2), ">A0 F0 A1")
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"{name} is not supported"):
            running(input_ids=IDS, **{name: True})
    running = model_running(tiny_model("llama", 2), ">A0 F0 A1 A0")
    with pytest.raises(ValueError, match="output_hidden_states is not supported"):
        running.generate(IDS, return_dict_in_generate=True, output_hidden_states=True, **OPTIONS)
    running.set_attn_implementation("eager")
    assert [
        tuple(found.shape) for found in running(input_ids=IDS, output_attentions=True).attentions
    ] == [(2, 4, 9, 9)] * 3


def test_weights_on_the_disk(tmp_path: Path) -> None:
    model = tiny_model("llama", 3, attention_bias=True, mlp_bias=True)
    model_running(model, TRACKS).save_pretrained(tmp_path / "model")
    places: dict[str, Any] = {"max_memory": {"cpu": "70KB"}, "offload_folder": tmp_path / "offload"}
    offloaded: Any = PROGRAM.shipped.model_class("llama").from_pretrained(
        tmp_path / "model", device_map="auto", **places
    )
    assert layers_of(offloaded)[1].mlp.up_proj.weight.is_meta  # type: ignore[union-attr]
    assert relative_error(logits_of(offloaded), plain_logits(model, TRACKS)) < 1e-5


def test_stock_classes_stay_as_they_are() -> None:
    model = tiny_model("llama", 2)
    expected = logits_of(model)
    model_running(model, ">A0 F0")
    assert type(model) is LlamaForCausalLM
    assert torch.equal(logits_of(model), expected)


@pytest.mark.parametrize("declared", [None, "PreTrainedTokenizerFast"])
def test_the_tokenizer_opens_in_the_class_it_had(declared: str | None, tmp_path: Path) -> None:
    """GPT-2's own files name none: it follows from the model type, which the checkpoint's own does not tell."""
    # That class adds tokens which this tokenizer has not.
    source = save_checkpoint(tmp_path / "source", "gpt2", 2, vocab_size=310)
    path = source / "tokenizer_config.json"
    path.write_text(
        json.dumps({"model_max_length": 64} | ({"tokenizer_class": declared} if declared else {}))
    )
    run_export(source, tmp_path / "target", ">A0 F0")
    original = AutoTokenizer.from_pretrained(source)
    copied = AutoTokenizer.from_pretrained(tmp_path / "target", trust_remote_code=False)
    assert type(copied) is type(original) is type(open_tokenizer(tmp_path / "target"))
    assert copied.special_tokens_map == original.special_tokens_map
    assert copied(TEXT).input_ids == original(TEXT).input_ids
    assert ((tmp_path / "target" / path.name).read_bytes() == path.read_bytes()) is (
        declared is not None
    )
