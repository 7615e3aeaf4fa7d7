"""Model cards: that what they say of a checkpoint is so, whatever the base model's card was like."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import dynamic_module_utils

import surgeon
from surgeon.checkpoint.belongings import inherit
from surgeon.checkpoint.stored import Checkpoint
from surgeon.findings.card import identity_of, open_edited, require_own_card, write_card
from surgeon.findings.measured import Identity, read_measured
from surgeon.language.program import Program
from tests.checkpoint.helpers import logits_of, run_export
from tests.tiny_models import save_checkpoint

PROGRAMS = {"plain": "A0 F0 A2 F2", "fused": "A0 F0 [A1 A2] [F1 F2]", "program": "A0 F0 >A1 >F1 A2 F2"}
RECIPE = 'surgeon: 1\nmodel: tiny\noperations:\n  - prune: {layers: "1:2"}\n'
DENSE = "A0 F0 A1 F1 A2 F2"
HASH = "0" * 64


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each form; not to be changed."""
    folder = tmp_path_factory.mktemp("cards")
    source = save_checkpoint(folder / "tiny", num_layers=3)
    (source / "README.md").write_text(
        "---\nlicense: other\nlicense_name: my terms\nlicense_link: LICENSE\n---\n# tiny\n"
    )
    (source / "LICENSE").write_text("Be kind.\n")
    for form, program in PROGRAMS.items():
        run_export(source, folder / form, program, recipe=RECIPE if form == "plain" else None)
    return {form: folder / form for form in PROGRAMS}


@pytest.fixture
def copied(exported: dict[str, Path], tmp_path: Path) -> Path:
    """The fused one, the test's own."""
    return Path(shutil.copytree(exported["fused"], tmp_path / "fused"))


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text()


@pytest.mark.parametrize("form", PROGRAMS)
def test_what_it_says_of_each_form(form: str, exported: dict[str, Path]) -> None:
    text = card_of(exported[form])
    data = ModelCard(text).data.to_dict()
    assert data["license"] == "other"
    assert (data["license_name"], data["license_link"]) == ("my terms", "LICENSE")
    assert data["tags"] == ["surgeon"]
    assert "base_model" not in data  # a folder is no name on the hub
    assert PROGRAMS[form] in text
    depth = {"plain": 2, "fused": 2, "program": 3}[form]
    assert f"| layers one after the other (effective depth) | {depth} | 3 |" in text
    assert f"| synchronisations per pass on two tensor-parallel ranks | {2 * depth} | 6 |" in text
    checkpoint = Checkpoint(exported[form])
    parameters = sum(torch.Size(checkpoint.shape(name)).numel() for name in checkpoint.names())
    assert f"| parameters | {parameters:,} |" in text
    words = " ".join(text.split())
    assert "Its `LICENSE` lies in this folder." in words
    assert "`other` ([my terms](<LICENSE>))" in words
    assert ("--trust-remote-code" in text, "PATH_OF_SURGEON\nvllm" in text) == (
        form == "fused",
        form == "program",
    )
    assert ("trust_remote_code=True" in text) == (form != "plain")
    assert (f"`modeling_surgeon_{form}.py`" in words) == (form != "plain")
    assert ("`LlamaForCausalLM`" in text) == (form == "plain")
    assert ('- `prune: {layers: "1:2"}`: Leave the layers out' in words) == (form == "plain")
    assert "## Quality" not in text
    assert "## Speed" not in text
    assert not re.search(r"\n\n\n|/tmp|#+ .*\n+#", text)  # no empty section, and no path of this machine
    assert all(len(line) <= 100 or line.startswith(("|", "<!--")) for line in text.splitlines())


def test_ranks_are_said_once_for_equal_layers(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "tiny", num_layers=3)
    run_export(source, tmp_path / "edited", "A0@q5,o6 F0@up7 A1@q5,o6 F1@up7 A2 F2@up8")
    text = card_of(tmp_path / "edited")
    assert "- layers 0 to 1: q 5; o 6; up 7\n- layer 2: up 8\n" in text
    words = " ".join(text.split())
    assert (
        "`F4@up64,down96` has two factors in place of matrices, of rank 64 for up and 96 for down."
        in words
    )
    parameters = [
        sum(p.numel() for p in surgeon.load(folder).parameters())
        for folder in (tmp_path / "edited", source)
    ]
    assert f"| parameters | {parameters[0]:,} | {parameters[1]:,} |" in text
    assert "Unmodified vLLM, without surgeon, by the modeling file in this folder:" in words
    assert "vllm serve edited --trust-remote-code\n```" in text
    assert "plugin" not in text


@pytest.mark.parametrize(
    ("program", "name", "serve"),
    [
        ("A0#1 F0#20 A1 F1", "fused", "vllm serve edited --trust-remote-code"),
        ("A0 F0#20 A1 F1", "fused", "vllm serve edited --trust-remote-code"),
        ("A0#1 F0#20 A1#1 F1#20", "plain", "vllm serve edited"),
        ("A0#1 F0#21 A1#1 F1#21", "plain", "vllm serve edited"),
        ("A0#1 F0 >A1 >F1", "program", "vllm serve edited"),
    ],
)
def test_narrow_layers_are_said(program: str, name: str, serve: str, tmp_path: Path) -> None:
    run_export(save_checkpoint(tmp_path / "tiny", num_layers=2), tmp_path / "edited", program)
    text = card_of(tmp_path / "edited")
    assert f"It is in surgeon's {name} form" in text or name == "plain"
    assert f"{serve}\n```" in text
    assert ("- layer 0: KV groups 1" in text or "- layers 0 to 1: KV groups 1" in text) == (
        "A0#1" in program
    )
    assert ("`F4#344` 344 of its neurons" in " ".join(text.split())) == ("#" in program)


def test_what_runs_again_is_said(tmp_path: Path) -> None:
    run_export(
        save_checkpoint(tmp_path / "tiny", num_layers=3), tmp_path / "edited", "A0 F0 A1 F1 A1 F1 A2 F2"
    )
    words = " ".join(card_of(tmp_path / "edited").split())
    assert (
        "feed-forward of layer 4; what is there several times runs again, with the same weights."
        in words
    )
    assert "`modeling_surgeon_program.py`" in words
    assert (
        "not plain or fused, because what runs several times, of layer 1, is stored as often as it runs"
        in words
    )


def test_ranks_of_vllm_are_said_where_heads_do_not_divide(tmp_path: Path) -> None:
    run_export(save_checkpoint(tmp_path / "even", num_layers=2), tmp_path / "of-even", "A1 F1")
    assert "vLLM shares" not in card_of(tmp_path / "of-even")
    config = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24}
    run_export(save_checkpoint(tmp_path / "six", num_layers=2, **config), tmp_path / "of-six", "A1 F1")
    words = " ".join(card_of(tmp_path / "of-six").split())
    assert (
        "``` vLLM shares 6 heads, 3 KV heads and 48 neurons among 1, 3, 6 ranks; `surgeon serve` takes"
        in words
    )


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("A0 F0#21 A1 F1", "vLLM shares 4 heads, 2 KV heads and 21 or 48 neurons among 1 rank;"),
        ("A0 F0#21 >A1 >F1", None),  # by surgeon's plugin, which cuts neurons anywhere
    ],
)
def test_ranks_of_vllm_are_said_where_neurons_do_not_divide(
    program: str, said: str | None, tmp_path: Path
) -> None:
    run_export(save_checkpoint(tmp_path / "tiny", num_layers=2), tmp_path / "edited", program)
    words = " ".join(card_of(tmp_path / "edited").split())
    assert ("vLLM shares" in words) == (said is not None)
    assert said is None or said in words


def test_factors_that_vllm_cannot_divide_are_left_to_the_plugin(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "tiny", "opt", num_layers=2)
    run_export(source, tmp_path / "edited", "A0@q5,o6 F0 A1 F1@up7")
    words = " ".join(card_of(tmp_path / "edited").split())
    assert (
        "vLLM needs surgeon's plugin, because OPT's attention in transformers goes by the number of all heads"
        in words
    )
    assert "PATH_OF_SURGEON vllm serve edited ```" in words
    assert "Unmodified" not in words


@pytest.mark.parametrize("form", PROGRAMS)
def test_the_code_in_it_loads_the_model(
    form: str, exported: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.chdir(exported[form].parent)
    ((code,),) = [re.findall(r"```python\n(.*?)```", card_of(exported[form]), re.DOTALL)]
    found: dict[str, Any] = {}
    exec(code.replace("print(", "said = ("), found)
    assert found["said"].startswith("<s>Once upon a time")
    ids = torch.arange(2, 12).view(1, -1)
    torch.testing.assert_close(
        logits_of(found["model"], ids), logits_of(surgeon.load(exported[form]), ids)
    )


# -- what the base model's card said --


def test_terms_and_names_are_carried_on(copied: Path, tmp_path: Path) -> None:
    front = (
        "license: llama2\nlanguage: [en, de]\ndatasets: a/b\ntags:\n- chat\n- chat\npipeline_tag: text-generation\n"
        "extra_gated_prompt: |\n  You agree:\n  to all\nextra_gated_fields: {Name: text}\nwidget: [{text: hi}]\n"
    )
    (tmp_path / "README.md").write_text(f"---\n{front}---\n# Base\n")
    set_source(copied, model="org/base", card=inherit(tmp_path).to_json())
    (copied / "LICENSE").unlink()
    write_card(copied, "mine")
    text, data = card_of(copied), ModelCard(card_of(copied)).data.to_dict()
    assert data["base_model"] == "org/base"
    assert "[org/base](https://huggingface.co/org/base)" in text
    assert (data["license"], data["language"], data["datasets"]) == ("llama2", ["en", "de"], "a/b")
    assert data["tags"] == ["chat", "surgeon"]
    assert (data["extra_gated_prompt"], data["extra_gated_fields"]) == (
        "You agree:\nto all\n",
        {"Name": "text"},
    )
    assert "widget" not in data
    assert "terms have to be accepted" in text
    assert "lies in this folder" not in text


@pytest.mark.parametrize(
    ("card", "note"),
    [
        (None, ""),
        (b"no front matter", ""),
        (
            b"---\nlanguage: no\n---\n",
            "Its README.md has language: False, which is not what belongs there.",
        ),
        (b"---\nlicense: [1]\n---\n", "Its README.md has license: [1], which is"),
        (
            b"---\nlicense: [\n---\n",
            "The front matter of its README.md cannot be read (line 3: not valid YAML: ",
        ),
        (b"---\n- a list\n---\n", "cannot be read (it is no mapping)"),
        (b"---\nlicense: \xff\n---\n", "cannot be read ('utf-8' codec"),
        (
            b"---\nlicense: 2023-99-12\n---\n",
            "cannot be read (line 2: '2023-99-12' is no valid timestamp",
        ),
        (
            b"---\nextra_gated_x: &a [*a, *a]\n---\n",
            "cannot be read (line 2: *a is an alias; write out what is meant",
        ),
        (
            b'---\nlicense: "\\ud800"\n---\n',
            "cannot be read (line 2: '\\ud800' has characters that are none",
        ),
        (b"---\nlicense: mit\n---\n" + b" " * (1 << 20), "cannot be read (the file has more than"),
    ],
)
def test_a_card_without_a_licence_or_damaged_is_no_obstacle(
    copied: Path, tmp_path: Path, card: bytes | None, note: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    if card is not None:
        (source / "README.md").write_bytes(card)
    (copied / "LICENSE").unlink()
    found = inherit(source)
    assert " ".join(found.notes).startswith(note) or note in found.notes[0]
    assert bool(found.notes) == bool(note)
    set_source(copied, card=found.to_json())
    write_card(copied, "mine")
    text = " ".join(card_of(copied).split())
    assert "said nothing of a licence when this checkpoint was made" in text
    assert ("could be carried on:" in text) == bool(note)
    assert "license" not in ModelCard(card_of(copied)).data.to_dict()


def set_source(folder: Path, **entries: Any) -> None:
    path = folder / "surgeon.json"
    report = json.loads(path.read_text())
    path.write_text(json.dumps(report | {"source": report["source"] | entries}))


# -- measurements --


@pytest.fixture
def identity(copied: Path) -> Identity:
    return identity_of(open_edited(copied))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a record into a folder of its own."""

    def write(name: str, **record: Any) -> Path:
        path = tmp_path / f"results-{len(list(tmp_path.iterdir()))}" / name
        path.parent.mkdir()
        path.write_text(json.dumps(record))
        return path

    return write


def on_text(model_hash: str, program: str, **more: Any) -> dict[str, Any]:
    numbers = {
        "perplexity": 7.5,
        "perplexity_interval": [7, 8],
        "divergence": None,
        "divergence_interval": None,
    }
    data = {"data": "/home/me/secret/wiki.txt", "data_hash": "d", "tokens": 1000}
    return {"model_hash": model_hash, "program": program, **numbers, **data, **more}


def quality_rows(folder: Path) -> dict[str, list[str]]:
    """Cells of the tables, by the first one."""
    rows = [line.strip("|").split("|") for line in card_of(folder).splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}


def test_quality_of_the_checkpoint_and_of_its_source(
    copied: Path, identity: Identity, write: Callable[..., Path]
) -> None:
    own = on_text(identity.model_hash, "A0 F0 A1 F1", divergence=0.25, divergence_interval=[0.2, 0.3])
    lm_eval = {"group_subtasks": {}, "higher_is_better": {"piqa": {"acc": True}}, "n-shot": {"piqa": 0}}
    values = {"alias": "piqa", "sample_len": 1838, "acc,none": 0.75, "acc_stderr,none": 0.01}
    provenance = {"model_hash": identity.source_hash, "program": PROGRAMS["fused"]}
    tasks = {
        "results": {"piqa": values},
        "surgeon": provenance,
        "configs": {"piqa": {"dataset_path": "ybisk/piqa"}},
    }
    files = [
        write("text.json", **own).parent,
        write("text.json", **on_text(identity.source_hash, DENSE, perplexity=7.0)),
        write("results_2026.json", **lm_eval, **tasks),
    ]
    write_card(copied, "mine", read_measured(files, identity))
    rows = quality_rows(copied)
    assert rows["perplexity (wiki.txt, 1,000 tokens)"] == ["7.5 (7 to 8)", "7 (7 to 8)"]
    assert rows["divergence from the original, nats per token (wiki.txt, 1,000 tokens)"] == [
        "0.25 (0.2 to 0.3)",
        "",
    ]
    assert rows["acc (piqa, 0-shot, 1,838 rows)"] == ["0.75 ± 0.01", ""]
    assert "secret" not in card_of(copied)


def test_a_search_brings_the_original_along(
    copied: Path, identity: Identity, write: Callable[..., Path]
) -> None:
    numbers = {
        "perplexity": 9.5,
        "divergence": 0.5,
        "divergence_low": None,
        "divergence_high": None,
        "tokens": 500,
    }
    best = {"trial": 3, "program": PROGRAMS["fused"], **numbers}
    record = {"model_hash": identity.source_hash, "data": "wikitext:wikitext-2-raw-v1", "data_hash": "d"}
    path = write(
        "search.json", **record, best=best, original=numbers | {"perplexity": 9, "divergence": 0}
    )
    unwritten = replace(identity, model_hash=None)
    write_card(copied, "mine", read_measured([path], unwritten))
    on = "(wikitext:wikitext-2-raw-v1, 500 tokens)"
    assert quality_rows(copied)[f"perplexity {on}"] == ["9.5", "9"]
    assert quality_rows(copied)[f"divergence from the original, nats per token {on}"] == ["0.5", ""]


def test_a_search_gives_its_numbers_on_text_that_it_did_not_see(
    copied: Path, identity: Identity, write: Callable[..., Path]
) -> None:
    """Those of the winner that held-out text left, with the original's on the same text."""
    seen = {
        "perplexity": 9.5,
        "divergence": 0.5,
        "divergence_low": 0.4,
        "divergence_high": 0.6,
        "tokens": 500,
    }
    unseen = {
        "perplexity": 12.5,
        "divergence": 0.75,
        "divergence_low": 0.7,
        "divergence_high": 0.8,
        "tokens": 300,
    }
    program = PROGRAMS["fused"]
    others = [{"trial": 1, "program": program, "seen": seen, "unseen": unseen, "verdict": "worse"}]
    held = {
        "data": "wiki.txt", "data_hash": "e", "original": unseen | {"perplexity": 12, "divergence": 0}, "winner": 1,
        "searched": {"trial": 3, "program": "A0", "seen": seen, "unseen": seen}, "runners_up": others,
    }  # fmt: skip
    record = {"model_hash": identity.source_hash, "data": "wikitext:wikitext-2-raw-v1", "data_hash": "d"}
    best = {"trial": 1, "program": program, **seen}
    path = write("search.json", **record, best=best, original=seen | {"perplexity": 9}, held_out=held)
    write_card(copied, "mine", read_measured([path], replace(identity, model_hash=None)))
    on = "(wiki.txt, 300 tokens that the search did not see)"
    rows = quality_rows(copied)
    assert rows[f"perplexity {on}"] == ["12.5", "12"]
    assert rows[f"divergence from the original, nats per token {on}"] == ["0.75 (0.7 to 0.8)", ""]
    assert not any("500 tokens" in name for name in rows)
    # Where healing has changed the choice, those of the winner then, as it was before.
    overturned = held | {"winner": 3, "searched": held["searched"] | {"unseen": seen | {"tokens": 300}}}
    path = write(
        "search.json", **record, best=best, original=seen, held_out=overturned, healing={"winner": 1}
    )
    write_card(copied, "mine", read_measured([path], replace(identity, model_hash=None)))
    assert quality_rows(copied)[f"perplexity {on}"] == ["12.5", "12"]


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        (
            "text.json",
            on_text(HASH, DENSE),
            r"measured on another model \(sha256:000000000000...\) than fused: it has",
        ),
        (
            "text.json",
            on_text("SOURCE", "A0 F0"),
            "measured under another program than that of fused: A0 F0$",
        ),
        (
            "text.json",
            on_text("SOURCE", DENSE, tokens="many"),
            r"holds what surgeon eval --data does not write \(ValueError: .*many",
        ),
        (
            "text.json",
            {"perplexity": 3},
            r"holds what surgeon eval --data does not write \(KeyError: 'model_hash'\)",
        ),
        ("search.json", {"model_hash": "SOURCE", "best": {"program": "A9"}}, "another program"),
        ("scan.json", {"model_hash": HASH}, "holds no results of surgeon eval or search"),
    ],
)
def test_what_was_measured_on_something_else_is_refused(
    identity: Identity, write: Callable[..., Path], name: str, record: dict[str, Any], said: str
) -> None:
    if record.get("model_hash") == "SOURCE":
        record = record | {"model_hash": identity.source_hash}
    with pytest.raises(ValueError, match=said):
        read_measured([write(name, **record)], identity)


def test_results_that_are_none(identity: Identity, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there are no results"):
        read_measured([tmp_path / "none"], identity)
    with pytest.raises(ValueError, match="looked for text.json, results_"):
        read_measured([tmp_path], identity)
    for text in ("{", "[]", "\udcff"):
        (tmp_path / "text.json").write_text(text, errors="surrogateescape")
        with pytest.raises(
            ValueError, match="is not valid JSON|should hold a JSON object|is no UTF-8 text"
        ):
            read_measured([tmp_path], identity)
    unwritten = replace(identity, model_hash=None)
    (tmp_path / "text.json").write_text(json.dumps(on_text(identity.model_hash, "A0 F0 A1 F1")))
    with pytest.raises(
        ValueError, match="what was measured on an exported checkpoint itself is for surgeon card"
    ):
        read_measured([tmp_path], unwritten)


# -- a card that is there already --


def test_only_its_own_card_is_replaced(copied: Path) -> None:
    require_own_card(copied)
    path = copied / "README.md"
    path.write_text(path.read_text().replace("Licence", "Licence (I asked)"))
    with pytest.raises(
        FileExistsError, match="was not written by surgeon, or was changed since.*pass `overwrite`"
    ):
        require_own_card(copied)
    write_card(copied, "mine")
    require_own_card(copied)
    path.write_bytes(b"\xff")
    with pytest.raises(FileExistsError, match="pass `overwrite`"):
        require_own_card(copied)
    path.unlink()
    require_own_card(copied)


def test_only_what_was_exported_has_a_card(tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="has no surgeon.json; cards are for checkpoints"):
        open_edited(tiny_checkpoint)


def test_an_identity_is_of_the_stored_program(exported: dict[str, Path]) -> None:
    programs = {form: identity_of(open_edited(folder)).program for form, folder in exported.items()}
    assert programs == {
        "plain": Program.dense(2),
        "fused": Program.dense(2),
        "program": Program.parse(PROGRAMS["program"]),
    }
