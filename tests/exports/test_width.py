"""Checkpoints of models with fewer heads and neurons: the form they get, and that they are trained and read back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

import surgeon
from surgeon.checkpoint.forms import lay_out
from surgeon.exports.in_memory import stock_model
from surgeon.exports.unfuse import unfuse
from surgeon.language.program import Program
from surgeon.models.edit import edit
from surgeon.models.families import family_of
from tests.checkpoint.helpers import (
    IDS,
    load_shipped,
    logits_of,
    plain_logits,
    relative_error,
    run_export,
    save_source,
)
from tests.tiny_models import tiny_model

UNIFORM = " ".join(f"A{k}#1 F{k}#20" for k in range(4))


@pytest.mark.parametrize(
    ("family", "program", "form", "reason"),
    [
        ("llama", UNIFORM, "plain", "its 4 layers are all of one width"),
        ("llama", "A0 F0#20 A1 F1#20 A2 F2#20", "plain", "its 3 layers are all of one width"),
        (
            "llama",
            "A0#1 F0 A1 F1",
            "fused",
            "1 of 2 layers are narrower than the model's; transformers and vLLM load",
        ),
        ("llama", "A0#1 F0 [A1#1 A2] [F1 F2#5]", "fused", "side by side and 1 of 2 layers are narrower"),
        (
            "llama",
            "A0#1 F0 >A1 >F1",
            "program",
            "vLLM needs surgeon's plugin, because its layers are of other widths",
        ),
        (
            "llama",
            "A0#1@q4 F0 A1 F1",
            "program",
            "vLLM needs surgeon's plugin, because its layers are of other widths",
        ),
        (
            "gpt2",
            UNIFORM,
            "fused",
            "not plain, because all heads of GPT-2 together are as wide as the stream",
        ),
        ("gemma2", "A0#1 F0 A1 F1", "program", "Gemma2 norms what a sublayer adds"),
        ("cohere", "[A0#1 F0#9] [A1#1 F1#9]", "plain", "all of one width"),
        (
            "cohere",
            "[A1 F0] [A0 F1]",
            "fused",
            "not plain, because A1 F0 would be one layer, whose sublayers have one norm",
        ),
    ],
)
def test_the_most_portable_form(family: str, program: str, form: str, reason: str) -> None:
    config = tiny_model(family).config
    found = lay_out(Program.parse(program), family_of(config), config)
    assert found.form.name == form
    assert reason in found.reason


def test_a_configuration_that_cannot_say_it(tmp_path: Path) -> None:
    """Llama's asks that heads divide the stream's width; three of four KV groups are stored in another form."""
    model = save_source(tmp_path / "source", "llama", 2, num_attention_heads=4, num_key_value_heads=4)
    program = "A0#3 F0 A1#3 F1"
    with pytest.raises(
        ValueError,
        match="Llama has no configuration of such layers .*hidden size .32. is not a multiple",
    ):
        run_export(tmp_path / "source", tmp_path / "no", program, form="plain")
    run_export(tmp_path / "source", tmp_path / "fused", program)
    assert surgeon.open(tmp_path / "fused").form.name == "fused"
    assert (
        relative_error(logits_of(surgeon.load(tmp_path / "fused")), plain_logits(model, program)) < 1e-5
    )


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "gpt_neox", "cohere"])
def test_what_is_trained_comes_back(family: str, tmp_path: Path) -> None:
    """By adapters, merged and exported; in full, through the modeling file inside; and into a model edited anew."""
    save_source(tmp_path / "source", family, 4, dropout=0.0)
    program = "A0#2 F0 >A1#1 >F1#20 A2 F2#12"
    run_export(tmp_path / "source", tmp_path / "narrow", program)
    loaded = surgeon.load(tmp_path / "narrow")
    mlp = next(p.path for p in family_of(loaded.config).mlp.projections)
    lora = get_peft_model(
        loaded, LoraConfig(target_modules=[mlp.split(".")[-1]], r=2, init_lora_weights=False)
    ).eval()
    expected = logits_of(lora)
    surgeon.export(lora.merge_and_unload(), tmp_path / "merged")
    assert relative_error(logits_of(load_shipped(tmp_path / "merged")), expected) < 1e-5
    trained = load_shipped(tmp_path / "narrow").train()
    trained(input_ids=IDS, labels=IDS).loss.backward()
    torch.optim.SGD(trained.parameters(), lr=0.5).step()
    trained.eval().save_pretrained(tmp_path / "trained")
    after = logits_of(trained)
    assert relative_error(after, logits_of(load_shipped(tmp_path / "narrow"))) > 1e-3
    shutil.copy(tmp_path / "narrow" / "modeling_surgeon_program.py", tmp_path / "trained")
    assert relative_error(logits_of(surgeon.load(tmp_path / "trained")), after) < 1e-6
    # A trainer keeps derived sublayers as layers behind the original ones.
    one, other = (edit(tiny_model(family, 4, dropout=0.0), program) for _ in range(2))
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            parameter.add_(0.1 if "#" in name else 0.0)
    other.load_state_dict(stock_model(one).tensors)
    assert torch.equal(logits_of(other), logits_of(one))


def test_layers_that_run_again_are_stored_once(tmp_path: Path) -> None:
    model = save_source(tmp_path / "source", "llama", 3)
    program = "A0 F0 A1#1 F1#9 A1#1 F1#9 A2 F2"
    run_export(tmp_path / "source", tmp_path / "again", program)
    stored = surgeon.open(tmp_path / "again")
    assert (str(stored.program), stored.num_layers) == ("A0 F0 A1#1 F1#9 A1#1 F1#9 A2 F2", 3)
    assert relative_error(logits_of(surgeon.load(stored)), plain_logits(model, program)) < 1e-5


def test_fused_pairs_of_narrow_layers_are_not_taken_apart(tmp_path: Path) -> None:
    save_source(tmp_path / "source", "llama", 2)
    run_export(tmp_path / "source", tmp_path / "fused", "[A0#1 A1#1] [F0#24 F1#24]")
    with pytest.raises(ValueError, match="cannot be taken apart .* use the recipe and the original"):
        unfuse(tmp_path / "fused")


def test_experts_are_not_narrowed_to_the_width_that_they_have(tmp_path: Path) -> None:
    width = save_source(tmp_path / "source", "mixtral", num_layers=2).config.intermediate_size
    with pytest.raises(ValueError, match="the neurons of a mixture's experts stay"):
        run_export(tmp_path / "source", tmp_path / "target", f"A0 F0#{width} A1 F1")
