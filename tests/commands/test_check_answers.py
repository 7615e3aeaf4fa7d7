"""`surgeon.check`: what would work, by the code that would refuse it, held against models that are there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.findings.check import Check
from tests.tiny_wrappers import tiny_wrapper

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}


@pytest.fixture
def checked(tmp_path: Path) -> Callable[..., Check]:
    """What is found of a configuration alone."""

    def check(model_type: str, ranks: tuple[int, ...] = (1, 2), **entries: Any) -> Check:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": model_type, **SIZES, **entries}))
        return surgeon.check(path, ranks=ranks)

    return check


def works(found: Check, area: str) -> dict[str, str]:
    return {what: one.works for what, one in found.of_area(area).items()}


def test_of_a_llama_everything_works(checked: Callable[..., Check]) -> None:
    found = checked("llama", ranks=(1, 2, 3, 100))
    assert found.refusal is None
    for area in ("load", "scan", "search", "export", "vllm", "train"):
        assert set(works(found, area).values()) == {"yes"}, area
    on_ranks = found.of_area("ranks")
    assert on_ranks["3 ranks"].works == "yes"
    assert on_ranks["100 ranks"].works == "no"
    assert "whose layers have 4 heads and" in on_ranks["100 ranks"].why
    forms = {what: one.why for what, one in found.of_area("export").items()}
    assert forms["prune"] == "plain form"
    assert forms["lp"] == "fused form"
    assert forms["ladder"] == "program form"


def test_memory_is_that_of_the_model(tiny_checkpoint: Path) -> None:
    """Of a folder: what a loaded model takes, and training all of it; ranks have a share of each matrix."""
    found = surgeon.check(tiny_checkpoint, ranks=(1, 2))
    model: Any = surgeon.load(tiny_checkpoint)
    numbers = model.num_parameters()
    assert found.of_area("load")["CPU"].bytes == 4 * numbers
    assert found.of_area("train")["heal all"].bytes == 16 * numbers
    assert f"{numbers / 1e6:.1f}M parameters" in str(found)
    matrices = sum(one.numel() for one in model.parameters() if one.dim() == 2)
    one, two = (found.of_area("ranks")[what].bytes for what in ("1 rank", "2 ranks"))
    cache = one - 4 * matrices
    keys_values = 2 * 4 * 2 * 8  # of a token: 4 layers, 2 KV heads of 8 features
    assert 4 * keys_values * 128 <= cache <= 4 * keys_values * 1.2 * 128 + 4 * keys_values * 2048
    assert two == one / 2
    assert found.of_area("load")["tokenizer"].works == "yes"


def test_reasons_are_those_of_the_code_that_refuses(checked: Callable[..., Check]) -> None:
    found = checked("gemma2", sliding_window=16)
    for area, what in (("search", "tracks"), ("search", "desync"), ("ranks", "tracks:D")):
        assert found.of_area(area)[what].works == "no"
        assert "cannot be sliced: their output goes through a norm" in found.of_area(area)[what].why
    assert (
        "the norm of a sum is not the sum of norms" in found.of_area("export")["pairs as one layer"].why
    )
    assert found.described["windows"] == "of 16 tokens in 3 of 6 layers"


def test_places_that_differ_are_told_apart(checked: Callable[..., Check]) -> None:
    """Layers with windows and without are averaged to one that can be stored where they are alike only."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"] * 3
    found = checked("qwen2", use_sliding_window=True, sliding_window=16, layer_types=kinds)
    merged = found.of_area("export")["merge"]
    assert merged.works == "yes"
    assert merged.why == "plain form (4 of 5 places); program form (1 of 5 places)"
    assert found.of_area("export")["pairs as one layer"].works == "part"
    assert "not layers 2:4" in found.of_area("export")["pairs as one layer"].why


def test_texts_of_the_full_length(checked: Callable[..., Check]) -> None:
    found = checked("llama", rope_parameters={"rope_type": "dynamic", "factor": 4.0})
    assert found.of_area("ranks")["texts of 512 tokens"].works == "yes"


def test_positions_and_how_far_they_reach(checked: Callable[..., Check]) -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "rope_theta": 500.0,
    }
    found = checked("llama", rope_parameters=rope | {"original_max_position_embeddings": 32})
    assert "rope_type longrope, short_factor 4 numbers" in found.described["positions"]
    with pytest.raises(ValueError, match="describes no model that can be built"):
        checked("llama", rope_parameters={"rope_type": "strange", "rope_theta": 500.0})


def test_quantised_weights(checked: Callable[..., Check]) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    assert (
        checked("llama", quantization_config=fp8)
        .described["quantised"]
        .startswith("FP8 in blocks of 16 x 16;")
    )
    unknown = checked("llama", quantization_config={"quant_method": "quip"})
    assert "quantised by 'quip' are not supported" in unknown.described["quantised"]


def test_an_edited_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    surgeon.export(surgeon.edit(surgeon.open(tiny_checkpoint), ladder="1:4"), tmp_path / "ladder")
    found = surgeon.check(tmp_path / "ladder")
    assert found.described["program"] == "A0 F0 >A1 >F1 >A2 >F2 >A3 >F3"
    assert "is an edited model" in found.of_area("search")["pair"].why
    assert "has to fit into memory" in found.of_area("scan")["layer by layer"].why
    assert "program" in found.of_area("scan")["sensitivity"].why
    assert found.of_area("ranks")["2 ranks"].works == "yes"


def test_a_checkpoint_whose_layers_are_as_wide_as_several(tiny_checkpoint: Path, tmp_path: Path) -> None:
    surgeon.export(surgeon.edit(surgeon.open(tiny_checkpoint), pair="1:3"), tmp_path / "fused")
    found = surgeon.check(tmp_path / "fused")
    assert found.of_area("scan")["prune"].works == "yes"
    assert found.of_area("ranks")["2 ranks"].works == "yes"
    assert "is an edited checkpoint already (fused form)" in found.of_area("vllm")["all programs"].why


def test_whether_something_can_draft(tiny_checkpoint: Path) -> None:
    program = "A0 F0 {A1/2:0 F1/2:0 A2/2:0 F2/2:0 | A1/2:1 F1/2:1 A2/2:1 F2/2:1} A3 F3"
    assert (
        surgeon.check(tiny_checkpoint, ranks=(1, 2), draft=program).of_area("ranks")["draft"].works
        == "yes"
    )
    assert (
        surgeon.check(tiny_checkpoint, ranks=(1, 2), draft="dense").of_area("ranks")["draft"].works
        == "yes"
    )
    other = surgeon.check(tiny_checkpoint, ranks=(1,), draft="halves").of_area("ranks")["draft"]
    assert (other.works, "there are no drafts 'halves'; give a program" in other.why) == ("no", True)
    none = surgeon.check(tiny_checkpoint, ranks=(1, 2), draft=tiny_checkpoint).of_area("ranks")["draft"]
    assert (none.works, "is a folder, and a draft is a program" in none.why) == ("no", True)


def test_what_is_refused_altogether(checked: Callable[..., Check]) -> None:
    found = checked("opt", do_layer_norm_before=False, word_embed_proj_dim=32, ffn_dim=48)
    assert "norms come after the sublayers" in str(found.refusal)
    assert found.table().empty
    assert "it has no final norm" in str(
        checked("opt", _remove_final_layer_norm=True, ffn_dim=48).refusal
    )
    unknown = checked("arcee")
    assert "'arcee' is not supported" in str(unknown.refusal)


def test_it_is_written_and_read_again(checked: Callable[..., Check], tmp_path: Path) -> None:
    found = checked("llama").save(tmp_path)
    again = Check.read(tmp_path)
    assert str(again) == str(found)
    assert [one.why for one in again] == [one.why for one in found]
    assert max(map(len, str(found).splitlines())) <= 80
    assert json.loads(json.dumps(found.to_json()))["answers"][0]["what"] == "CPU"


def test_what_cannot_be_read(tmp_path: Path, checked: Callable[..., Check]) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        surgeon.check(path)
    path.write_text('{"hidden_size": 4}')
    with pytest.raises(ValueError, match="has no model_type"):
        surgeon.check(path)
    path.unlink()
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        surgeon.check(tmp_path)
    with pytest.raises(FileNotFoundError, match="could not be fetched from the hub"):
        surgeon.check("nobody/nothing")
    with pytest.raises(ValueError, match="did you mean 'float32'"):
        surgeon.check("demo", dtype="float3")
    with pytest.raises(ValueError, match="describes no model that can be built"):
        checked("opt", num_attention_heads=5, ffn_dim=48)


def test_an_open_model(checked: Callable[..., Check], tmp_path: Path) -> None:
    checked("llama")
    opened = surgeon.open(tmp_path / "config.json", weights=False)
    found = surgeon.check(opened, ranks=[2])
    assert works(found, "ranks")["2 ranks"] == "yes"


def test_of_a_config_json_of_a_wrapper(tmp_path: Path) -> None:
    """What stands inside it: programs, in its own class, and no layers that are several in one."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_wrapper("mistral3")[0].config.to_dict()))
    found = surgeon.check(tmp_path / "config.json", ranks=(1,))
    assert found.described["inside"] == "Mistral 3, of which the rest stays as it is"
    forms, served = found.of_area("export"), found.of_area("vllm")
    assert [forms[what].why for what in ("prune", "lp", "lowrank")] == [
        "plain form",
        "program form",
        "program form",
    ]
    assert "makes a language model alone" in forms["pairs as one layer"].why
    assert served["prune"].works == "yes"
    assert served["lp"].why == "vLLM runs no program of a text decoder inside a Mistral 3"
