"""Adapters kept apart: base and adapter, put together as users do it, compute what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from surgeon.checkpoint.describe import describe
from surgeon.errors import NotProven
from surgeon.exports.in_memory import export_with_adapter
from surgeon.models.edit import edit, program_of
from tests.checkpoint.helpers import IDS, logits_of, relative_error
from tests.tiny_models import tiny_model, tiny_tokenizer

DROPPED_LADDER = "A0 F0 >A3 >F3 [A2 A4] [F2 F4]"  # whose layers have other numbers when they are stored
TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


def adapted(family: str, program: str, targets: Any, **options: Any) -> Any:
    """An edited model with an adapter that is not zero any more."""
    model = edit(tiny_model(family, 5, dropout=0.0), program)
    options = {"r": 2, "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(target_modules=targets, **options)).eval()


def put_together(folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(
        folder / "base", trust_remote_code=True, dtype=torch.float32
    )
    return PeftModel.from_pretrained(base, folder / "adapter").eval()


@pytest.mark.parametrize(
    ("family", "program", "form"),
    [
        ("llama", DROPPED_LADDER, "program"),
        ("gpt2", DROPPED_LADDER, "program"),
        ("llama", "A4 F4 A1 F3 A2 F2", "plain"),  # one layer is made of two
        ("llama", "A4 F4 A1 F3 A4 F4", "program"),  # one runs twice, and is stored once
        # With the adapter on what is stored as it is.
        ("llama", "A0 F0 A3@q5,k7 F3 A1~A2 F1", "program"),
    ],
)
def test_base_and_adapter_compute_what_was_trained(
    family: str, program: str, form: str, tmp_path: Path
) -> None:
    derived = "~" in program
    targets = (
        [f"model.layers.{path}" for path in ("0.self_attn.q_proj", "1.mlp.up_proj")]
        if derived
        else TARGETS[family]
    )
    model = adapted(family, program, targets)
    with model.disable_adapter():
        without = logits_of(model)
    expected, names = logits_of(model), list(model.state_dict())
    export_with_adapter(model, tmp_path / "kept", tokenizer=tiny_tokenizer())
    assert relative_error(logits_of(put_together(tmp_path / "kept")), expected) < 1e-5
    found = describe(tmp_path / "kept" / "base")
    assert found.form is not None
    assert found.form.name == form
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "kept" / "base", trust_remote_code=True, dtype=torch.float32
    )
    assert relative_error(logits_of(base.eval()), without) < 1e-5
    assert relative_error(without, expected) > 1e-2
    # The model goes on as it was.
    assert list(model.state_dict()) == names
    assert torch.equal(logits_of(model), expected)
    assert str(program_of(model.get_base_model())) == program


def test_ranks_that_differ_by_module(tmp_path: Path) -> None:
    """Patterns that fit modules by their numbers in memory fit others when these are stored."""
    patterns = {
        "rank_pattern": {r"layers\.2\.self_attn\.q_proj": 5},
        "alpha_pattern": {r"layers\.3\..*": 17},
    }
    model = adapted(
        "llama", DROPPED_LADDER, ["q_proj", "up_proj"], layers_to_transform=[2, 3], **patterns
    )
    export_with_adapter(model, tmp_path / "kept")
    assert relative_error(logits_of(put_together(tmp_path / "kept")), logits_of(model)) < 1e-5


def test_what_cannot_be_kept_apart_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    for program, lies_on in (
        ("A0~A1 F0", "A0~A1"),
        ("[A0/2:0 A0/2:1] F0", "A0/2:0"),
        ("A0@q3 F0", "A0@q3"),
    ):
        model = adapted("llama", program, r".*self_attn\.v_proj")
        with pytest.raises(ValueError, match=f"the adapter lies on {lies_on}.*leave keep_adapter out"):
            export_with_adapter(model, target)
    saved = adapted("llama", "A0 F0", ["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match="only LoRA adapters without modules_to_save"):
        export_with_adapter(saved, target)
    model = adapted("llama", "A1 F0", [r"v_proj"])
    model.add_adapter("second", LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="has 2 adapters"):
        export_with_adapter(model, target)
    model = adapted("llama", "A1 F1", ["v_proj"], layers_to_transform=[0])
    with pytest.raises(ValueError, match="on no module that the program runs"):
        export_with_adapter(model, target)
    model = adapted("llama", "A1 F1", ["v_proj"])
    hook = model.register_forward_hook(lambda *args: setattr(args[2], "logits", args[2].logits * 2))
    with pytest.raises(NotProven, match="base and adapter together do not compute"):
        export_with_adapter(model, target)
    hook.remove()
    model.merge_adapter()
    with pytest.raises(ValueError, match="is merged into .* already"):
        export_with_adapter(model, target)
    assert not list(tmp_path.iterdir())
    assert model(input_ids=IDS).logits.isfinite().all()
