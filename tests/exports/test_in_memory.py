"""Edited, merged, sliced and trained models come back: saved, exported, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import surgeon
from surgeon.checkpoint.tensor_file import verify
from surgeon.errors import NotProven
from surgeon.exports.in_memory import edit
from surgeon.models.edit import program_of, restore
from surgeon.models.families import FAMILIES, Unsupported
from tests.checkpoint.helpers import IDS, load_shipped, logits_of, plain_logits, relative_error
from tests.selection import one_in
from tests.tiny_models import DENSE_FAMILIES, save_checkpoint, tiny_model, tiny_tokenizer

MERGED = "A0 F0 A1~A2 F1~F2 A3 F3"
PAIRED = "A0 F0 [A1 A2] [F1 F2] A3 F3"
SLICED = "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A1~A2/2:1 F3@up9 >A1"
FACTORED = "A0@q5,o6 F0@gate9 [A1~A2@k3 A3 A3@v2] F3@up9,down9"
FORMS = {
    MERGED: "plain",
    PAIRED: "fused",
    SLICED: "program",
    FACTORED: "program",
    "A3 F3 A0 F0": "plain",
    "A0 >F0 >A1~A3": "program",
}


def trained(family: str, program: str, num_layers: int = 4) -> Any:
    """An edited model whose every matrix was changed after the edit, a derived sublayer's own ones too."""
    model = edit(tiny_model(family, num_layers, dropout=0.0), program)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    return model


def loaded_by_others(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    ).eval()


@pytest.mark.sampled
@pytest.mark.parametrize("program", FORMS)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_what_a_model_is_now_is_exported(family: str, program: str, tmp_path: Path) -> None:
    model = trained(family, program)
    expected, before = logits_of(model), {name: p.clone() for name, p in model.named_parameters()}
    proof = surgeon.export(model, tmp_path / "target", tokenizer=tiny_tokenizer()).proof
    assert proof.exact < 1e-5
    report = json.loads((tmp_path / "target" / "surgeon.json").read_text())
    assert (report["form"], report["source"]["model"]) == (FORMS[program], "a model in memory")
    # With the tokenizer's files.
    assert verify(tmp_path / "target", tmp_path / "target" / "surgeon.json") > 3
    assert relative_error(logits_of(surgeon.load(tmp_path / "target")), expected) < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    if FORMS[program] == "program":
        with pytest.raises(
            Unsupported, match="opened by the code in a checkpoint of surgeon's; open the folder"
        ):
            surgeon.export(loaded_by_others(tmp_path / "target"), tmp_path / "again")
    # The model in memory is as it was, and can still be restored.
    assert str(program_of(model)) == program
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.equal(logits_of(model), expected)
    assert restore(model).config.num_hidden_layers == 4


def test_an_unedited_model_is_exported_too(tmp_path: Path) -> None:
    model = surgeon.load(save_checkpoint(tmp_path / "source"))
    with torch.no_grad():
        model.lm_head.weight *= 1.5
    surgeon.export(model, tmp_path / "target", dtype="bfloat16")
    assert (tmp_path / "target" / "tokenizer.json").exists()  # as it lay beside the weights
    assert relative_error(logits_of(surgeon.load(tmp_path / "target")), logits_of(model)) < 2e-2


@pytest.mark.parametrize("family", one_in(8, DENSE_FAMILIES, 0))
def test_saved_models_load_everywhere(family: str, tmp_path: Path) -> None:
    program = (
        "A0@v4,o7 F0 >A1~A2 >F1~F2@down5"
        if FAMILIES[family].mlp.norms_output
        else f"{SLICED} A2@v4,o7 F2@down5"
    )
    model = trained(family, program)
    expected = logits_of(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(model), expected)
    assert torch.equal(logits_of(surgeon.load(tmp_path)), expected)
    found = logits_of(loaded_by_others(tmp_path))
    assert torch.equal(found, expected) or (
        family == "falcon" and relative_error(found, expected) < 1e-6
    )
    # A trainer that goes on puts the saved tensors into a model that was edited anew.
    again = edit(tiny_model(family, 4, dropout=0.0), program)
    held = again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not held.unexpected_keys
    assert set(held.missing_keys) <= {"lm_head.weight"}  # where it is tied
    assert torch.equal(logits_of(again), expected)


def test_slices_have_the_sinks_of_their_heads(tmp_path: Path) -> None:
    model = edit(tiny_model("gpt_oss", 2), "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A1 F1")
    surgeon.export(model, tmp_path / "target")
    assert relative_error(logits_of(surgeon.load(tmp_path / "target")), logits_of(model)) < 1e-5


def test_a_fused_model_is_saved_with_its_file_and_not_exported_again(tmp_path: Path) -> None:
    surgeon.export(edit(tiny_model("llama"), PAIRED), tmp_path / "fused")
    model = surgeon.load(tmp_path / "fused")
    with pytest.raises(
        ValueError, match=r"fused form, which is not edited again; model.save_pretrained\(folder\)"
    ):
        surgeon.export(model, tmp_path / "again")
    model.save_pretrained(tmp_path / "saved")
    for load in (surgeon.load, loaded_by_others):
        assert torch.equal(logits_of(load(tmp_path / "saved")), logits_of(model))
    auto_maps = [
        json.loads((tmp_path / name / "config.json").read_text())["auto_map"]
        for name in ("fused", "saved")
    ]
    assert auto_maps[0] == auto_maps[1]  # with AutoModel, by which vLLM loads it


def test_a_state_dict_that_is_given_is_what_is_saved(tmp_path: Path) -> None:
    """As trainers that shard or average weights give it: of derived sublayers, too."""
    averaged, live = trained("llama", SLICED), edit(tiny_model("llama", 4, dropout=0.0), SLICED)
    live.save_pretrained(tmp_path, state_dict=averaged.state_dict())
    assert torch.equal(logits_of(loaded_by_others(tmp_path)), logits_of(averaged))


def test_what_is_saved_is_what_was_edited(tmp_path: Path) -> None:
    """Averages and slices against a plain computation, through a folder that others load."""
    model = tiny_model("qwen3", 4)
    expected = {program: plain_logits(model, program) for program in FORMS}
    for number, (program, logits) in enumerate(expected.items()):
        edit(model, program).save_pretrained(tmp_path / str(number))
        assert relative_error(logits_of(loaded_by_others(tmp_path / str(number))), logits) < 1e-5


TRACKS = "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A1 F1 A2/2:1@k5,o6 F2/4:1@down9 {F2/4:2@down9 | A2/2:0@k5,o6}"


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_trained_slices_are_exported(family: str, tmp_path: Path) -> None:
    """Optimiser steps move a norm that is on every slice and a bias that is on one, and what is stored is one layer."""
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    model = edit(tiny_model(family, 3, dropout=0.0, **biases), TRACKS).train()
    before = logits_of(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.1)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    expected = logits_of(model.eval())
    assert relative_error(before, expected) > 0.1
    surgeon.export(model, tmp_path / "target")
    assert relative_error(logits_of(load_shipped(tmp_path / "target")), expected) < 1e-5
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "saved", state_dict=state)
    assert relative_error(logits_of(loaded_by_others(tmp_path / "saved")), expected) < 1e-6
    again = edit(tiny_model(family, 3, dropout=0.0, **biases), TRACKS)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert not again.load_state_dict(stored, strict=False).unexpected_keys
    assert torch.equal(logits_of(again), expected)
    again.load_state_dict(state)  # under the edited model's own names, all of them
    assert torch.equal(logits_of(again), expected)


def arguments_of(folder: Path, steps: int) -> TrainingArguments:
    return TrainingArguments(
        folder, max_steps=steps, save_steps=2, per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
        learning_rate=1e-2, use_cpu=True, dataloader_num_workers=0, lr_scheduler_type="constant", logging_steps=100,
    )  # fmt: skip


def test_a_trainer_goes_on_where_it_was(tmp_path: Path) -> None:
    data = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(4, 1)]
    whole = edit(tiny_model("llama", 3, dropout=0.0), "A0 F0 >A1~A2 >F1~F2")
    Trainer(whole, arguments_of(tmp_path / "whole", 4), train_dataset=data).train()
    first = edit(tiny_model("llama", 3, dropout=0.0), "A0 F0 >A1~A2 >F1~F2")
    Trainer(first, arguments_of(tmp_path / "parts", 2), train_dataset=data).train()
    checkpoint = tmp_path / "parts" / "checkpoint-2"
    assert relative_error(logits_of(loaded_by_others(checkpoint)), logits_of(first.eval())) < 1e-6
    then = edit(tiny_model("llama", 3, seed=9, dropout=0.0), "A0 F0 >A1~A2 >F1~F2")
    Trainer(then, arguments_of(tmp_path / "parts", 4), train_dataset=data).train(
        resume_from_checkpoint=str(checkpoint)
    )
    assert relative_error(logits_of(then.eval()), logits_of(whole.eval())) < 1e-5
    assert relative_error(logits_of(first), logits_of(whole)) > 1e-3


def test_adapters(tmp_path: Path) -> None:
    options = LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False)
    edit(tiny_model("llama", 3, dropout=0.0), "A0 F0 >[A1 A2] >[F1 F2]").save_pretrained(
        tmp_path / "base"
    )
    lora = get_peft_model(surgeon.load(tmp_path / "base"), options).eval()
    expected = logits_of(lora)
    lora.save_pretrained(tmp_path / "adapter")
    base = loaded_by_others(tmp_path / "base")
    assert (
        relative_error(logits_of(PeftModel.from_pretrained(base, tmp_path / "adapter").eval()), expected)
        < 1e-5
    )
    merged = lora.merge_and_unload()
    surgeon.export(merged, tmp_path / "merged")
    assert relative_error(logits_of(load_shipped(tmp_path / "merged")), expected) < 1e-5


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    model = edit(tiny_model("opt", 2), "[A0/2:0 A0/2:1] F0")
    layers = model.get_submodule("model.decoder.layers")
    layers.get_submodule("A0/2:1").self_attn_layer_norm.weight = nn.Parameter(torch.ones(32))
    with pytest.raises(ValueError, match="slices of A0 have norms of their own"):
        model.save_pretrained(target)
    with pytest.raises(ValueError, match="save it into a folder, and upload that"):
        edit(model, "A0 F0 A0").save_pretrained(target, push_to_hub=True)
    with pytest.raises(ValueError, match="unknown dtype 'float8'"):
        surgeon.export(model, target, dtype="float8")
    changed = tiny_model("llama", 2)
    changed.model.layers[1].mlp.register_forward_hook(lambda *args: args[2] * 2)
    with pytest.raises(
        NotProven, match="the model in memory does not compute what its weights and program say"
    ):
        surgeon.export(changed, target)
    lora = get_peft_model(
        edit(tiny_model("llama", 2), "A0 F0"), LoraConfig(target_modules=["q_proj"], r=2)
    )
    with pytest.raises(ValueError, match="merge adapters into the model first"):
        edit(lora.get_base_model(), "A0~A1 F0")
    assert not list(tmp_path.iterdir())


def test_modes_survive(tmp_path: Path) -> None:
    model = edit(tiny_model("opt", 2), ">A0 >F0 A1").train()
    frozen: nn.Module = model.get_submodule("lm_head")
    frozen.eval()
    surgeon.export(model, tmp_path / "target")
    assert model.training
    assert not frozen.training
