"""Models whose weights stay in their files while they run, and what is kept of written files to verify them."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.checkpoint import tensor_file
from surgeon.checkpoint.tensor_file import FileRecord, FileTensor, verify
from surgeon.exports.prove import WeightsOnDemand, original_model, reference_of
from surgeon.language.program import Program
from surgeon.machine import resident_bytes
from surgeon.opened import open_model
from tests.checkpoint.helpers import logits_of, relative_error, run_export, save_source, weights_of
from tests.selection import NORMED_BEHIND, one_in
from tests.tiny_models import DENSE_FAMILIES

DERIVED = "A0 F0 A1~A2 F1~F2 {A3/2:0 F3/2:0 | A3/2:1 F3/2:1}"


def streamed_logits(folder: Path) -> Tensor:
    """Logits of a checkpoint whose weights are read while it runs."""
    original = open_model(folder)
    model, match = original_model(original)
    assert all(parameter.is_meta for parameter in model.parameters())

    def rows(names: tuple[str, ...], count: int | None) -> Iterable[tuple[Tensor]]:
        return zip(chain.from_iterable(original.checkpoint[name].rows(count) for name in names))

    with WeightsOnDemand(
        model, {parameter: partial(rows, names) for parameter, names in match.names.items()}
    ):
        return logits_of(model)


@pytest.mark.sampled
@pytest.mark.parametrize("family", one_in(3, DENSE_FAMILIES, 1))
def test_every_family_runs_with_its_weights_in_their_files(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surgeon.exports.prove.BLOCK", 100)  # a few rows at a time
    model = save_source(tmp_path, family, 4)
    assert relative_error(streamed_logits(tmp_path), logits_of(model)) < 1e-5
    program = Program.parse(DERIVED if family not in NORMED_BEHIND else "A0 F0 A1~A2 F1~F2")
    original = open_model(tmp_path)
    reference = reference_of(original, program)
    edited = surgeon.edit(surgeon.load(tmp_path), program)
    assert relative_error(reference.logits, logits_of(edited, reference.tokens)) < 1e-5


@pytest.mark.parametrize("stored", ["without its prefix", "with the head", "with another head"])
def test_names_are_found_as_transformers_finds_them(tmp_path: Path, stored: str) -> None:
    save_source(tmp_path, "gpt2", 2)  # whose head is tied
    weights = weights_of(tmp_path)
    head = weights["transformer.wte.weight"]
    if stored == "without its prefix":
        weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
        weights["h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)  # a mask that old files hold
    else:
        weights["lm_head.weight"] = (
            head.clone() if stored == "with the head" else head.flip(0).contiguous()
        )
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert relative_error(streamed_logits(tmp_path), logits_of(loaded)) < 1e-6


def test_an_embedding_is_not_read_beyond_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_source(tmp_path, num_layers=2)
    read: list[tuple[str, int]] = []
    part, original = FileTensor.part, open_model(tmp_path)

    def noted(self: FileTensor, dim: int, first: int, end: int) -> Tensor:
        read.append((self.name, end - first))
        return part(self, dim, first, end)

    monkeypatch.setattr(FileTensor, "part", noted)
    monkeypatch.setattr("surgeon.exports.prove.BLOCK", 32 * 4)
    reference_of(original, Program.dense(2))
    assert max(rows for _, rows in read) == 32  # eight blocks of four rows
    assert sum(rows for name, rows in read if name == "lm_head.weight") == 97
    assert not any("embed" in name for name, _ in read)


def most_resident() -> int:
    """The largest amount of memory that this process has held since `clear_refs` was written, in bytes."""
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    return int(status.split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of memory")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    save_source(tmp_path / "source", num_layers=16, dtype=torch.bfloat16, shards="20MB", **wide)
    assert sum(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors")) > 110 * 2**20
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    others = " ".join(f"A{layer} F{layer}" for layer in range(5, 16))
    run_export(
        tmp_path / "source", tmp_path / "target", f"A0 F0 [A1 A2] [F1 F2] [A3 A4] [F3 F4] {others}"
    )
    # The largest tensor, of a fused layer, takes 8 MB in float32, and what is written, run and read back side by side
    # has some of them each, 70 to 105 MB together, of 8 layers as well. All weights in float32: 222 MB.
    assert most_resident() - before < 140 * 2**20


def test_surgeon_json_says_what_every_file_holds(tmp_path: Path) -> None:
    save_source(tmp_path / "source", num_layers=3, shards="40KB")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    target = tmp_path / "target"
    run_export(tmp_path / "source", target, "A0 F0 >A2 >F2")
    report = json.loads((target / "surgeon.json").read_text())
    # People add to the model card; it is no part of what is loaded.
    assert set(report["files"]) == {path.name for path in target.iterdir()} - {
        "surgeon.json",
        "README.md",
    }
    for name, record in report["files"].items():
        assert FileRecord(**record) == FileRecord.of(target / name)
    assert verify(target, target / "surgeon.json") == len(report["files"])


def test_what_changed_is_said_by_name(tmp_path: Path) -> None:
    save_source(tmp_path / "source", num_layers=3)
    target = tmp_path / "target"
    run_export(tmp_path / "source", target, "A0 F0 >A2 >F2")
    weights = target / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (target / "config.json").write_text("{}")
    (target / "modeling_surgeon_program.py").unlink()
    with pytest.raises(ValueError, match="is not as it was written") as error:
        verify(target, target / "surgeon.json")
    for said in (
        "config.json has 2 bytes, not the",
        "model.safetensors has another content",
        "modeling_surgeon_program.py is missing",
    ):
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({}, "no record"),
        ({"files": {"../x": {}}}, "none of its files"),
        ({"files": {"a/../../x": {}}}, "none of its files"),
        ({"files": {"x": 5}}, "none of its files"),
    ],
)
def test_reports_that_record_nothing(tmp_path: Path, report: Any, said: str) -> None:
    (tmp_path / "surgeon.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match=said):
        verify(tmp_path, tmp_path / "surgeon.json")


def test_what_is_written_and_not_there_afterwards_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that changes a bit behind the writer's back, in a way that no logit shows."""
    save_source(tmp_path / "source", num_layers=3)

    def rots(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[-4] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(tensor_file, "sync", rots)
    with pytest.raises(OSError, match="model.safetensors does not read back"):
        run_export(tmp_path / "source", tmp_path / "out" / "target", "A0 F0 A2 F2")
    assert list((tmp_path / "out").iterdir()) == []
