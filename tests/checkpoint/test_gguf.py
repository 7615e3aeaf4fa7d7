"""GGUF files as sources: the same numbers as the model that was written, and as the package dequantises."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.checkpoint.gguf import SWITCH, convert_gguf
from surgeon.checkpoint.stored import Checkpoint
from tests.gguf_files import llama3_factors, logits, write_gguf
from tests.tiny_models import TEXT, tiny_model, tiny_tokenizer

WORDS = TEXT.partition(":")[0]  # without digits, which Qwen2's own tokenizer takes apart
# What a GGUF file can say of each architecture; the rest is as transformers has it by default.
GEMMA = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "layer_types": None, "sliding_window": None},
    "qwen3": {},
    "qwen2_moe": {
        "use_sliding_window": False,
        "layer_types": None,
        "sliding_window": None,
        "mlp_only_layers": [],
    },
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "gemma2": GEMMA,
    "gemma3_text": {
        **(GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        "sliding_window_pattern": 6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "phi3": {},
    "starcoder2": {"sliding_window": None},
    "gpt2": {},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(SWITCH, "float32")


def tiny(family: str = "llama", **overrides: Any) -> Any:
    tokenizer = tiny_tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32} | ids
    return tiny_model(family, 2, dropout=0.0, **(sizes | PLAIN[family] | overrides))


@pytest.mark.parametrize("family", PLAIN)
def test_logits_are_those_of_the_model_that_was_written(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    path = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer())
    opened = surgeon.open(path)
    loaded = surgeon.load(opened)
    ids = opened.tokenizer(WORDS, return_tensors="pt").input_ids
    assert ids.tolist() == tiny_tokenizer()(WORDS, return_tensors="pt").input_ids.tolist()
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "Q4_K", "Q6_K", "IQ4_XS"]
)
def test_weights_are_dequantised_bit_for_bit(kind: str, tmp_path: Path) -> None:
    model = tiny(hidden_size=256, num_attention_heads=4, intermediate_size=256)
    path = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), Kind[kind])
    stored = Checkpoint(convert_gguf(path))
    names = {
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
    }
    found = {one.name: one for one in GGUFReader(path).tensors}
    for name, own in names.items():
        assert found[name].tensor_type == Kind[kind]
        expected = torch.from_numpy(gguf.dequantize(found[name].data, found[name].tensor_type))
        assert torch.equal(stored.tensor(own).view(torch.int32), expected.view(torch.int32))


def test_bfloat16_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    path = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer())
    monkeypatch.delenv(SWITCH)
    opened = surgeon.open(path)
    assert opened.dtype == torch.bfloat16
    stored = opened.checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(stored, model.model.layers[0].mlp.up_proj.weight.bfloat16())
    monkeypatch.setenv(SWITCH, "float16")
    with pytest.raises(ValueError, match="SURGEON_GGUF_DTYPE=float16 in the environment: .*bfloat16"):
        surgeon.open(path)


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    model = tiny(hidden_size=64, num_attention_heads=4, intermediate_size=64)
    path = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), Kind.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ids = torch.arange(2, 40).unsqueeze(0)
    torch.testing.assert_close(
        logits(surgeon.load(path), ids), logits(theirs, ids), rtol=1e-5, atol=1e-5
    )


def test_a_file_is_converted_once(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), tiny_tokenizer())
    folder = convert_gguf(path)
    before = {one: one.stat().st_mtime_ns for one in folder.iterdir()}
    copied = tmp_path / "copy.gguf"
    copied.write_bytes(path.read_bytes())
    assert convert_gguf(path) == convert_gguf(copied) == folder
    assert {one: one.stat().st_mtime_ns for one in folder.iterdir()} == before
    facts = path.stat()
    write_gguf(path, tiny(seed=1), tiny_tokenizer())
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert convert_gguf(path) != folder


def test_split_files_are_one_model(tmp_path: Path) -> None:
    model = tiny()
    first = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), parts=3)
    assert first.name == "tiny-00001-of-00003.gguf"
    second = first.with_name("tiny-00002-of-00003.gguf")
    ids = torch.arange(2, 40).unsqueeze(0)
    torch.testing.assert_close(
        logits(surgeon.load(second), ids), logits(model, ids), rtol=1e-4, atol=1e-4
    )
    second.unlink()
    with pytest.raises(
        FileNotFoundError, match="tiny-00002-of-00003.gguf is missing: .* is one of 3 parts"
    ):
        surgeon.open(first)


def test_llama_3_divides_its_frequencies(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    model = tiny(rope_parameters=rope, hidden_size=64)
    factors = llama3_factors(16, 10000.0, 8.0, 16)
    scaled = {"rope__scaling__original_context_length": 16}
    path = write_gguf(
        tmp_path / "tiny.gguf", model, tiny_tokenizer(), more={"rope_freqs.weight": factors}, **scaled
    )
    ids = torch.arange(2, 42).unsqueeze(0)
    torch.testing.assert_close(logits(surgeon.load(path), ids), logits(model, ids), rtol=1e-4, atol=1e-4)
    factors[1] *= 3
    write_gguf(path, model, tiny_tokenizer(), more={"rope_freqs.weight": factors}, **scaled)
    with pytest.raises(ValueError, match="has RoPE scaling of its own"):
        surgeon.open(path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions(kind: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 16
    model = tiny(rope_parameters=rope)
    scaled = {
        "rope__scaling__type": kind,
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 16,
    }
    path = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), **scaled)
    ids = torch.arange(2, 42).unsqueeze(0)
    torch.testing.assert_close(logits(surgeon.load(path), ids), logits(model, ids), rtol=1e-4, atol=1e-4)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny(), tiny_tokenizer()).read_bytes()
    path = tmp_path / "bad.gguf"
    for content in (b"", b"GGU", b"PK" + whole[2:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="bad.gguf is no GGUF file: it begins with"):
            surgeon.open(path)
    for end in (4, 20, 100, len(whole) // 8, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:end])
        with pytest.raises(
            ValueError, match="bad.gguf is no GGUF file that can be read, or was cut short"
        ):
            surgeon.open(path)


def test_other_kinds_of_gguf_files_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), tiny_tokenizer())
    whole = path.read_bytes()
    for version, said in ((b"\1\0\0\0", "of version 1"), (b"\0\0\0\3", "big-endian")):
        path.write_bytes(whole[:4] + version + whole[8:])
        with pytest.raises(
            ValueError, match=f"tiny.gguf is {said}, and of GGUF files little-endian ones"
        ):
            surgeon.open(path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokenizer.ggml.bos_token_id": 999}, "has 300 tokens, and names number 999 as BOS"),
        ({"tokenizer.ggml.model": "invented"}, "has a tokenizer that cannot be made out: .*'invented'"),
        ({"llama.attention.head_count": 0}, "has metadata that describe no model"),
        ({"llama.attention.head_count_kv": 3}, "blk.0.attn_k.weight does not fit its metadata"),
    ],
    ids=str,
)
def test_metadata_that_make_no_sense(
    changed: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = gguf.GGUFWriter.write_header_to_file

    def with_change(writer: gguf.GGUFWriter) -> None:
        for key, value in changed.items():
            writer.kv_data[0][key].value = value
        write(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_change)
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), tiny_tokenizer())
    with pytest.raises(ValueError, match=f"tiny.gguf.* {said}"):
        surgeon.open(path)


def test_a_converted_folder_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), tiny_tokenizer())
    folder = convert_gguf(path)
    for note in folder.parent.glob("*.json"):
        note.write_text("")  # the hash is found again
    assert convert_gguf(path) == folder
    for name in ("tokenizer_config.json", "model.safetensors", "gguf.json"):
        file = folder / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-10])
        with pytest.raises(ValueError, match=f"is not as it was written .{name}.; remove it"):
            surgeon.open(path)
        file.unlink()
        with pytest.raises(ValueError, match=f"is not as it was written .{name}.; remove it"):
            surgeon.open(path)
        file.write_bytes(whole)
    assert "written" not in surgeon.open(path).gguf["gguf"]


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), tiny_tokenizer())
    (tmp_path / "cache").write_text("")
    with pytest.raises(OSError, match="tiny.gguf is converted into, cannot be made .* XDG_CACHE_HOME"):
        surgeon.open(path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 1 << 30)  # of nobody
    with pytest.raises(
        FileNotFoundError, match="there is no home to keep gguf in; name a folder in HOME or XDG"
    ):
        surgeon.open(path)


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny(), more={"blk.0.ffn_gate_exps.weight": np.ones((2, 4, 4), np.float32)})
    with pytest.raises(
        ValueError, match="has tensors that are no parameter of llama: blk.0.ffn_gate_exps.weight"
    ):
        surgeon.open(path)
    write_gguf(path, tiny(), rope__scaling__type="longrope")
    with pytest.raises(ValueError, match="has RoPE scaling longrope, which is not read"):
        surgeon.open(path)
    writer = gguf.GGUFWriter(path, "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ValueError, match="of the architecture bert, whose GGUF files transformers does not map"
    ):
        surgeon.open(path)
    write_gguf(path, tiny(), attention__invented=3)
    with pytest.warns(
        UserWarning, match="has attention.invented in its metadata, which nothing here reads"
    ):
        surgeon.open(path)


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    model = tiny()
    path = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), block_count=3)
    with pytest.raises(ValueError, match="lacks the tensors of model.layers.2"):
        surgeon.open(path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), tiny_tokenizer())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ImportError,
        match=r"tiny.gguf needs gguf, which is not installed; run: pip install 'surgeon\[gguf\]'",
    ):
        surgeon.open(path)


def test_exports_name_the_file(tmp_path: Path) -> None:
    model = tiny(hidden_size=64, num_attention_heads=4, intermediate_size=64)
    path = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), Kind.Q4_1)
    opened = surgeon.open(path)
    assert (opened.label, opened.public_name, opened.reference) == ("tiny", "tiny.gguf", str(path))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"surgeon: 1\nmodel: {path}\noperations:\n  - prune: {{layers: '1:2'}}\n")
    surgeon.export(recipe, tmp_path / "out")
    source = json.loads((tmp_path / "out" / "surgeon.json").read_text())["source"]
    assert source["model"] == "tiny.gguf"
    assert list(source["gguf"]["sha256"]) == ["tiny.gguf"]
    assert source["gguf"]["types"] == {"F32": 5, "Q4_1": 16}
    assert not (tmp_path / "out" / "gguf.json").exists()
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert "`tiny.gguf` (SHA-256 `" in card
    assert "16 Q4_1" in card


def test_one_file_of_a_repository_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached, commit = tmp_path / "models--org--tiny-GGUF", "0" * 40
    (cached / "snapshots" / commit / "sub").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    write_gguf(cached / "snapshots" / commit / "sub" / "tiny.gguf", tiny(), tiny_tokenizer())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    opened = surgeon.open("org/tiny-GGUF/sub/tiny.gguf")
    assert (opened.num_layers, opened.public_name) == (2, "org/tiny-GGUF/sub/tiny.gguf")
    predicted = surgeon.predict(
        "org/tiny-GGUF/sub/tiny.gguf",
        hardware="h100-sxm",
        prompt=16,
        new=4,
        output=tmp_path / "predicted",
    )
    assert predicted.table().shape[0] == 1
    assert predicted.record["gguf"]["file"] == opened.provenance()["gguf"]["file"] == "tiny.gguf"
    with pytest.raises(FileNotFoundError, match="org/tiny-GGUF has no file other.gguf on the hub"):
        surgeon.open("org/tiny-GGUF/other.gguf")
