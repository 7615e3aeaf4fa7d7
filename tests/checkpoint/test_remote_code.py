"""The modeling files inside checkpoints: they load where there is no surgeon, and are what a reviewer expects."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import surgeon
from surgeon.checkpoint.forms import FORMS
from surgeon.checkpoint.remote_code import modeling_surgeon_program as shipped
from surgeon.language.program import Program
from surgeon.models.families import FAMILIES, family_of
from surgeon.models.weights import family_entry
from tests.checkpoint.helpers import IDS, logits_of, relative_error, run_export, save_source
from tests.tiny_models import DENSE_FAMILIES, tiny_model

SHIPPED = {form.name: form.shipped for form in FORMS.values() if form.shipped is not None}
WITHOUT_SURGEON = """
import pickle
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "surgeon":
            raise ImportError("there is no surgeon here")

sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModel, AutoModelForCausalLM
torch.set_num_threads(1)
ids = torch.load(sys.argv[1])
found = {}
for folder in sys.argv[2:]:
    code = {"trust_remote_code": True}
    model = AutoModelForCausalLM.from_pretrained(folder, **code).eval()
    with torch.no_grad():
        logits = model(ids).logits
        body = AutoModel.from_pretrained(folder, **code).eval()
        from_body = model.lm_head(body(ids).last_hidden_state)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    tokens = model.generate(ids, **options)
    assert pickle.loads(pickle.dumps(model.config)).to_dict() == model.config.to_dict()
    model.save_pretrained(folder + "-again")
    again = AutoModelForCausalLM.from_pretrained(folder + "-again", **code).eval()
    uncached = model.generate(ids, use_cache=False, **options)
    found[folder] = [logits, from_body, again(ids).logits.detach(), tokens, uncached]
    assert type(model).__module__.startswith("transformers_modules"), type(model)
assert not any(name.partition(".")[0] == "surgeon" for name in sys.modules)
torch.save(found, sys.argv[1])
"""


@pytest.mark.thorough
def test_modeling_files_load_and_generate_where_there_is_no_surgeon(tmp_path: Path) -> None:
    save_source(tmp_path / "llama", attention_bias=True)
    programs = {
        "llama-fused": "A0 F0 [A1 A2 A3] [F1 F2 F3] A5 F5",
        "llama-program": "A0 F0 >[A1 A2] >[F1 F2] {A3/2:0 F3/2:0 | A3/2:1 F3/2:1} A5 F5",
        "gpt_neo-program": "A0 F0 >A1 >F1 A0 F0",
    }
    save_source(tmp_path / "gpt_neo", "gpt_neo", num_layers=2)
    for name, program in programs.items():
        run_export(tmp_path / name.partition("-")[0], tmp_path / name, program)
    torch.save(IDS, tmp_path / "exchanged.pt")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    folders = [str(tmp_path / name) for name in programs]
    command = [sys.executable, "-c", WITHOUT_SURGEON, str(tmp_path / "exchanged.pt"), *folders]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "exchanged.pt")
    for name, program in programs.items():
        edited = surgeon.edit(surgeon.load(tmp_path / name.partition("-")[0]), program)
        expected = logits_of(edited)
        logits, from_body, again, cached, uncached = found[str(tmp_path / name)]
        for result in (logits, from_body, again):
            assert relative_error(result, expected) < 1e-5, name
        assert torch.equal(cached, uncached), name
        assert torch.equal(
            cached, edited.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)
        ), name


@pytest.mark.parametrize("form", list(SHIPPED))
def test_modeling_files_need_torch_and_transformers_only(form: str) -> None:
    tree = ast.parse(SHIPPED[form].text())
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0]  # type: ignore[union-attr]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= {"torch", "transformers", *sys.stdlib_module_names}
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))


@pytest.mark.parametrize("form", list(SHIPPED))
def test_modeling_files_name_no_architecture(form: str) -> None:
    nodes = ast.walk(ast.parse(SHIPPED[form].text()))
    assert not {node.value for node in nodes if isinstance(node, ast.Constant)} & set(FAMILIES)


@pytest.mark.parametrize("model_type", DENSE_FAMILIES)
def test_config_json_describes_the_family(model_type: str) -> None:
    config = tiny_model(model_type, 1).config
    family = family_of(config)
    row = json.loads(json.dumps(family_entry(family, config)._asdict()))
    config.surgeon_family = row
    own = shipped.family_in(config)
    (attention,) = own.attentions
    assert attention["called"] == list(family.attention.stages)
    assert own.feed_forward == family.mlp.stages
    projections = (*family.attention.projections, *family.mlp.projections)
    assert set(own.reads) == {p.path for p in projections if p.reads_stream}
    assert set(own.writes) == {p.path for p in projections if not p.reads_stream}
    layer = tiny_model(model_type, 1).get_submodule(family.layers)[0]
    for path, shares in own.packed.items():
        assert layer.get_submodule(path).weight.numel() % sum(shares) == 0
    for path in own.counts:
        assert isinstance(attrgetter(path)(layer), int), path
    assert isinstance(attrgetter(attention["slot"])(layer), int)


def test_what_describes_no_architecture_is_refused() -> None:
    config = tiny_model("llama", 1).config
    for row in (None, "llama", {"attention": []}):
        config.surgeon_family = row
        with pytest.raises(
            ValueError, match="surgeon_family must describe the architecture by attention"
        ):
            shipped.family_in(config)


@pytest.mark.parametrize("form", list(SHIPPED))
def test_modeling_files_have_the_classes_that_configurations_name(form: str) -> None:
    for model_type in DENSE_FAMILIES:
        for name in SHIPPED[form].auto_map(model_type).values():
            assert isinstance(
                getattr(
                    sys.modules[SHIPPED[form].model_class(model_type).__module__], name.partition(".")[2]
                ),
                type,
            )


@pytest.mark.parametrize("name", ["ProgramConfig", "ProgramNobodyModel", "Llama", "__path__"])
def test_the_modeling_file_has_no_other_names(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(shipped, name)


@pytest.mark.parametrize(
    "text",
    [
        "A0 F0",
        "[A1 A2] [F1 F2 F3] >A3 >[F4 F10]",
        "{A0 F0 | A1/2:0 {F1 | >F2} | [A3 F3]} A12/16:15",
    ],
)
def test_its_parser_reads_what_surgeon_writes(text: str) -> None:
    def show(nodes: list[object]) -> str:
        return " ".join(map(show_node, nodes))

    def show_node(node: object) -> str:
        if isinstance(node, shipped.Fork):
            return "{" + " | ".join(map(show, node.branches)) + "}"
        assert isinstance(node, shipped.Step)
        names = [
            f"{s.kind}{s.layer}" + (f"/{s.piece[1]}:{s.piece[0]}" if s.piece else "")
            for s in node.sublayers
        ]
        return (">" if node.late else "") + (names[0] if len(names) == 1 else f"[{' '.join(names)}]")

    assert show(shipped.parse(text)) == text == str(Program.parse(text))


@pytest.mark.parametrize("text", ["A0~A1 F0", "B0", "A0 F0;", "A0 f0"])
def test_its_parser_refuses_what_it_does_not_know(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read surgeon_program"):
        shipped.parse(text)
    with pytest.raises(ValueError, match="surgeon_program must be a text, .* not 5"):
        shipped.parse(5)


def test_loading_a_changed_modeling_file_does_not_run_it_in_surgeon(tmp_path: Path) -> None:
    save_source(tmp_path / "source")
    for name, program in (("fused", "[A0 A1] [F0 F1]"), ("program", ">A0 F0")):
        run_export(tmp_path / "source", tmp_path / name, program)
        (file,) = (tmp_path / name).glob("*.py")
        file.write_text("raise SystemExit('code from the checkpoint was run')")
        assert logits_of(surgeon.load(tmp_path / name)).isfinite().all()
