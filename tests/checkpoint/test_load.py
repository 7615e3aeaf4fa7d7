"""`surgeon.load`: every form of checkpoint, dtypes, and what is said about damaged ones."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import surgeon
from surgeon.checkpoint.config import open_stored
from surgeon.language.program import Program
from surgeon.models.edit import program_of
from surgeon.opened import load, load_streamed
from surgeon.runtime.plan.checks import make_plan
from tests.checkpoint.helpers import logits_of, run_export, save_source
from tests.stored import configure, store, tensors_of, with_buffers
from tests.tiny_models import tiny_model

GLOBAL = {"allow_global_per_layer_attribute_access": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load") / "source"
    save_source(folder, num_layers=4)
    return folder


@pytest.fixture
def broken(source: Path, tmp_path: Path) -> Any:
    """A factory of copies with other entries in config.json."""

    def change(**entries: Any) -> Path:
        for path in source.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text()) | entries
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return change


def test_16_bit_weights_are_computed_in_float32_on_a_cpu(tmp_path: Path) -> None:
    save_source(tmp_path, dtype=torch.bfloat16)
    assert surgeon.load(tmp_path).dtype == torch.float32
    assert surgeon.load(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_the_program_of_a_program_checkpoint_is_run(source: Path, tmp_path: Path) -> None:
    run_export(source, tmp_path / "target", "A0 F0 >A2 >F2")
    model = surgeon.load(tmp_path / "target")
    assert str(program_of(model)) == "A0 F0 >A1 >F1"
    assert torch.equal(logits_of(model), logits_of(surgeon.edit(surgeon.load(source), "A0 F0 >A2 >F2")))


def test_checkpoints_whose_config_does_not_describe_the_family_load_as_before(
    source: Path, tmp_path: Path
) -> None:
    """Those of earlier versions: the modeling file inside them has a table of its own."""
    run_export(source, tmp_path / "target", "A0 F0 >A1 >F1")
    expected = logits_of(surgeon.load(tmp_path / "target"))
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    del config["surgeon_family"]
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(surgeon.load(tmp_path / "target")), expected)
    assert make_plan(tmp_path / "target", 1, 20).program == "A0 F0 >A1 >F1"


def test_a_fused_checkpoint_can_be_edited_further(source: Path, tmp_path: Path) -> None:
    run_export(source, tmp_path / "target", "A0 F0 [A1 A2] [F1 F2] A3 F3")
    model = surgeon.edit(surgeon.load(tmp_path / "target"), "A0 F0 >A1 >F1")
    expected = surgeon.edit(surgeon.load(source), "A0 F0 >[A1 A2] >[F1 F2]")
    torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=1e-4, atol=1e-5)
    whole = logits_of(surgeon.load(tmp_path / "target"))
    sliced = surgeon.edit(model, "A0 F0 [A1/2:1 A1/2:0] [F1/4:3 F1/4:0 F1/4:1 F1/4:2] A2 F2")
    torch.testing.assert_close(logits_of(sliced), whole, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="A0~A1 cannot be averaged: its layers differ in width"):
        surgeon.edit(model, "A0~A1 F0")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"model_type": "bloom"}, "'bloom' is not supported"),
        ({"model_type": None}, "config.json has no model_type"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"hidden_size": "wide"}, "config.json is not a valid configuration: .*hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, not 0"),
        ({"num_key_value_heads": -2}, "kv_heads must be at least 1, not -2"),
        ({"head_dim": -1}, "head_dim must be at least 1, not -1"),
        ({"hidden_act": "telepathy"}, "describes no model that can be built"),
        ({"layer_types": 3}, "config.json is not a valid configuration"),
        (
            {"vocab_size": 50},
            r"tensor lm_head.weight has the shape \(97, 32\), but config.json asks for \(50, 32\)",
        ),
        (
            {"num_hidden_layers": 6},
            "lacks a tensor of its model: model.layers.4.input_layernorm.weight and 17 more",
        ),
        (
            {"attention_bias": True},
            "lacks a tensor of its model: model.layers.0.self_attn.k_proj.bias and 15 more",
        ),
        (
            {"per_layer_config": {"1": {"num_attention_heads": 8}}},
            "only the fused form has .*, not llama",
        ),
        (
            {"model_type": "surgeon_fused", "per_layer_config": {}},
            "needs allow_global_per_layer_attribute_access: true",
        ),
        (
            {"model_type": "surgeon_fused", "layer_types": ["full_attention"]},
            "describes no model that can be built",
        ),
        ({"model_type": "surgeon_fused", "norm": "batch"}, "describes no model that can be built"),
        (
            GLOBAL
            | {"model_type": "surgeon_fused", "per_layer_config": {"1": {"num_key_value_heads": -2}}},
            "not -2",
        ),
        ({"surgeon_program": "A9 F9"}, "A9 is out of range"),
        (
            {"surgeon_program": "what?"},
            "config.json has a surgeon_program that is none: cannot read 'what",
        ),
        (
            {"surgeon_program": 5},
            "config.json has surgeon_program: 5, which is no program; write it as a text",
        ),
        ({"surgeon_program": None}, "config.json has surgeon_program: None, which is no program"),
        ({"surgeon_program": ["A0"]}, r"config.json has surgeon_program: \['A0'\], which is no program"),
        ({"surgeon_program": " "}, "config.json has surgeon_program: ' ', which is no program"),
        ({"surgeon_program": "{" * 5000}, "forks lie more than 50 deep in each other"),
    ],
)
def test_what_does_not_fit_is_said(broken: Any, entries: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        surgeon.load(broken(**entries))


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("gpt2", "n_layer", 10**9),
        ("gpt_neo", "num_layers", 10**9),
        ("gpt_neo", "attention_types", [[["global", "local"], 10**9]]),
    ],
)
def test_layers_beyond_number_are_never_made(family: str, name: str, value: Any, tmp_path: Path) -> None:
    save_source(tmp_path, family, num_layers=2)
    configure(tmp_path, **{name: value})
    with pytest.raises(ValueError, match=f"{name} has 1000000000, but there are .* tensors"):
        make_plan(tmp_path, 1, 20)


def test_the_dtype_to_compute_in_is_that_of_the_embedding(tmp_path: Path) -> None:
    tiny_model("gpt2", 2).to(torch.bfloat16).save_pretrained(tmp_path)
    with_buffers(configure(tmp_path, dtype="float16"))
    norms = {name: t.float() for name, t in tensors_of(tmp_path).items() if ".ln_1." in name}
    store(tmp_path, tensors_of(tmp_path) | norms)
    stored = open_stored(tmp_path)
    checkpoint = stored.checkpoint
    assert checkpoint.dtype(checkpoint.names()[0]) in (torch.float64, torch.int64)
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        assert stored.compute_dtype(torch.device(device)) == dtype
        numbers = sum(tensor.numel() for tensor in tensors_of(tmp_path).values())
        assert stored.bytes_on(torch.device(device)) == numbers * dtype.itemsize
        assert f"torch.{make_plan(tmp_path, 1, 16, device=device).dtype}" == str(dtype)
    for model in (surgeon.load(tmp_path), load_streamed(tmp_path)):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
def test_an_embedding_of_integers_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_model("llama", 2).save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    store(
        tmp_path, tensors | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"].to(dtype)}
    )
    with pytest.raises(
        ValueError, match=r"model.embed_tokens.weight holds int\d+, which stands for other numbers"
    ):
        surgeon.load(tmp_path)


@pytest.mark.parametrize(
    ("places", "dtype"),
    [
        (None, torch.float32),
        ("cpu", torch.float32),
        (torch.device("cpu"), torch.float32),
        ({"": "cpu"}, torch.float32),
        ({"model": "disk", "lm_head": "cpu"}, torch.float32),
        ("auto", torch.bfloat16),
        ("cuda:1", torch.bfloat16),
        (torch.device("cuda", 1), torch.bfloat16),
        ({"model": 0, "lm_head": "cpu"}, torch.bfloat16),
    ],
)
def test_the_dtype_is_that_of_where_it_computes(
    places: Any, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with GPUs, too, a map that names none of them computes on the CPU."""
    tiny_model("llama", 2).to(torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def taken(*_: Any, **options: Any) -> Any:
        raise Taken(options["dtype"])

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", taken)
    with pytest.raises(Taken) as raised:
        load(tmp_path, device_map=places)
    assert raised.value.args == (dtype,)


class Taken(Exception):
    """What transformers would have been asked for."""


def test_one_gpu_where_the_model_and_what_an_edit_derives_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", 2)
    model.save_pretrained(tmp_path)
    stored, own = open_stored(tmp_path), sum(parameter.nbytes for parameter in model.parameters())
    assert stored.bytes_on("cpu") == own
    matrices = {name: parameter.nbytes for name, parameter in model.model.layers[0].named_parameters()}
    attention = sum(size for name, size in matrices.items() if name.startswith("self_attn."))
    averaged = Program.parse("A0~A1 F0 A0~A1 F1")
    assert stored.bytes_on("cpu", averaged) == own + attention  # it occurs twice, and is there once
    factorised = Program.parse("A0 F0@up3,down5 A1 F1/2:0 F1/2:1")
    hidden, neurons = model.config.hidden_size, model.config.intermediate_size
    factors = 4 * ((3 + 5) * (hidden + neurons) + hidden * neurons)  # beside the gate as it is
    feed_forward = 4 * 3 * hidden * neurons
    assert stored.bytes_on("cpu", factorised) == own + factors + feed_forward
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (1.3 * own * number, 2 * own))
    assert stored.device_map() == torch.device("cuda", 1)
    assert stored.device_map(factorised) == "auto"


def test_what_transformers_warns_of_is_kept_back_from_surgeon_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("transformers.integrations.heterogeneity.configuration_utils")
    with caplog.at_level(logging.WARNING, logger.name):
        eval("warn('ours')", {"__name__": "surgeon.somewhere", "warn": logger.warning})
        assert caplog.messages == []
        logger.warning("the user's own")
    assert caplog.messages == ["the user's own"]
