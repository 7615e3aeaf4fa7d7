"""Exports of quantised checkpoints: what is copied stays as it is stored, and what is computed is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import surgeon
from surgeon.checkpoint.describe import describe
from surgeon.checkpoint.stored import Checkpoint
from surgeon.checkpoint.tensor_file import Writing
from surgeon.commands.show import facts
from surgeon.exports.in_memory import export_with_adapter
from surgeon.opened import load, open_edited
from tests.checkpoint.helpers import (
    load_shipped,
    logits_of,
    plain_logits,
    relative_error,
    run_export,
    save_source,
)
from tests.checkpoint.test_wrapped import pruned_by_hand
from tests.quantised import SCHEMES, mxfp4, quantise_folder
from tests.selection import case
from tests.tiny_wrappers import save_wrapper, tiny_wrapper

pytestmark = pytest.mark.filterwarnings("ignore:the weights of", "ignore:.*stored as")

SOME = [case(scheme, default=scheme in ("gptq", "int8")) for scheme in SCHEMES]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised model of each scheme, and a dense one of the same numbers."""
    folder = tmp_path_factory.mktemp("sources")
    save_source(folder / "original", num_layers=4)
    return folder


def source(sources: Path, scheme: str) -> Path:
    """The one of a scheme, which is made when it is first asked for."""
    if not (sources / scheme).exists():
        shutil.copytree(sources / "original", sources / scheme)
        quantise_folder(sources / scheme, scheme, sources / f"{scheme}, dense")
    return sources / scheme


def quantization_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


@pytest.mark.parametrize("scheme", SOME)
def test_plain_exports_are_copies(scheme: str, sources: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="all 14 matrices stored as .* stay so, bit for bit"):
        run_export(source(sources, scheme), tmp_path / "out", "A0 F0 A3 F3")
    written, stored = (
        load_file(one / "model.safetensors") for one in (tmp_path / "out", sources / scheme)
    )
    assert written.keys() == {name for name in stored if ".1." not in name and ".2." not in name} - {
        name for name in stored if ".3." in name
    } | {name.replace(".3.", ".1.") for name in stored if ".3." in name}
    for name, tensor in written.items():
        own = stored[name.replace("layers.1.", "layers.3.")]
        assert (tensor.dtype, tensor.shape) == (own.dtype, own.shape)
        assert torch.equal(tensor.view(torch.uint8), own.view(torch.uint8))
    assert quantization_of(tmp_path / "out") == SCHEMES[scheme][1]
    expected = plain_logits(load(sources / f"{scheme}, dense"), "A0 F0 A3 F3")
    assert relative_error(logits_of(load(tmp_path / "out")), expected) < 1e-5


@pytest.mark.parametrize(
    "scheme", [case(one, default=one == "fp8") for one in ("fp8", "gptq", "int8 rows")]
)
def test_averages_are_dequantised(scheme: str, sources: Path, tmp_path: Path) -> None:
    program = "A0 F0 A1~A2 F1~F2 A3 F3"
    with pytest.warns(
        UserWarning, match="7 matrices made of those stored as .* stored in float32; the other 14 stay"
    ):
        run_export(source(sources, scheme), tmp_path / "out", program)
    found = Checkpoint(tmp_path / "out")
    assert len(found.quantised) == 14
    assert not any(".1." in name for name in found.quantised)
    said = quantization_of(tmp_path / "out")
    if scheme == "fp8":
        assert set(said["modules_to_not_convert"]) == {
            "lm_head",
            *(n[:-7] for n in found.names() if ".1." in n and "proj" in n),
        }
    if scheme == "gptq":
        assert r"-:^model\.layers\.1\.mlp\.up_proj$" in said["dynamic"]
    expected = plain_logits(load(sources / f"{scheme}, dense"), program)
    assert relative_error(logits_of(load(tmp_path / "out")), expected) < 1e-5


@pytest.mark.parametrize("scheme", [case(one, default=one == "nf4") for one in ("fp8", "awq", "nf4")])
def test_programs_keep_what_they_do_not_touch(scheme: str, sources: Path, tmp_path: Path) -> None:
    program = "A0 F0@up8 >A1 >F1 A2#1 F3/2:1"
    run_export(source(sources, scheme), tmp_path / "out", program)
    found = Checkpoint(tmp_path / "out")
    assert "model.layers.0.mlp.up_proj.first.weight" in found
    assert "model.layers.0.mlp.gate_proj.weight" in found.quantised
    assert "model.layers.2.self_attn.q_proj.weight" not in found.quantised
    expected = plain_logits(load(sources / f"{scheme}, dense"), program)
    assert relative_error(logits_of(load(tmp_path / "out")), expected) < 1e-4


def test_the_proof_waits_for_what_says_the_shape(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are begun at once and proven while they are written, and bitsandbytes has shapes in tensors.

    Here nothing is written before the proof waits for it.
    """
    write, wait, waiting = Writing._write, Writing.wait, Event()

    def late(self: Writing, go_on: Callable[[], None]) -> None:
        waiting.wait(5)
        write(self, go_on)

    def noted(self: Writing, name: str) -> None:
        if current_thread() is main_thread():
            waiting.set()
        wait(self, name)

    monkeypatch.setattr(Writing, "_write", late)
    monkeypatch.setattr(Writing, "wait", noted)
    run_export(source(sources, "nf4"), tmp_path / "out", "A0 F0 A1 F1 A2 F2 A3 >F3")


def test_another_dtype_dequantises_everything(sources: Path, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="28 matrices .* are dequantised, and stored in bfloat16; none stays so"
    ):
        run_export(
            source(sources, "gptq"), tmp_path / "out", "A0 F0 A1 F1 A2 F2 A3 F3", dtype="bfloat16"
        )
    assert quantization_of(tmp_path / "out") is None
    written, numbers = (
        load_file(f / "model.safetensors") for f in (tmp_path / "out", sources / "gptq, dense")
    )
    for name, tensor in numbers.items():
        assert torch.equal(written[name], tensor.to(torch.bfloat16)), name


@pytest.mark.parametrize("scheme", SOME)
def test_layers_that_are_fused_side_by_side_are_dequantised(
    scheme: str, sources: Path, tmp_path: Path
) -> None:
    program = "A0 F0 [A1 A2] [F1 F2] A3 F3"
    run_export(source(sources, scheme), tmp_path / "out", program)
    found = Checkpoint(tmp_path / "out")
    assert len(found.quantised) == 14
    assert not any(".1." in name for name in found.quantised)
    expected = plain_logits(load(sources / f"{scheme}, dense"), program)
    assert relative_error(logits_of(load(tmp_path / "out")), expected) < 1e-5


def test_transformers_reads_what_is_written(sources: Path, tmp_path: Path) -> None:
    """By its own quantiser, which dequantises FP8 where there is no GPU."""
    for program, forms in (
        ("A0 F0 A3 F3", "plain"),
        ("A0 F0@up8 >A1 >F1", "program"),
        ("A0 F0 [A1 A2] [F1 F2]", "fused"),
    ):
        run_export(source(sources, "fp8"), tmp_path / forms, program)
        expected = plain_logits(load(sources / "fp8, dense"), program)
        if forms == "plain":
            model = AutoModelForCausalLM.from_pretrained(tmp_path / forms, dtype=torch.float32).eval()
        else:
            model = load_shipped(tmp_path / forms)
        assert relative_error(logits_of(model), expected) < 1e-4, forms


def test_names_of_layers_follow_them(sources: Path, tmp_path: Path) -> None:
    """In lists and keys, by any spelling; a layer that is left out, or lies in two, is named so often."""
    folder = tmp_path / "named"
    shutil.copytree(source(sources, "fp8"), folder)
    config = json.loads((folder / "config.json").read_text())
    names = [
        "lm_head",
        "model.layers.0.x",
        "re:.*layers\\.3\\..*",
        "model.layers.13.x",
        "layers.2",
        "my_layers.3.x",
    ]
    config["quantization_config"] |= {
        "modules_to_not_convert": names,
        "modules_to_convert": {"model.layers.3.y": [1]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    run_export(folder, tmp_path / "out", "A3 F3 A0 F0 A3 F3", form="plain")
    said = quantization_of(tmp_path / "out")
    assert said["modules_to_convert"] == {"model.layers.0.y": [1], "model.layers.2.y": [1]}
    assert said["modules_to_not_convert"] == [
        *("lm_head", "model.layers.1.x", "re:.*layers\\.0\\..*", "re:.*layers\\.2\\..*", "my_layers.3.x")
    ]


def test_modules_left_alone_by_another_name(sources: Path, tmp_path: Path) -> None:
    """MiniMax lists them as `ignored_layers`, which is read where `modules_to_not_convert` is not there."""
    folder = tmp_path / "named"
    shutil.copytree(source(sources, "fp8"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignored_layers"] = ["lm_head", "model.layers.3.x"]
    (folder / "config.json").write_text(json.dumps(config))
    run_export(folder, tmp_path / "out", "A0~A1 F0 A3 F3")
    said = quantization_of(tmp_path / "out")
    averages = [f"model.layers.0.self_attn.{role}_proj" for role in "qkvo"]
    assert "modules_to_not_convert" not in said
    assert said["ignored_layers"][:2] == ["lm_head", "model.layers.1.x"]
    assert sorted(said["ignored_layers"][2:]) == sorted(averages)


@pytest.mark.parametrize("packed", [True, case(False, default=False)])
def test_an_adapter_beside_a_quantised_base(packed: bool, sources: Path, tmp_path: Path) -> None:
    """What is trained over weights that stay frozen is an adapter for the quantised ones (QLoRA)."""
    edited = open_edited(source(sources, "gptq"), "A0 F0 >A3 >F3", tokenizer=False)
    adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = get_peft_model(edited.load("cpu", packed), adapter)
    expected = logits_of(model.eval())
    export_with_adapter(model, tmp_path / "out", base_of=edited)
    base, stored = Checkpoint(tmp_path / "out" / "base"), Checkpoint(sources / "gptq")
    assert len(base.quantised) == 14
    ours, theirs = (f"model.layers.{layer}.mlp.up_proj.qweight" for layer in (1, 3))
    assert torch.equal(base.raw.tensor(ours), stored.raw.tensor(theirs))
    together = PeftModel.from_pretrained(
        load(tmp_path / "out" / "base"), str(tmp_path / "out" / "adapter")
    )
    assert relative_error(logits_of(together.eval()), expected) < 1e-5


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_in_memory_is_dense(packed: bool, sources: Path, tmp_path: Path) -> None:
    model = surgeon.edit(load(source(sources, "nf4"), packed=packed), "A0 F0 A1~A2 F1~F2")
    expected = logits_of(model)
    surgeon.export(model, tmp_path / "out", dtype="bfloat16")
    assert quantization_of(tmp_path / "out") is None
    assert not Checkpoint(tmp_path / "out").quantised
    model.save_pretrained(tmp_path / "saved")
    assert relative_error(logits_of(load(tmp_path / "saved")), expected) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["mistral3", "qwen3_vl"])
def test_inside_a_wrapper(model_type: str, tmp_path: Path) -> None:
    """The stock class reads what is written by its own quantiser, images included."""
    model, inputs = tiny_wrapper(model_type)
    folder = quantise_folder(save_wrapper(model, tmp_path / "wrapper"), "fp8", tmp_path / "dense")
    assert len(surgeon.open(folder).checkpoint.quantised) == 28
    run_export(folder, tmp_path / "out", "A0 F0 A2 F2 A3 F3")
    dense = AutoModelForImageTextToText.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    written = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        found, expected = (one(**inputs).logits for one in (written, pruned_by_hand(dense)))
    torch.testing.assert_close(found, expected)
    run_export(folder, tmp_path / "merged", "A0 F0 A1~A2 F1~F2 A3 F3")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert relative_error(logits_of(merged), logits_of(load(tmp_path / "merged"))) < 1e-5


def test_show_says_it(sources: Path) -> None:
    described = facts(describe(source(sources, "gptq")))
    assert any("stored as GPTQ of 4 bits in groups of 16" in text for _, text in described)


@pytest.mark.thorough
def test_check_says_it(sources: Path) -> None:
    found = surgeon.check(source(sources, "gptq"))
    assert "GPTQ of 4 bits in groups of 16; dequantised" in found.record["facts"]["quantised"]
    folders = [sources / "gptq, dense", sources / "gptq"]
    dense, packed = (surgeon.check(one).of_area("train")["heal by adapters"].bytes for one in folders)
    assert dense is not None
    assert packed is not None
    assert dense - packed == surgeon.open(folders[0]).size - surgeon.open(folders[1]).size


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "kept"),
    [
        # Each expert's matrices are stored for themselves.
        ("A0 F0!e0,e3 A1 F1!e1,e2 A2 F2!e0,e1", 3 * (4 + 2 * 3)),
        ("A0 F0 >A1 >F1!e1,e2 A2 F2", 3 * 4),  # the modeling file inside has experts in stacks
    ],
)
def test_mixtures(program: str, kept: int, tmp_path: Path) -> None:
    save_source(tmp_path / "mixture", "qwen3_moe", 3, mlp_only_layers=[])
    folder = quantise_folder(tmp_path / "mixture", "fp8", tmp_path / "dense")
    run_export(folder, tmp_path / "out", program)
    found = surgeon.open(tmp_path / "out")
    assert len(found.checkpoint.quantised) == kept
    is_plain = found.form.name == "plain"
    left_alone = (
        [] if is_plain else ["lm_head", *(f"model.layers.{layer}.mlp.experts" for layer in range(3))]
    )
    assert quantization_of(tmp_path / "out").get("modules_to_not_convert", []) == left_alone
    expected = logits_of(surgeon.edit(load(tmp_path / "dense"), program))
    stock: Any = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32) if is_plain else None
    )
    for model in (load(tmp_path / "out"), stock or load_shipped(tmp_path / "out")):
        assert relative_error(logits_of(model.eval()), expected) < 1e-5


@pytest.mark.parametrize(
    ("program", "form"), [("A0 F0!e0,e2 A1 F1!e2,e3", "plain"), ("A0 F0!e0,e2 >A1 >F1", "program")]
)
def test_experts_left_out_of_stacks(program: str, form: str, tmp_path: Path) -> None:
    """gpt-oss stores experts stacked: those that stay are the same blocks, bit for bit, in both forms."""
    folder = tmp_path / "mixture"
    save_source(folder, "gpt_oss", 2, hidden_size=64, intermediate_size=64, num_local_experts=4)
    tensors = load_file(folder / "model.safetensors")
    dense = dict(tensors)
    for name in [name for name in tensors if "experts" in name and not name.endswith("bias")]:
        stored, dense[name] = mxfp4(tensors.pop(name).float())
        tensors |= {f"{name}{ending}": tensor for ending, tensor in stored.items()}
    shutil.copytree(folder, tmp_path / "dense")
    save_file(dense, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "mxfp4"}
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="all 4 matrices stored as MXFP4 stay so, bit for bit"):
        run_export(folder, tmp_path / "out", program, form=form)
    written = load_file(tmp_path / "out" / "model.safetensors")
    kept = {0: [0, 2], 1: [2, 3] if form == "plain" else [0, 1, 2, 3]}
    for layer, experts in kept.items():
        for role in ("gate_up_proj", "down_proj"):
            for ending in ("_blocks", "_scales"):
                name = f"model.layers.{layer}.mlp.experts.{role}{ending}"
                assert torch.equal(written[name], tensors[name][experts]), name
    expected = logits_of(surgeon.edit(load(tmp_path / "dense"), program))
    assert relative_error(logits_of(load(tmp_path / "out")), expected) < 1e-5
