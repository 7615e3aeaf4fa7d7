"""Edited models in the `transformers` world: reversal, gradients, checkpointing, peft, offloading, hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import surgeon
from surgeon.checkpoint.factor_cache import FactorCache
from surgeon.exports.in_memory import edit
from surgeon.language.operations import prune, repeat
from surgeon.language.program import Program
from surgeon.models.edit import decoder_layers, program_of, restore
from surgeon.models.families import family_of
from surgeon.models.weights import TruncatedSVD
from surgeon.quality.head import logits_of
from tests.pretended import pretended_gpus
from tests.tiny_models import tiny_model

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
DERIVED = (
    "A0 F0 A1~A2 F1~F2 A3 F3",
    "A0 F0 A1@q8,k4,v4,o8 F1@up12,down12 A2 F2@gate6 A3 F3",
    "A0 F0 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1} A2 F2",
    "A0 F0 {A1~A3/2:0 F1/2:0@up8 | A1~A3/2:1 F1/2:1@up8}",
    "A0#1 F0 [A1#1@q4 F1#20] A2 {F2#12/2:0 | F2#12/2:1}",
)
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
    with pytest.raises(
        ValueError, match="'x' is no model that is loaded; give what surgeon.load returns"
    ):
        restore("x")  # type: ignore[arg-type]
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
def test_programs_that_do_not_fit_leave_the_model_alone(
    model: PreTrainedModel, text: str, said: str
) -> None:
    before = logits(model)
    with pytest.raises(ValueError, match=said):
        edit(model, text)
    assert torch.equal(logits(model), before)
    assert model.config.num_hidden_layers == 6


def test_an_unsupported_architecture_says_which_are() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=10))
    with pytest.raises(
        ValueError, match=r"'bloom' is not supported \(supported: Cohere, .*, StarCoder2\).*Adding a f"
    ):
        edit(bloom, "A0 F0")


def test_norms_after_the_sublayer_are_refused() -> None:
    post_norm = tiny_model("opt", num_layers=1, do_layer_norm_before=False)
    with pytest.raises(ValueError, match="norms come after the sublayers"):
        edit(post_norm, "A0 F0")


def test_gradients_reach_every_layer_and_match_finite_differences(model: PreTrainedModel) -> None:
    edit(model.double(), MIXED)

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            logits(model)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()
        )

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
    assert (weight.grad * direction).sum().item() == pytest.approx(
        (losses[0] - losses[1]) / (2 * step), rel=1e-3
    )


def test_gradient_checkpointing_gives_the_same_gradients(model: PreTrainedModel) -> None:
    edit(model, MIXED).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
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
        tokens = offloaded.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False
        )
    assert tokens.shape == (2, 13)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
@pytest.mark.parametrize("program", DERIVED)
def test_derived_sublayers_of_a_model_offloaded_by_accelerate(program: str, family: str) -> None:
    """Their own weights, not the layer's that they were copied from; and none stay where the model computes."""
    offloaded = tiny_model(family, num_layers=4, dropout=0.0)
    expected = logits(edit(offloaded, program))
    restore(offloaded)
    cpu_offload(offloaded, torch.device("cpu"))
    held = sum(not parameter.is_meta for parameter in offloaded.parameters())
    edit(offloaded, program)
    with torch.no_grad():
        assert torch.equal(logits(offloaded), expected)
        assert torch.equal(logits(offloaded), expected)  # they have gone away again, and come again
    assert sum(not parameter.is_meta for parameter in offloaded.parameters()) == held == 0
    assert torch.equal(logits_of(offloaded)(IDS), expected)
    with torch.no_grad():
        restored = logits(restore(offloaded))
    assert torch.equal(restored, logits(tiny_model(family, num_layers=4, dropout=0.0)))


@pytest.mark.parametrize("program", DERIVED)
def test_derived_sublayers_of_a_model_on_disk(program: str, tmp_path: Path) -> None:
    source = tiny_model("llama", num_layers=4, dropout=0.0)
    expected = logits(edit(source, program))
    restore(source).save_pretrained(tmp_path / "model")
    places = {f"model.layers.{k}": "disk" for k in range(4)}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    options: Any = {"device_map": places, "offload_folder": tmp_path / "offload", "dtype": torch.float32}
    offloaded = edit(AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options), program)
    with torch.no_grad():
        assert torch.equal(logits(offloaded), expected)
    offloaded.save_pretrained(tmp_path / "edited")
    assert torch.equal(logits(surgeon.load(tmp_path / "edited")), expected)


@pytest.mark.parametrize("program", DERIVED)
def test_derived_sublayers_lie_where_their_layers_do(program: str, tmp_path: Path) -> None:
    """Factors that are read from files come to main memory first."""
    model = tiny_model("llama", num_layers=4)
    kept = FactorCache(TruncatedSVD(), tmp_path)
    edit(model, program, factors=kept)  # the files are there now
    edit(restore(model).to("meta"), program, factors=kept)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "places", [(0, 0, 0, 0), pytest.param((0, 0, 1, 1), marks=pytest.mark.thorough), (1, 0, 1, 0)]
)
@pytest.mark.parametrize("program", ["A0 F0 >[A1 A2] >[F1 F2] A3 F3", *DERIVED])
def test_layers_on_two_gpus(program: str, places: tuple[int, ...], tmp_path: Path) -> None:
    """Each sublayer computes where accelerate has put the (first) layer that it is of, factors of files, too."""
    kept = FactorCache(TruncatedSVD(), tmp_path)
    expected = logits(
        edit(tiny_model("llama", num_layers=4, dropout=0.0), program, factors=kept)
    ).detach()
    where = {f"model.layers.{layer}": f"cuda:{place}" for layer, place in enumerate(places)}
    where |= {
        "model.embed_tokens": "cuda:0",
        "model.rotary_emb": "cuda:0",
        "model.norm": "cuda:1",
        "lm_head": "cuda:1",
    }
    with pretended_gpus(2):
        model = tiny_model("llama", num_layers=4, dropout=0.0)
        dispatch_model(model, where, main_device="cuda:0")
        edit(model, program, factors=kept)
        found = model(input_ids=IDS.to("cuda:0"), use_cache=False).logits
        assert str(found.device) == "cuda:0"  # where the tokens came from
        torch.testing.assert_close(found.cpu(), expected)
        layers = decoder_layers(model)
        for sublayer in Program.parse(program).sublayers():
            inside = layers.owner(sublayer).parameters()
            assert {str(parameter.device) for parameter in inside} == {
                f"cuda:{places[sublayer.layers[0]]}"
            }


def test_layers_on_several_devices_are_averaged_where_the_first_one_is() -> None:
    model = tiny_model("llama", num_layers=4)
    model.model.layers[1].to("meta")
    edit(model, "A0 F0 A1~A2 F1~F2 A3 F3")
    derived = [parameter for name, parameter in model.named_parameters() if "~" in name]
    assert len(derived) == 9
    assert {parameter.device.type for parameter in derived} == {"meta"}


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


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_repeated_layer_gets_the_gradients_of_all_its_places(family: str) -> None:
    """As the stock model gives them to layers of their own that have the same weights."""
    untied = tiny_model(family, 5, dropout=0.0)
    layers, own = (
        untied.get_submodule(family_of(untied.config).layers),
        tiny_model(family, 4, dropout=0.0),
    )
    order = (0, 1, 2, 1, 2)
    own_layers = own.get_submodule(family_of(own.config).layers)
    untied.load_state_dict(
        {name: own.state_dict().get(name, value) for name, value in untied.state_dict().items()}
    )
    for place, layer in enumerate(order):
        layers[place].load_state_dict(own_layers[layer].state_dict())
    edit(own, repeat(prune(Program.dense(4), range(3, 4)), range(1, 3)))
    losses = [model.train()(input_ids=IDS, labels=IDS).loss for model in (untied, own)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for layer in (0, 1, 2):
        places = [
            dict(layers[place].named_parameters()) for place, one in enumerate(order) if one == layer
        ]
        for name, parameter in own_layers[layer].named_parameters():
            expected = sum(place[name].grad for place in places)
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)


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
        "qwen3",
        num_layers=4,
        layer_types=types,
        sliding_window=3,
        use_sliding_window=True,
        max_window_layers=0,
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
