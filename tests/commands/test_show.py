"""`surgeon show` as a user runs it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

import surgeon
from surgeon.checkpoint.stored import Checkpoint
from tests.commands.conftest import Run
from tests.stored import configure

OPERATIONS = {
    "plain": "- prune: {layers: '1:2'}",
    "fused": "- pair: {layers: '1:3'}",
    "program": "- ladder: {layers: '2:4'}",
}
PROGRAMS = {
    "plain": "A0 F0 (no 1) A2 F2 A3 F3",
    "fused": "A0 F0 [A1 A2] [F1 F2] A3 F3",
    "program": "A0 F0 A1 F1 >A2 >F2 >A3 >F3",
}


def facts(out: str) -> dict[str, str]:
    """What was said, by label; of several with one label, all."""
    found: dict[str, str] = {}
    for line in out.splitlines():
        assert len(line) <= 80 or line.startswith("picture")  # a path is not broken up
        if line[0] != " ":
            label = line.split()[0]
        found[label] = f"{found.get(label, '')} {line.removeprefix(label).strip()}".strip()
    return found


@pytest.mark.parametrize("form", OPERATIONS)
def test_a_recipe_and_the_checkpoint_made_of_it(
    form: str, surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "edit.yaml"
    weights = Checkpoint(tiny_checkpoint).model_hash()
    bound = f"weights: sha256:{weights}\n"
    recipe.write_text(
        f"surgeon: 1\nmodel: {tiny_checkpoint}\n{bound}operations:\n  {OPERATIONS[form]}\n"
    )
    code, out, err = surgeon_says("show", recipe, "-o", tmp_path / "edit.png")
    assert (code, err) == (0, "")
    said = facts(out)
    assert said["name"].startswith("edit.yaml, a recipe for ")
    assert said["program"] == PROGRAMS[form]
    assert said["operation"] == OPERATIONS[form].removeprefix("- ").replace("'", '"')
    assert said["weights"] == weights
    assert (tmp_path / "edit.png").read_bytes().startswith(b"\x89PNG")

    assert surgeon_says("export", recipe, "-o", tmp_path / "edited")[0] == 0
    code, out, err = surgeon_says("show", tmp_path / "edited")
    assert (code, err) == (0, "")
    written = facts(out)
    assert written["name"].startswith(f"edited, {tiny_checkpoint.name} in {form} form, by surgeon ")
    assert {key: written[key] for key in ("program", "depth", "syncs")} == {
        key: said[key] for key in ("program", "depth", "syncs")
    }
    assert written["proof"].startswith("on 128 random tokens")
    # What it says of the model is the same; only a checkpoint has weights.
    assert written["model"].startswith(f"{said['model']};")


def test_ranks_and_how_many_parameters_are_left(
    surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "ranks.yaml"
    ranks = "{q: 6, k: 6, up: 7, down: [8, null, 8, 8]}"
    recipe.write_text(
        f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  - lowrank: {{layers: '0:4', ranks: {ranks}}}\n"
    )
    assert surgeon_says("export", recipe, "-o", tmp_path / "edited")[0] == 0
    source, edited = Checkpoint(tiny_checkpoint), Checkpoint(tmp_path / "edited")
    sizes = [
        sum(
            math.prod(one.shape(name))
            for name in one.names()
            if name.startswith("model.layers.") and "norm" not in name
        )
        for one in (edited, source)
    ]
    for what in (recipe, tmp_path / "edited"):
        code, out, err = surgeon_says("show", what)
        assert (code, err) == (0, "")
        said = facts(out)
        assert said["program"] == "A0 F0 A1 F1 A2 F2 A3 F3"
        assert said["sizes"] == "layers 0, 2 to 3: q, k 6; up 7; down 8 layer 1: q, k 6; up 7"
        share = sizes[0] / sizes[1]
        assert (
            said["parameters"] == f"{sizes[0]:,} of {sizes[1]:,} in the layers' matrices ({share:.1%})"
        )


def test_widths_and_how_many_parameters_are_left(
    surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "width.yaml"
    matrices = 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    narrow = matrices - 3 * (2 * 16 * 32 + 2 * 8 * 32 + 3 * 36 * 32)
    whole = sum(p.numel() for p in surgeon.load(tiny_checkpoint).parameters())
    for layers, form in (("0:3", "fused"), ("0:4", "plain")):
        text = f"operations:\n  - width: {{layers: '{layers}', heads: 1, neurons: 0.25}}\n"
        recipe.write_text(f"surgeon: 1\nmodel: {tiny_checkpoint}\n{text}")
        assert surgeon_says("export", recipe, "-o", tmp_path / form)[0] == 0
        said = facts(surgeon_says("show", tmp_path / form)[1])
        assert said["sizes"] == f"layers 0 to {int(layers[-1]) - 1}: KV groups 1; neurons 12"
        if form == "fused":
            expected = f"{narrow:,} of {matrices:,} in the layers' matrices ({narrow / matrices:.1%})"
        else:  # config.json says it of all layers
            left = sum(p.numel() for p in surgeon.load(tmp_path / form).parameters())
            expected = f"{left:,} of {whole:,} ({left / whole:.1%})"
        assert said["parameters"] == expected


def test_an_unedited_model(surgeon_says: Run) -> None:
    code, out, _ = surgeon_says("show", "demo")
    assert code == 0
    assert facts(out) == {
        "name": "demo, a checkpoint",
        "model": "Llama, 128 wide, 4 heads over 2 KV heads, vocabulary 2048; 3.2M parameters, 6.33 MB",
        "depth": "16 of 16 layers one after the other",
        "syncs": "32 per forward pass on two ranks (unedited: 32)",
        "program": "(layers 0-15 as they were)",
    }


def test_a_folder_written_from_python(surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    import surgeon

    model = surgeon.load(tiny_checkpoint)
    surgeon.edit(model, PROGRAMS["program"])
    model.save_pretrained(tmp_path / "saved")
    code, out, _ = surgeon_says("show", tmp_path / "saved")
    assert code == 0
    assert facts(out)["program"] == PROGRAMS["program"]
    assert facts(out)["name"] == "saved, a checkpoint in program form"


def test_what_it_refuses(surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    for arguments, message in [
        ((tmp_path / "none.yaml",), "there is no recipe"),
        ((tmp_path,), "has no config.json"),
        ((tiny_checkpoint, "-o", tmp_path / "x.pdf"), "ends in .png, not 'x.pdf'"),
    ]:
        code, out, err = surgeon_says("show", *arguments)
        assert (code, out) == (1, "")
        assert message in err
        assert len(err.splitlines()) == 1


def test_what_is_left_of_a_model(surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Nothing is refused, by every command in the same words; that no token looks at another is said."""
    recipe = tmp_path / "none.yaml"
    recipe.write_text(
        f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  - prune: {{layers: ['0:2', '2:4']}}\n"
    )
    said = (
        f"error: {recipe}:4: prune: the program is empty: it has no steps; keep at least one sublayer\n"
    )
    for command, *options in (
        ["show"],
        ["show", "-o", tmp_path / "x.png"],
        ["export", "-o", tmp_path / "out"],
    ):
        assert surgeon_says(command, recipe, *options) == (1, "", said)
    assert not (tmp_path / "x.png").exists()
    recipe.write_text(recipe.read_text().replace("]}", "], sublayers: attention}"))
    code, out, _ = surgeon_says("show", recipe)
    assert code == 0
    assert facts(out)["note"] == "there is no attention, so that no token looks at another"


def test_records_and_programs_that_are_none(
    surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, folder)
    report = {"program": "A0 F0", "source": {"model": "m", "num_layers": 4}}
    for change, message in (
        ({"source": {"model": "m", "num_layers": 10**12}}, "lacks the program or its source"),
        ({"source": {"model": "m", "num_layers": True}}, "lacks the program or its source"),
        ({"proof": {}}, "is not what surgeon export writes: its proof is {}; export again"),
        (
            {"proof": {"tokens": 1, "exact": None, "written": 0, "dtype": "float32"}},
            "its proof is {'tokens': 1,",
        ),
    ):
        (folder / "surgeon.json").write_text(json.dumps(report | change))
        code, _, err = surgeon_says("show", folder)
        assert (code, message in err) == (1, True), err
    (folder / "surgeon.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"surgeon_program": 5}))
    for command, others in (("show", ()), ("show", (tiny_checkpoint,)), ("card", ())):
        code, _, err = surgeon_says(command, folder, *others)
        assert (code, "has surgeon_program: 5, which is no program" in err) == (1, True), err


def test_an_exported_checkpoint_can_be_verified(
    surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "edit.yaml"
    recipe.write_text(f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  {OPERATIONS['plain']}\n")
    assert surgeon_says("export", recipe, "-o", tmp_path / "edited")[0] == 0
    code, out, _ = surgeon_says("show", tmp_path / "edited", "--verify")
    assert code == 0
    assert "files are as they were written" in facts(out)["files"]
    weights = tmp_path / "edited" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")  # the end of a gain near 1
    for what, message in (
        (tmp_path / "edited", "model.safetensors has another content than was written"),
        (tiny_checkpoint, "has no surgeon.json, so it cannot be verified"),
        (recipe, "is a recipe, which has no files to verify"),
    ):
        code, out, err = surgeon_says("show", what, "--verify")
        assert (code, out) == (1, "")
        assert message in err
        assert len(err.splitlines()) == 1


def test_codas_are_said(surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    (folder / "codas").mkdir()
    (folder / "codas" / "rack-0.safetensors").touch()
    index = {
        "format": 1,
        "racks": ["0:2", "2:4"],
        "nodes": [4, 8],
        "depth": 1,
        "weights": "",
        "program": "A0 F0",
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "codas" / "codas.json").write_text(json.dumps(index | {"config": config}))
    said = facts(surgeon_says("show", str(folder))[1])["codas"]
    assert said == "of 1 layer for every rack but the last; racks of the layers 0:2, 2:4"


def test_native_tracks_and_a_recipe_for_them(
    surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    configure(tiny_checkpoint, model_type="surgeon_llama", surgeon_program="{A0 F0 A1 F1 | A2 F2 A3 F3}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f'surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  - prune: {{layers: "1:3"}}\n'
    )
    code, out, _ = surgeon_says("show", recipe)
    assert code == 0
    assert "{A0 F0 | A3 F3}" in out
    assert "1 per forward pass on two ranks (unedited: 1)" in out
    configure(tiny_checkpoint, model_type="surgeon_llama", surgeon_program="A0 F0 >A1 F1 A2 F2 A3 F3")
    code, _, err = surgeon_says("show", recipe)
    assert code == 1
    assert "is an edited model, and operations change whole layers; name the model it was made of" in err


def test_what_an_export_left_behind_is_said(
    surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """By the command that leaves it, and later; a chat template in a folder inside is verified, and compared."""
    templates = tiny_checkpoint / "additional_chat_templates"
    templates.mkdir()
    (templates / "rag.jinja").write_text("{{ messages }}")
    for name in ("notes.txt", "setup.py", "optimizer.pt"):
        (tiny_checkpoint / name).write_text(name)
    recipe = tmp_path / "edit.yaml"
    recipe.write_text(f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  {OPERATIONS['plain']}\n")
    code, _, err = surgeon_says("export", recipe, "-o", tmp_path / "edited")
    left = "notes.txt (not known to belong to a model); setup.py (code that reads no texts or images)"
    assert f"warning: left behind in {tiny_checkpoint}: {left}\n" in err
    code, out, _ = surgeon_says("show", tmp_path / "edited", "--verify")
    assert code == 0
    assert f"behind {left}" in facts(out)["left"]
    assert (
        "files       setup.py: only in A\n"
        in surgeon_says("show", tiny_checkpoint, tmp_path / "edited")[1]
    )
    (tmp_path / "edited" / "additional_chat_templates" / "rag.jinja").write_text("{{ message }}.")
    code, _, err = surgeon_says("show", tmp_path / "edited", "--verify")
    assert code == 1
    assert "additional_chat_templates/rag.jinja has another content than was written" in err
    code, out, _ = surgeon_says("show", tiny_checkpoint, tmp_path / "edited")
    assert "files       additional_chat_templates/rag.jinja: different\n" in out


def test_in_what_two_differ(surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "edit.yaml"
    recipe.write_text(f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  {OPERATIONS['fused']}\n")
    assert surgeon_says("export", recipe, "-o", tmp_path / "edited")[0] == 0
    code, out, err = surgeon_says("show", tiny_checkpoint, tmp_path / "edited")
    assert code == 0
    assert err.startswith("comparing: done")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    for line in (
        "name        A: tiny-llama, a checkpoint",
        "depth       A: 4 of 4 layers one after the other",
        "            B: 3 of 4 layers one after the other",
        "files       modeling_surgeon_fused.py: only in B",
        "tensors     21 equal, bit for bit",
    ):
        assert line in lines
    said = " ".join(out.split())
    assert "only in A 18: layer 1 input_layernorm.weight" in said
    assert "only in B 9: layer 1+2 input_layernorm.weight" in said
    assert "config num_hidden_layers: 4 | 3" in said
    code, out, err = surgeon_says("show", recipe, tmp_path / "edited")
    assert (code, err) == (0, "")
    assert "program" not in facts(out)
    assert "depth" not in facts(out)
    code, _, err = surgeon_says("show", recipe, tmp_path / "edited", "-o", tmp_path / "a.png")
    assert (code, "-o and --verify are for one checkpoint" in err) == (1, True)
