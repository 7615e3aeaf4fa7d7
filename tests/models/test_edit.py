"""Edited models in the `transformers` world: reversal, gradients, checkpointing, peft, offloading, hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import surgeon
from surgeon.language.program import Program
from surgeon.models.edit import edit, program_of, restore
from tests.tiny_models import tiny_model

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
MIXED = "A0 F0 >[A1 A2] >[F1 F2] {A3 F3 | A4 F4} A5~A4 F5"


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", num_layers=6, dropout=0.0)


def logits(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits
    return found


def test_restore_gives_the_original_back(model: PreTrainedModel) -> None:
    before, names = logits(model), list(model.state_dict())
    layers = model.model.layers
    edit(model, MIXED)
    edit(model, "A5 F5")  # an edit of an edited model starts from the original
    assert model.config.num_hidden_layers == 1
    assert restore(model) is model
    assert model.model.layers is layers
    assert model.config.num_hidden_layers == 6
    assert list(model.state_dict()) == names
    assert torch.equal(logits(model), before)
    assert program_of(restore(model)) == Program.dense(6)


def test_parameters_keep_their_names(model: PreTrainedModel) -> None:
    names = set(model.state_dict())
    edit(model, "A1 F1 [A4 A2] F0")
    assert set(model.state_dict()) == names
    edit(model, "A1~A2 F0")
    assert {name for name in model.state_dict() if name not in names} == {
        f"model.layers.A1~A2.{path}.weight"
        for path in ("input_layernorm", *(f"self_attn.{role}_proj" for role in "qkvo"))
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A6 F6", "A6 is out of range: the model's layers are 0 to 5"),
        ("", "no steps"),
        ("A0/3:1", "do not divide into 3"),
    ],
)
def test_programs_that_do_not_fit_leave_the_model_alone(model: PreTrainedModel, text: str, said: str) -> None:
    before = logits(model)
    with pytest.raises(ValueError, match=said):
        edit(model, text)
    assert torch.equal(logits(model), before)
    assert model.config.num_hidden_layers == 6


def test_an_unsupported_architecture_says_which_are_supported() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=10))
    with pytest.raises(ValueError, match=r"'bloom' is not supported \(supported: GPT-2, .*Qwen3, .*\).*Adding a f"):
        edit(bloom, "A0 F0")


def test_norms_after_the_sublayer_are_refused() -> None:
    post_norm = tiny_model("opt", num_layers=1, do_layer_norm_before=False)
    with pytest.raises(ValueError, match="norms come after the sublayers"):
        edit(post_norm, "A0 F0")


def test_gradients_reach_every_layer_and_match_finite_differences(model: PreTrainedModel) -> None:
    edit(model.double(), MIXED)

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits(model)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())

    loss().backward()
    for k in (0, 1, 2, 3, 4):
        assert model.model.layers.layer(k).self_attn.q_proj.weight.grad.abs().max() > 0
    weight = model.model.layers.layer(2).mlp.down_proj.weight
    direction = torch.randn(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(0))
    step = 1e-3  # not smaller: the norms compute in float32
    losses = []
    with torch.no_grad():
        for sign in (1, -1):
            weight += sign * step * direction
            losses.append(loss().item())
            weight -= sign * step * direction
    assert (weight.grad * direction).sum().item() == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-3)


def test_gradient_checkpointing_gives_the_same_gradients(model: PreTrainedModel) -> None:
    edit(model, MIXED).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert model.model.layers.gradient_checkpointing
    assert gradients[0].keys() == gradients[1].keys()
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name])


@pytest.mark.parametrize("before", [True, False])
def test_checkpointing_recomputes_instead_of_keeping(model: PreTrainedModel, before: bool) -> None:
    if before:
        model.gradient_checkpointing_enable()
    edit(model, "A0 F0 [A1 A2] [F1 F2]").train()
    if not before:
        model.gradient_checkpointing_enable()
    calls = []
    model.model.layers.layer(1).self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert len(calls) == 2
    model.gradient_checkpointing_disable()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert len(calls) == 3
    assert not edit(model, "A0 F0").model.layers.gradient_checkpointing


def test_peft_lora_on_an_edited_model(model: PreTrainedModel) -> None:
    edit(model, "A0 F0 [A1 A2] [F1 F2] A3 F3")
    before = logits(model)
    lora = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    assert not torch.allclose(logits(lora), before)
    lora(input_ids=IDS, labels=IDS).loss.backward()
    trained = [name for name, p in lora.named_parameters() if p.grad is not None]
    assert sum("lora" in name for name in trained) == len(trained) == 2 * 4  # A and B in layers 0 to 3


def test_hidden_states_are_the_stream_after_each_node(model: PreTrainedModel) -> None:
    dense = model(input_ids=IDS, output_hidden_states=True).hidden_states
    edited = edit(model, Program.dense(6))(input_ids=IDS, output_hidden_states=True).hidden_states
    assert len(edited) == 13
    for layer in range(6):
        torch.testing.assert_close(edited[2 * layer], dense[layer])
    torch.testing.assert_close(edited[-1], dense[-1])


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloading_by_accelerate(model: PreTrainedModel, tmp_path: Path, place: str) -> None:
    with torch.no_grad():
        expected = logits(edit(model, MIXED))
    restore(model).save_pretrained(tmp_path / "model")
    devices = {f"model.layers.{k}": place if k in (1, 3, 5) else "cpu" for k in range(6)}
    devices |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=devices, offload_folder=tmp_path / "offload", dtype=torch.float32
    )
    if place == "disk":
        assert offloaded.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    edit(offloaded, MIXED)
    with torch.no_grad():
        assert torch.equal(logits(offloaded), expected)
        tokens = offloaded.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False)
    assert tokens.shape == (2, 13)


def test_device_map_auto(model: PreTrainedModel, tmp_path: Path) -> None:
    expected = logits(edit(model, MIXED))
    restore(model).save_pretrained(tmp_path)
    auto = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        device_map="auto",
        max_memory={"cpu": "120KB"},
        offload_folder=tmp_path / "offload",
        dtype=torch.float32,
    )
    assert "disk" in auto.hf_device_map.values()
    with torch.no_grad():
        torch.testing.assert_close(logits(edit(auto, MIXED)), expected)


def test_a_repeated_attention_has_a_cache_slot_each(model: PreTrainedModel) -> None:
    edit(model, "A2 F2 A2 F2 A2 F2 " * 4)
    out = model(input_ids=IDS, use_cache=True)
    assert len(out.past_key_values.layers) == 12
    assert {layer.get_seq_length() for layer in out.past_key_values.layers} == {9}


def test_saving_an_edited_model_keeps_its_program(model: PreTrainedModel, tmp_path: Path) -> None:
    edit(model, "A0 F0 [A1 A2] [F1 F2] >A3 >F3")
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(model), expected)  # saving changes nothing
    loaded = surgeon.load(tmp_path)
    assert program_of(loaded) == program_of(model)
    assert torch.equal(logits(loaded), expected)
    with pytest.raises(ValueError, match="trust_remote_code=True"):  # it would run the unedited layers
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    assert "save_pretrained" not in vars(restore(model))


def test_per_layer_attention_types_follow_their_layers() -> None:
    types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    model = tiny_model(
        "qwen3", num_layers=4, layer_types=types, sliding_window=3, use_sliding_window=True, max_window_layers=0
    )
    long = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        order = [3, 2, 1]
        edit(model, " ".join(f"A{k} F{k}" for k in order))
        assert model.config.layer_types == [types[k] for k in order]
        got = model(input_ids=long).logits
        restore(model)
        stock = tiny_model("qwen3", num_layers=3, layer_types=[types[k] for k in order], sliding_window=3,
                           use_sliding_window=True, max_window_layers=0)  # fmt: skip
        state = model.state_dict()
        for place, k in enumerate(order):
            for name in [n for n in state if n.startswith(f"model.layers.{k}.")]:
                moved = name.replace(f"layers.{k}.", f"layers.{place}.")
                stock.state_dict()[moved].copy_(state[name])
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
            stock.state_dict()[name].copy_(state[name])
        assert torch.equal(stock(input_ids=long).logits, got)
