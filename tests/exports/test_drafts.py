"""Healed drafts as folders: what is written, that peft reads it, and what is refused of others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.checkpoint.drafts import ADAPTER_CONFIG, ADAPTER_FILE, DRAFT_FILE, NORMS_FILE, DraftChanges, HealedDraft
from surgeon.commands.drafts import draft_program
from surgeon.opened import open_model
from tests.healed import healed_draft
from tests.tiny_models import tiny_model

PAIRS = "A0 F0 [A1 A2] [F1 F2] A3 F3"
TRACKS = "A0 F0 {A1/2:0 F1/2:0 A2/2:0 F2/2:0 | A1/2:1 F1/2:1 A2/2:1 F2/2:1} A3 F3"
IDS = torch.arange(3, 40)[None]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("program", [PAIRS, TRACKS])
def test_peft_reads_the_adapter_onto_the_model(program: str, base: Path, tmp_path: Path) -> None:
    """Of slices, too: the model with it, edited then, is what was trained."""
    trained = healed_draft(base, program, tmp_path / "draft", lora=2)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "draft"))
    merged: Any = adapted.merge_and_unload()
    found = surgeon.edit(merged.eval(), program)(input_ids=IDS).logits
    torch.testing.assert_close(found, trained(input_ids=IDS).logits, rtol=1e-3, atol=1e-3)


def test_norms_are_those_that_were_changed(base: Path, tmp_path: Path) -> None:
    healed_draft(base, PAIRS, tmp_path / "draft", scope="edited-norms")
    names = load_file(tmp_path / "draft" / NORMS_FILE)
    kinds = "input_layernorm", "post_attention_layernorm"
    assert set(names) == {f"model.layers.{layer}.{kind}.weight" for layer in (1, 2) for kind in kinds}
    assert sorted(path.name for path in (tmp_path / "draft").iterdir()) == ["README.md", DRAFT_FILE, NORMS_FILE]


def test_it_drafts_for_its_own_model_only(base: Path, tmp_path: Path) -> None:
    healed_draft(base, PAIRS, tmp_path / "draft", lora=2)
    model = open_model(base)
    assert draft_program(model, tmp_path / "draft") == HealedDraft.read(tmp_path / "draft")
    tiny_model("llama", seed=9).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"draft was healed to draft for base \(sha256:\w{12}\), and .*other has "):
        draft_program(open_model(tmp_path / "other"), tmp_path / "draft")
    with pytest.raises(ValueError, match=r"other has no draft\.json, so it is no healed draft"):
        draft_program(model, tmp_path / "other")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            ADAPTER_FILE,
            {"layers.1.self_attn.q_proj.lora_A.weight": (2, 7)},
            "layers.1.self_attn.q_proj is of (2, 7) and",
        ),
        (ADAPTER_FILE, {"layers.1.self_attn.q_proj.lora_C.weight": (2, 7)}, "no pairs of lora_A and lora_B"),
        (
            ADAPTER_FILE,
            {"embed_tokens.lora_A.weight": (2, 7), "embed_tokens.lora_B.weight": (7, 2)},
            "an adapter on model.embed_tokens, which is no matrix of the model's layers",
        ),
        (
            NORMS_FILE,
            {"layers.1.input_layernorm.weight": (31,)},
            "input_layernorm.weight has the shape (31,), and the ",
        ),
        (NORMS_FILE, {"layers.9.input_layernorm.weight": (32,)}, "layers.9.input_layernorm.weight has the shape (32,)"),
        (ADAPTER_CONFIG, {"use_dora": True}, "a draft has LoRA on matrices and nothing else, not use_dora"),
        (ADAPTER_CONFIG, {"peft_type": "IA3"}, "not peft_type 'IA3'"),
        (DRAFT_FILE, {"surgeon": 2}, "surgeon is 2, and this version reads 1"),
        (DRAFT_FILE, {"program": 3}, "program must be text, not 3"),
    ],
)
def test_damaged_drafts_are_refused(
    file: str, change: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "draft"
    healed_draft(base, PAIRS, folder, lora=2)
    if file.endswith(".safetensors"):
        prefix = "base_model.model.model." if file == ADAPTER_FILE else "model."
        there = load_file(folder / file) if (folder / file).exists() else {}
        there |= {f"{prefix}{name}": torch.zeros(shape) for name, shape in change.items()}
        save_file(there, folder / file)
    else:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(message)):
        DraftChanges.read(HealedDraft.read(folder).folder).check(open_model(base).weights)
