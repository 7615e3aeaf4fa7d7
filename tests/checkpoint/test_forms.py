"""Which form a program gets, which layers it is stored as, and what is said about it."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

import surgeon
from surgeon.checkpoint.forms import FORMS, StoredLayer, form_of, lay_out, per_layer_lists
from surgeon.commands.command import declared_options
from surgeon.commands.export import export
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.families import FAMILIES, family_of
from surgeon.models.families.gemma import GEMMA2
from tests.selection import NORMED_BEHIND
from tests.tiny_models import DENSE_FAMILIES, tiny_model

PACKAGE = Path(surgeon.__file__).parent
LLAMA = tiny_model("llama", num_layers=6).config


def layout(program: str, config: Any = LLAMA, form: str = "auto") -> Any:
    return lay_out(Program.parse(program), family_of(config), config, form)


@pytest.mark.parametrize(
    ("program", "form"),
    [
        ("A0 F0 A2 F2", "plain"),
        ("A0 F0 A0 F0", "program"),
        ("A1 F3 A2 F2", "plain"),
        ("A0 F0 A1~A2~A3 F1~F2~F3 A4 F4", "plain"),
        ("A0 F0 [A1 A2] [F1 F2]", "fused"),
        ("[A0 A1 A2] [F0 F1 F2] A3 F3", "fused"),
        ("[A0 A1] F0", "fused"),
        ("A0/2:1 F0", "fused"),
        ("A0 F0 >A1 >F1", "program"),
        ("{A0 F0 | A1 F1}", "program"),
        ("[A0 F0] [A1 F1]", "program"),
        ("A0 A1 F1", "fused"),
        ("A0 F0 A1", "fused"),
        ("F0 A0", "fused"),
    ],
)
def test_the_most_portable_exact_form_is_chosen(program: str, form: str) -> None:
    assert layout(program).form.name == form


def test_a_less_portable_form_can_be_asked_for() -> None:
    assert layout("A0 F0 A2 F2", form="fused").form.name == "fused"
    assert layout("A0 F0 [A2 A3] [F2 F3]", form="program").form.name == "program"


@pytest.mark.parametrize(
    ("program", "form", "said"),
    [
        ("A0 F0 >A1 F1", "plain", "the plain form; leave form out .* because the step >A1 is late"),
        ("A0 F0 >A1 F1", "fused", "the step >A1 is late"),
        ("{A0 F0 | A1 F1}", "fused", r"the fork \{A0 F0 | A1 F1\}"),
        ("[A0 A1] [F0 F1]", "plain", "A0 A1 F0 F1 would be a layer of another width"),
        ("A0 A1 F1 F0", "plain", "A1 stands where a layer has a feed-forward step"),
        ("A0 F0 [A1 F1]", "fused", r"\[A1 F1\] has attention and feed-forward in one step"),
        ("A0 F0", "fusd", "unknown form 'fusd'; did you mean 'fused'"),
        ("A0/3:0 F0", "program", "4 heads and 2 KV heads of A0 do not divide into 3 slices"),
    ],
)
def test_a_form_that_cannot_hold_the_program_says_why(program: str, form: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layout(program, form=form)


def test_the_reason_tells_why_it_is_no_better_form() -> None:
    reason = layout("A0 F0 >A1 >F1").reason
    assert "trust_remote_code" in reason
    assert "not plain or fused, because the step >A1 is late" in reason


def test_the_program_form_stores_used_layers_only_and_renumbers_them() -> None:
    found = layout("A5 F5 >A2~A3 {A2 F5/2:1 | >[F2 A4]}")
    assert str(found.program) == "A3 F3 >A1 {A0 F3/2:1 | >[F0 A2]}"
    assert [layer.sources for layer in found.layers] == [[2], [2, 3], [4], [5]]


def test_fused_layers_hold_the_sublayers_of_both_steps() -> None:
    (layer,) = layout("[A1 A3] [F3 F1 F2]").layers
    assert layer == StoredLayer(
        (Sublayer("A", (1,)), Sublayer("A", (3,))),
        (Sublayer("F", (3,)), Sublayer("F", (1,)), Sublayer("F", (2,))),
    )


@pytest.mark.parametrize(
    ("family", "overrides", "why"),
    [
        ("gemma2", {}, "Gemma2 norms what a sublayer adds to the stream"),
        ("opt", {"word_embed_proj_dim": 16}, "its embeddings are projected to the stream's width"),
    ],
)
def test_models_that_cannot_be_fused_exactly_get_the_program_form(
    family: str, overrides: dict[str, Any], why: str
) -> None:
    config = tiny_model(family, num_layers=4, **overrides).config
    if family == "gemma2":
        config.layer_types = ["full_attention"] * 4
    found = layout("A0 F0 [A1 A2] [F1 F2]", config)
    assert found.form.name == "program"
    assert why in found.reason
    with pytest.raises(ValueError, match=why):
        layout("A0 F0 [A1 A2] [F1 F2]", config, form="fused")
    assert layout("A0 F0 A2 F2", config).form.name == "plain"


def test_a_norm_behind_mlps_alone_keeps_layers_from_being_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = replace(GEMMA2.attention, stages=GEMMA2.attention.stages[:-1])
    monkeypatch.setitem(FAMILIES, "gemma2", replace(GEMMA2, attention=attention))
    config = tiny_model("gemma2", num_layers=4).config
    assert layout("A0 F0 [A1 A3] [F1 F3]", config).form.name == "program"


@pytest.mark.parametrize("family", sorted(set(DENSE_FAMILIES) - set(NORMED_BEHIND)))
def test_every_family_without_norms_behind_its_sublayers_can_be_fused(family: str) -> None:
    config = tiny_model(family, num_layers=6).config
    steps = family_of(config).steps_per_layer
    program = "[A0 F0] [A3 F3 A5 F5]" if steps == 1 else "A0 F0 [A3 A5] [F3 F5]"
    assert layout(program, config).form.name == "fused"


def test_layers_without_a_sequence_of_their_own_steps_are_no_fused_layers() -> None:
    parallel, sequential = (
        tiny_model("gpt_neox", use_parallel_residual=flag).config for flag in (True, False)
    )
    one, two = "[A0 F0] [A1 F1 A2 F2]", "A0 F0 [A1 A2] [F1 F2]"
    assert [layout(program, sequential).form.name for program in (one, two)] == ["program", "fused"]
    assert layout(one, parallel).form.name == "fused"
    # Layers whose halves read the same stream have one half each, so that they do not.
    found = {
        name: layout(two, config).layers for name, config in (("half", parallel), ("whole", sequential))
    }
    assert {name: [layer.lacks for layer in layers] for name, layers in found.items()} == {
        "half": [["mlp"], ["attention"], ["mlp"], ["attention"]],
        "whole": [[], []],
    }


def test_layers_may_lack_attention_or_mlp() -> None:
    found = layout("F0 F1 A2 F2 A3 A4 F4")
    assert [str(Program.parse(" ".join(map(str, layer.sublayers)))) for layer in found.layers] == [
        *("F0", "F1", "A2 F2", "A3", "A4 F4")
    ]
    assert "3 of 5 layers have no attention or no MLP" in found.reason


def test_layers_that_differ_in_the_config_are_not_stored_as_one() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    config = tiny_model("qwen3", 4, layer_types=kinds, sliding_window=4, use_sliding_window=True).config
    assert layout("A1~A2 F1~F2 A0 F0", config).form.name == "plain"
    with pytest.raises(ValueError, match="layers 0 and 1 differ in the config's layer_types"):
        layout("A0~A1 F0~F1", config, form="plain")
    with pytest.raises(ValueError, match="layers 0 and 1 differ in the config's layer_types"):
        layout("[A0 A1] F0", config, form="fused")
    # What says how far an attention looks says nothing of a feed-forward.
    assert layout("A0 F1 [A1 A2] [F0 F3]", config).form.name == "fused"


def test_layers_with_and_without_rotary_positions_are_not_stored_as_one() -> None:
    config = tiny_model("smollm3", 4, no_rope_layers=[1, 1, 0, 0], use_sliding_window=False).config
    program = "A0 F0 [A1 A2] [F1 F2]"
    with pytest.raises(ValueError, match="layers 1 and 2 differ in the config's no_rope_layers"):
        layout(program, config, form="fused")
    assert layout(program, config).form.name == "program"
    assert layout("[A0 A1] [F0 F3] [A2 A3] [F1 F2]", config).form.name == "fused"


def test_lists_with_an_entry_per_layer_are_found_whatever_their_name() -> None:
    config = tiny_model("qwen3", num_layers=3, eos_token_id=[1, 2, 3]).config
    stored = {
        "eos_token_id": [1, 2, 3],
        "architectures": ["a", "b", "c"],
        "windows": [4, 5, 6],
        "other": [1, 2],
    }
    assert per_layer_lists(family_of(config), config, stored) == {
        "layer_types": ["full_attention"] * 3,
        "windows": [4, 5, 6],
    }


@pytest.mark.parametrize(
    ("marks", "form"),
    [
        ({"model_type": "llama"}, "plain"),
        ({"model_type": "surgeon_fused"}, "fused"),
        ({"model_type": "surgeon_llama", "surgeon_program": "A0 F0"}, "program"),
        # Edited, and saved.
        ({"model_type": "surgeon_surgeon_fused", "surgeon_program": "A0 F0"}, "fused"),
    ],
)
def test_a_folder_s_form_is_known_by_its_marks(marks: dict[str, Any], form: str) -> None:
    assert form_of(SimpleNamespace(config=marks)).name == form  # type: ignore[arg-type]


def test_a_form_is_asked_and_never_told_by_its_name() -> None:
    for path in (path for path in (PACKAGE / "checkpoint").rglob("*.py") if "forms" not in path.parts):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                found = {
                    one.value for one in (node.left, *node.comparators) if isinstance(one, ast.Constant)
                }
                assert not found & set(FORMS), f"{path}:{node.lineno}"


def test_the_command_offers_every_form() -> None:
    (form,) = [one for one in declared_options(export) if one.name == "form"]
    assert get_args(form.type) == ("auto", *FORMS)
