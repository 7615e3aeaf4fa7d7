"""scripts/vllm/test without vLLM: what it tries, how it asks the engines, and what it says of their answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import surgeon
from scripts.vllm import cases as script
from scripts.vllm import checkpoints
from surgeon.language.program import Program
from surgeon.models.edit import program_of
from tests.tiny_models import save_checkpoint, tiny_model

IDS = torch.randint(2, 97, (2, 9), generator=torch.Generator().manual_seed(1))
# Answers as an engine does: the second model cannot be run, and the third one ends the process without a word.
ENGINE = """
import json, sys
for case in json.load(open(sys.argv[2])):
    name = case["folder"].rsplit("/", 1)[-1]
    if name == "third":
        sys.exit("out of memory")
    found = {"error": "ValueError: no"} if name == "second" else {"tokens": [[n] * case["tokens"] for n in (1, 2)]}
    print("some noise", json.dumps({"folder": "not me"}))
    print(json.dumps({"folder": case["folder"]} | found), flush=True)
    if name == "second":
        break
"""


def test_padded_heads_compute_the_same(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True, attention_bias=True)
    model.save_pretrained(tmp_path / "narrow")
    wide = AutoModelForCausalLM.from_pretrained(
        script.with_wide_heads(tmp_path / "narrow", tmp_path / "wide")
    )
    assert wide.config.head_dim == 32
    with torch.no_grad():
        torch.testing.assert_close(wide(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert script.with_wide_heads(tmp_path / "wide", tmp_path / "again") == tmp_path / "wide"
    tiny_model("qwen2").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="other has heads of 8, for which vLLM has no attention"):
        script.with_wide_heads(tmp_path / "other", tmp_path / "again")


def test_every_model_is_tried_in_every_form(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "source", num_layers=4)
    cases = list(script.cases_of("mine", source, tmp_path, with_plugin=False))
    forms = ["dense", "plain", "fused", "narrow plain", "narrow fused", "keep 0.6", "odd ranks"]
    assert [case.form for case in cases] == forms
    assert not any(case.plugin for case in cases)
    programs = [json.loads((case.folder / "surgeon.json").read_text())["program"] for case in cases[1:]]
    assert programs[:2] == ["A0 F0 A1 F1 A3 F3", "A0 F0 [A1 A2] [F1 F2] A3 F3"]
    assert programs[2:4] == [
        "A0#1 F0#24 A1#1 F1#24 A2#1 F2#24 A3#1 F3#24",
        "A0 F0 A1 F1#24 A2 F2#24 A3 F3",
    ]
    kept = Program.parse(programs[4])
    assert str(kept.whole()) == "A0 F0 A1 F1 A2 F2 A3 F3"
    assert all(sublayer.ranks for sublayer in kept.sublayers())
    odd = "A0 F0 A1@q7,k7,v7,o7 F1@gate7,up7,down7 A2@o7 F2@down7 A3@q7,k7,v7 F3@gate7,up7"
    assert programs[5] == odd
    assert script.prompts(cases[0]) == script.prompts(cases[2])


def test_factors_that_vllm_cannot_divide_are_for_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_checkpoint(tmp_path / "source", "opt", num_layers=3)
    monkeypatch.setattr(checkpoints, "write_export", lambda *_: None)
    found = [
        list(script.cases_of("mine", source, tmp_path, with_plugin)) for with_plugin in (False, True)
    ]
    ranked = [
        [case.plugin for case in cases if case.form in ("keep 0.6", "odd ranks")] for cases in found
    ]
    assert ranked == [[], [True, True]]


def test_what_a_model_cannot_have_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_checkpoint(tmp_path / "source", "mixtral", num_layers=4)
    monkeypatch.setattr(checkpoints, "write_export", lambda *_: None)
    forms = ["fused", "experts plain", "narrow", "low rank"]
    fused, *others = script.cases_of("mine", source, tmp_path, True, forms)
    assert fused.refused is not None
    assert "mixtures" in fused.refused
    assert [(case.form, case.refused) for case in others] == [(form, None) for form in forms[1:]]
    refused = {("mine", "fused", 1): f"{script.REFUSED}{fused.refused}"}
    assert not script.is_failure(("mine", "fused", 1), refused)


def test_native_tracks_are_for_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_checkpoint(tmp_path / "source", num_layers=3)
    monkeypatch.setattr(checkpoints, "write_export", lambda *_: None)
    (case,) = (
        case
        for case in script.cases_of("mine", source, tmp_path, with_plugin=True)
        if case.form == "native"
    )
    assert case.plugin
    native = surgeon.load(case.folder)
    assert str(program_of(native)) == "{A0 F0 A1 F1 | A2 F2 A3 F3} {A4 F4 | A5 F5}"
    assert native.config.num_attention_heads == 2
    (case,) = script.cases_of("mine", source, tmp_path, True, ["one head"])
    single = surgeon.load(case.folder).config
    assert single.num_attention_heads == single.num_key_value_heads == 1
    assert single.head_dim == native.config.head_dim
    assert [
        case.form for case in script.cases_of("mine", source, tmp_path, True, ["dense", "fused"])
    ] == [
        "dense",
        "fused",
    ]


def test_an_engine_that_fails_is_started_again_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    monkeypatch.setattr(script, "WORKER", tmp_path / "engine.py")
    cases = []
    for name in ("first", "second", "third", "fourth"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 50}')
        cases.append(script.Case(name, "dense", tmp_path / name))
    found = script.run("2", cases, tmp_path, sys.executable)
    fine = {"tokens": [[n] * script.NEW_TOKENS for n in (1, 2)]}
    assert [found[case.folder].get("error") for case in cases] == [
        *[None, "ValueError: no"],
        *["ended with status 1: out of memory", None],
    ]
    assert script.verdict(fine, found[cases[0].folder]) == "ok"


def test_what_the_table_says() -> None:
    texts = [[1, 2, 3], [4, 5, 6]]
    assert script.verdict({"tokens": texts}, {"tokens": texts}) == "ok"
    other = script.verdict({"tokens": texts}, {"tokens": [[1, 2, 3], [4, 5, 7]]})
    assert other == "other tokens than transformers: text 1, from new token 2 on"
    refused = script.verdict({"tokens": texts}, {"error": "ValueError:\n  heads of 8"})
    assert refused == "vLLM: ValueError: heads of 8"
    verdicts = {("a", "dense", 1): refused, ("a", "plain", 1): refused, ("a", "fused", 1): "ok"}
    verdicts |= {("b", "dense", 1): "ok", ("b", "plain", 1): refused, ("b", "fused", 1): other}
    failed = [key for key in verdicts if script.is_failure(key, verdicts)]
    assert failed == [("b", "plain", 1), ("b", "fused", 1)]
    lines = script.table(verdicts, failed)
    assert [line.split()[:3] for line in lines[2:8]] == [
        *[["a", "dense", "refused"], ["a", "plain", "refused"], ["a", "fused", "ok"]],
        *[["b", "dense", "ok"], ["b", "plain", "FAILED"], ["b", "fused", "FAILED"]],
    ]
    assert lines[8:] == [f"(1) {refused}", f"(2) {other}"]
