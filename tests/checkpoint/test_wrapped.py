"""Text decoders inside their wrappers: edited there, with everything around them carried on as it was."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, PreTrainedModel

import surgeon
from surgeon.checkpoint.imported import WRAPPERS
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import edit
from surgeon.models.families import FAMILIES
from surgeon.opened import load, load_streamed
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from tests.checkpoint.helpers import open_random
from tests.runtime.on_ranks import chunked_logits, logits_in_chunks
from tests.selection import case
from tests.tiny_models import tiny_tokenizer
from tests.tiny_wrappers import IMAGE, WRAPPED, save_wrapper, tiny_wrapper

TEXT = torch.randint(9, 97, (2, 20), generator=torch.Generator().manual_seed(0))
PRUNED = "A0 F0 A2 F2 A3 F3"
SUPPORTED = [name for name in WRAPPED if WRAPPERS[name].decoder_type in FAMILIES or name == "qwen3_vl"]
all_wrappers = pytest.mark.parametrize(
    "model_type",
    [case(name, default=name != "qwen3_5") for name in SUPPORTED],  # which computes slowly
)
one_wrapper = pytest.mark.parametrize(
    "model_type", [case(name, default=name == "mistral3") for name in SUPPORTED]
)
by_hand = pytest.mark.parametrize(
    ("model_type", "inside"),
    [
        case(name, inside, default=(name, inside) in (("mistral3", False), ("qwen3_vl", True)))
        for name in SUPPORTED
        for inside in (False, True)[: len(WRAPPERS[name].names)]
    ],
)


@pytest.fixture
def saved(model_type: str, tmp_path: Path) -> tuple[PreTrainedModel, dict[str, Any], Path]:
    model, inputs = tiny_wrapper(model_type)
    return model, inputs, save_wrapper(model, tmp_path / "wrapper")


def decoder_of(model: PreTrainedModel) -> Any:
    """The text decoder inside."""
    return model.get_submodule(WRAPPERS[model.config.model_type].decoder)


def up_of(layer: Any) -> Any:
    """Its MLP's projection; layer 2 of Llama 4's is dense."""
    return layer.get_submodule("feed_forward" if hasattr(layer, "feed_forward") else "mlp").up_proj


def pruned_by_hand(model: PreTrainedModel) -> Any:
    """The same model of `transformers` without layer 1 of its text decoder."""
    changed: Any = copy.deepcopy(model)
    layers = decoder_of(changed).layers
    del layers[1]
    for index, layer in enumerate(layers):
        (layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn).layer_idx = index
    config = changed.config.text_config
    config.num_hidden_layers = 3
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in (0, 2, 3)]
    return changed


def renamed_as_inside(folder: Path) -> None:
    """Name the tensors as they are called in the class of `transformers`, which some checkpoints do."""
    names = [("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head.")]
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = next((new + name.removeprefix(old) for old, new in names if name.startswith(old)), None)
        around = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
        tensors[own or around] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def logits(model: Any, **inputs: Any) -> torch.Tensor:
    found: torch.Tensor = model(**inputs).logits
    return found


@all_wrappers
def test_the_text_decoder_computes_what_the_whole_does_of_a_text(model_type: str, saved: Any) -> None:
    whole, _, folder = saved
    expected = logits(whole, input_ids=TEXT)
    model = surgeon.open(folder)
    assert model.family.model_type != model_type
    assert f"inside {model.wrapped.wrapper.name}" in repr(model)
    assert model.num_layers == 4
    assert all("vision" not in name and "visual" not in name for name in model.checkpoint.names())
    torch.testing.assert_close(logits(load(model), input_ids=TEXT), expected)
    streamed: Any = load_streamed(folder)
    assert torch.equal(streamed.lm_head.weight, whole.get_submodule(WRAPPERS[model_type].head).weight)
    place = "feed_forward" if model_type == "llama4" else "mlp"
    up = streamed.model.layers.weights(8).stored_part(Sublayer("F", (2,)), f"{place}.up_proj.weight")
    assert torch.equal(up, up_of(decoder_of(whole).layers[2]).weight)
    if len(WRAPPERS[model_type].names) > 1:
        renamed_as_inside(folder)
        torch.testing.assert_close(logits(load(folder), input_ids=TEXT), expected)
    by_config = surgeon.open(folder / "config.json", weights=False)
    assert replace(by_config.shapes, name="") == replace(model.shapes, name="")
    assert open_random(folder / "config.json").parameters == model.parameters


@by_hand
def test_a_plain_export_is_the_wrapper_edited_by_hand(saved: Any, inside: bool, tmp_path: Path) -> None:
    whole, inputs, folder = saved
    if inside:
        renamed_as_inside(folder)
    exported = surgeon.export(folder, tmp_path / "out", program=PRUNED)
    assert exported.form == "plain"
    assert exported.proof.exact == 0
    written = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    assert type(written) is type(whole)
    assert torch.equal(logits(written, **inputs), logits(pruned_by_hand(whole), **inputs))
    assert not torch.allclose(logits(written, **inputs), logits(whole, **inputs), atol=0.1)


@one_wrapper
def test_what_is_around_it_is_carried_on_byte_for_byte(saved: Any, tmp_path: Path) -> None:
    _, _, folder = saved
    surgeon.export(folder, tmp_path / "out", program=PRUNED)
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    before, after = (json.loads((one / "config.json").read_text()) for one in (folder, tmp_path / "out"))
    text = [one.pop("text_config") for one in (before, after)]
    assert before == after
    changed = {key for key in text[0] | text[1] if text[0].get(key) != text[1].get(key)}
    assert changed <= {"num_hidden_layers", "layer_types", "no_rope_layers", "moe_layers"}
    around = surgeon.open(folder).wrapped.around
    assert around
    with (
        safe_open(folder / "model.safetensors", "pt") as one,
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as two,
    ):
        assert [name for name in two.keys() if name in around] == around  # noqa: SIM118
        assert all(torch.equal(one.get_tensor(name), two.get_tensor(name)) for name in around)


@one_wrapper
def test_what_is_trained_goes_back_into_its_wrapper(saved: Any, tmp_path: Path) -> None:
    whole, inputs, folder = saved
    model, twin = edit(load(folder), PRUNED), pruned_by_hand(whole)
    with torch.no_grad():
        up_of(model.model.layers.get_submodule("2")).weight.mul_(2)
        up_of(decoder_of(twin).layers[1]).weight.mul_(2)
    surgeon.export(model, tmp_path / "out")
    written = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(written, **inputs), logits(twin, **inputs))


@one_wrapper
def test_an_adapter_lies_on_the_decoder_inside(saved: Any, tmp_path: Path) -> None:
    _, inputs, folder = saved
    options = {"r": 2, "init_lora_weights": False, "target_modules": ["up_proj"]}
    model: Any = get_peft_model(edit(load(folder), PRUNED), LoraConfig(**options)).eval()
    surgeon.export(model, tmp_path / "out", adapter=True, tokenizer=tiny_tokenizer())
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "out" / "base")
    both = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    torch.testing.assert_close(logits(both, input_ids=TEXT), logits(model, input_ids=TEXT))
    assert not torch.allclose(
        logits(both, **inputs), logits(base, input_ids=inputs["input_ids"]), atol=0.1
    )


PAIRED, FACTORED = "A0 F0 [A2 A3] [F2 F3]", "A0@q4,o5 F0 A1 F1 A2 F2@down3 A3 F3"
INSIDE = {"mistral3": PAIRED, "qwen3_vl": FACTORED, "llama4": PAIRED}


@pytest.mark.parametrize(
    ("model_type", "program"),
    [
        case(name, one, default=INSIDE.get(name) == one)
        for name in SUPPORTED
        for one in (PAIRED, FACTORED)
    ],
)
def test_a_program_runs_inside(model_type: str, program: str, saved: Any, tmp_path: Path) -> None:
    """In the class that the modeling file makes of the wrapper's, with images, and as a decoder alone."""
    whole, inputs, folder = saved
    if model_type == "qwen3_vl" and program == PAIRED:
        with pytest.raises(
            ValueError, match="adds features of images behind its first 2 layers, and the program is"
        ):
            surgeon.export(folder, tmp_path / "out", program=program)
        return
    exported = surgeon.export(folder, tmp_path / "out", program=program, form="program")
    assert exported.proof.exact < 1e-5
    edited = edit(load(folder), program)
    expected = logits(with_program(whole, edited), **inputs, use_cache=False)
    assert not torch.allclose(expected, logits(whole, **inputs), atol=0.1)
    options = {"trust_remote_code": True, "dtype": torch.float32}
    written: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", **options).eval()
    assert isinstance(written, type(whole))
    torch.testing.assert_close(
        logits(written, **inputs, use_cache=False), expected, rtol=1e-4, atol=1e-4
    )
    greedy = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "suppress_tokens": [IMAGE]}
    tokens = written.generate(**inputs, **greedy)
    assert torch.equal(tokens, written.generate(**inputs, **greedy, use_cache=False))
    written.save_pretrained(tmp_path / "again")
    for place in (tmp_path / "out", tmp_path / "again"):
        again: Any = AutoModelForImageTextToText.from_pretrained(place, **options).eval()
        torch.testing.assert_close(
            logits(again, **inputs, use_cache=False), expected, rtol=1e-4, atol=1e-4
        )
    reopened = surgeon.open(tmp_path / "out")
    assert reopened.wrapped.wrapper.model_type == model_type
    assert str(reopened.program) == str(Program.parse(program).map_sublayers(numbered_anew(program)))
    torch.testing.assert_close(logits(load(reopened), input_ids=TEXT), logits(edited, input_ids=TEXT))
    assert torch.equal(reopened.wrapped.files.tensor(reopened.wrapped.around[0]), around_of(folder))
    if model_type == "qwen3_5":
        with pytest.raises(ValueError, match="multiplied by a gate, which no rank has"):
            make_plan(tmp_path / "out", 1, TEXT.shape[1])
        return
    engine = RankEngine(make_plan(tmp_path / "out", 1, TEXT.shape[1]), Alone(), torch.device("cpu"))
    with torch.inference_mode():
        on_a_rank = torch.cat(list(chunked_logits(engine, list(TEXT.split([13, 7], 1)))), 1)
    torch.testing.assert_close(on_a_rank, logits(edited, input_ids=TEXT), rtol=1e-4, atol=1e-4)


def with_program(whole: PreTrainedModel, edited: Any) -> Any:
    """The wrapper's own class with what runs of an edited decoder, or with the products of its factors."""
    found: Any = copy.deepcopy(whole)
    decoder, layers = decoder_of(found), edited.model.layers
    if not any(sublayer.ranks for sublayer in layers.program.sublayers()):
        decoder.layers, decoder.config = layers, edited.config
        return found
    for sublayer in layers.program.sublayers():
        for role, _ in sublayer.ranks:
            path = layers.family.spec(sublayer.kind, sublayer.layers[0]).projection(role).path
            inputs = torch.eye(decoder.layers[sublayer.layers[0]].get_submodule(path).in_features)
            # None has a bias.
            product = layers.owner(sublayer).get_submodule(path)(inputs).detach().T.contiguous()
            decoder.layers[sublayer.layers[0]].get_submodule(path).weight.data = product
    return found


def numbered_anew(program: str) -> Any:
    """Layers count from 0 among those that a program has."""
    there = sorted({layer for one in Program.parse(program).sublayers() for layer in one.layers})
    return lambda one: replace(one, layers=tuple(there.index(layer) for layer in one.layers))


def around_of(folder: Path) -> torch.Tensor:
    wrapped = surgeon.open(folder).wrapped
    found: torch.Tensor = wrapped.files.tensor(wrapped.around[0])
    return found


@one_wrapper
def test_a_program_inside_is_edited_again(saved: Any, tmp_path: Path) -> None:
    whole, inputs, folder = saved
    surgeon.export(folder, tmp_path / "out", program="A0 F0 A1 F1 A2 F2 A3 F3", form="program")
    assert surgeon.export(tmp_path / "out", tmp_path / "again", program=PRUNED).form == "program"
    written = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "again", trust_remote_code=True
    ).eval()
    assert torch.equal(logits(written, **inputs), logits(pruned_by_hand(whole), **inputs))


@all_wrappers
def test_a_form_with_a_class_of_its_own_is_refused(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="language model alone, not one inside a|Gemma3 norms what|of Llama 4 are mixtures|have neither linear",
    ):
        surgeon.export(saved[2], tmp_path / "out", program="A0 F0 [A1 A2] [F1 F2] A3 F3", form="fused")


@one_wrapper
def test_ranks_run_the_text_decoder(model_type: str, saved: Any) -> None:
    whole, _, folder = saved
    if model_type == "qwen3_5":
        with pytest.raises(ValueError, match="ranks do not run attentions of Qwen3.5"):
            make_plan(folder, 2, TEXT.shape[1], PRUNED)
        return
    with Ranks(RankOptions(2)) as ranks:
        answers = ranks.call(logits_in_chunks, make_plan(folder, 2, TEXT.shape[1], PRUNED), [TEXT])
    expected = logits(pruned_by_hand(whole), input_ids=TEXT)
    assert all(torch.allclose(found, expected, atol=1e-4) for found, _, _ in answers)


def test_a_wrapper_without_a_text_decoder_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mistral3", "text_config": []}')
    with pytest.raises(ValueError, match=r"as text_config, not \[\]"):
        surgeon.open(tmp_path, weights=False)
