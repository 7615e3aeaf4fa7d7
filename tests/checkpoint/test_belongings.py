"""What lies beside a model's weights goes into checkpoints made of it, or is named: for every writer of checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

import surgeon
from surgeon.checkpoint.belongings import PATTERNS_FOR_THE_HUB, companions_of, left_behind, left_by
from surgeon.checkpoint.describe import compare, describe
from surgeon.checkpoint.stored import Checkpoint
from surgeon.checkpoint.tensor_file import verify
from surgeon.exports.in_memory import export_with_adapter, export_with_codas
from surgeon.exports.unfuse import unfuse
from surgeon.models.edit import edit
from surgeon.opened import open_model
from tests.checkpoint.helpers import run_export
from tests.furnished import BECOMES, check, expected, furnish
from tests.tiny_models import save_checkpoint, tiny_tokenizer

PROGRAMS = {"plain": "A0 F0 A2 F2", "fused": "A0 F0 [A1 A2] [F1 F2]", "program": "A0 F0 >A1 >F1 A2 F2"}
HUB = "models--someone--tiny"


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with everything beside it; not to be changed."""
    return furnish(save_checkpoint(tmp_path_factory.mktemp("furnished") / "tiny", num_layers=3))


@pytest.fixture
def source(furnished: Path, tmp_path: Path) -> Path:
    """The same, the test's own."""
    return Path(shutil.copytree(furnished, tmp_path / "source"))


@pytest.mark.parametrize("form", PROGRAMS)
def test_what_an_export_carries_on(form: str, furnished: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.warns(UserWarning, match="left behind in .*tiny: ") as told:
        run_export(furnished, target, PROGRAMS[form])
    check(furnished, target, form)
    words = str(told[0].message)
    assert "notes.txt" in words
    assert "optimizer.pt" not in words  # which nobody misses
    assert "layers_own.py, modeling_own.py (code that reads no" in words
    assert verify(target, target / "surgeon.json") > len(BECOMES) // 2
    assert "modeling_own" not in (target / "config.json").read_text()
    tokenizer = AutoTokenizer.from_pretrained(
        target, trust_remote_code=False, config=open_model(furnished).config
    )
    assert set(tokenizer.chat_template) == {"default", "rag", "tool_use"}
    run_export(furnished, target, PROGRAMS[form], overwrite=True)  # it is a checkpoint and no more


@pytest.mark.parametrize(
    ("write", "form"),
    [
        *(("export", form) for form in PROGRAMS),
        *(("codas", form) for form in PROGRAMS),
        *(("adapter", form) for form in ("plain", "program")),  # which keep modules as they are
    ],
)
def test_what_a_model_in_memory_carries_on(
    write: str, form: str, furnished: Path, tmp_path: Path
) -> None:
    """Also where the place is given by name only, as `heal` has it."""
    model, target = edit(surgeon.load(furnished), PROGRAMS[form]), tmp_path / "target"
    if write == "adapter":
        adapted: Any = get_peft_model(
            model, LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)
        )
        export_with_adapter(adapted.eval(), target)
        target /= "base"
    elif write == "codas":
        export_with_codas(model, target, ["0:3"], [6], 0, [])
    else:
        surgeon.export(model, target)
    check(furnished, target, form)
    assert json.loads((target / "surgeon.json").read_text())["source"]["card"]["metadata"] == {
        "license": "mit"
    }


def test_a_fused_checkpoint_that_is_taken_apart_carries_on_what_it_has(
    furnished: Path, tmp_path: Path
) -> None:
    run_export(furnished, tmp_path / "fused", PROGRAMS["fused"])
    surgeon.export(unfuse(tmp_path / "fused"), tmp_path / "again")
    kept = {path.relative_to(tmp_path / "fused") for path in (tmp_path / "fused").rglob("*")}
    assert {path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*")} == kept
    assert left_by(json.loads((tmp_path / "again" / "surgeon.json").read_text())) == {}
    assert compare(describe(tmp_path / "fused"), describe(tmp_path / "again")).files == {}


def test_a_given_tokenizer_stands_in_for_the_folders_own(furnished: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "new", "poems": "new, too"}
    surgeon.export(surgeon.load(furnished), tmp_path / "target", tokenizer=tokenizer)
    found = {
        path.relative_to(tmp_path / "target").as_posix() for path in (tmp_path / "target").rglob("*")
    }
    assert {"LICENSE", "preprocessor_config.json", "additional_chat_templates/poems.jinja"} <= found
    assert not {"additional_chat_templates/rag.jinja", "tokenizer.model", "merges.txt"} & found
    assert AutoTokenizer.from_pretrained(tmp_path / "target").chat_template == tokenizer.chat_template


def test_generation_settings_that_were_changed_are_those_of_the_model(
    furnished: Path, tmp_path: Path
) -> None:
    model = surgeon.load(furnished)
    model.generation_config.max_new_tokens = 9
    surgeon.export(model, tmp_path / "target")
    assert (
        json.loads((tmp_path / "target" / "generation_config.json").read_text())["max_new_tokens"] == 9
    )


def test_the_card_says_what_stayed_behind(furnished: Path, tmp_path: Path) -> None:
    run_export(furnished, tmp_path / "target", PROGRAMS["plain"])
    card = " ".join((tmp_path / "target" / "README.md").read_text().split())
    assert (
        "the base model's weights: `assets/`, `notes.txt` (not known to belong to a model); `codas/`"
        in card
    )
    for name in ("LICENSE", "LICENSES/Apache-2.0.txt", "NOTICE", "USE_POLICY.md", "license.txt"):
        assert f"`{name}`" in card.partition("## Licence")[2]


def test_a_folder_of_the_hubs_cache(
    furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose files, in folders inside too, are links to blobs; also of a model that transformers loaded by its name."""
    snapshot, blobs = tmp_path / HUB / "snapshots" / ("0" * 40), tmp_path / HUB / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(path for path in furnished.rglob("*") if path.is_file()):
        shutil.copyfile(path, blobs / str(number))
        link = snapshot / path.relative_to(furnished)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blobs / str(number))
    (tmp_path / HUB / "refs").mkdir()
    (tmp_path / HUB / "refs" / "main").write_text("0" * 40)
    run_export(snapshot, tmp_path / "target", PROGRAMS["program"])
    check(furnished, tmp_path / "target", "program")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = surgeon.load(snapshot)
    model.name_or_path = "someone/tiny"
    surgeon.export(edit(model, PROGRAMS["fused"]), tmp_path / "by-name")
    check(furnished, tmp_path / "by-name", "fused")
    model.name_or_path = "someone/gone"
    with pytest.warns(
        UserWarning, match=r"someone/gone, .* is not found here, so neither a tokenizer nor a licence"
    ):
        surgeon.export(model, tmp_path / "gone")


def test_what_goes_along_may_be_a_link_to_somewhere_and_not_to_nothing(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "far.jinja").write_text("far")
    link = source / "additional_chat_templates" / "far.jinja"
    link.symlink_to(tmp_path / "far.jinja")
    run_export(source, tmp_path / "linked", PROGRAMS["plain"])
    written = tmp_path / "linked" / link.relative_to(source)
    assert (written.read_text(), written.is_symlink()) == ("far", False)
    link.unlink()
    link.symlink_to(source / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"far.jinja is a link to .*nowhere, which is not there"):
        run_export(source, tmp_path / "target", PROGRAMS["plain"])
    link.unlink()
    (source / "notes.txt").unlink()
    (source / "notes.txt").symlink_to(tmp_path / "nowhere")  # what stays behind may lead anywhere
    run_export(source, tmp_path / "target", PROGRAMS["plain"])


def test_odd_names_and_odd_configurations_are_no_obstacle(source: Path, tmp_path: Path) -> None:
    (source / "LICENSE\udcff").write_text("odd")
    (source / "two\nlines`.txt").write_text("odd")
    for name in ("processor_config.json", "generation_config.json"):
        (source / name).write_text("[")
    surgeon.export(surgeon.load(source), tmp_path / "target")
    assert (tmp_path / "target" / "processor_config.json").read_text() == "["
    left = left_by(json.loads((tmp_path / "target" / "surgeon.json").read_text()))
    assert {r"LICENSE\udcff", r"two\nlines`.txt"} <= left.keys()
    assert r"`two\nlines'.txt`" in (tmp_path / "target" / "README.md").read_text()


def test_who_reads_names_by_case_gets_all_of_them() -> None:
    """The hub's client compares whole paths, case and all."""
    from huggingface_hub.utils import filter_repo_objects

    names = [name for name, becomes in BECOMES.items() if not isinstance(becomes, str)]
    wanted = [name for name in names if not name.endswith((".py", ".json"))]
    assert (
        list(filter_repo_objects(names, allow_patterns=[*PATTERNS_FOR_THE_HUB, "*.py", "*.json"]))
        == names
    )
    assert list(filter_repo_objects(wanted, allow_patterns=PATTERNS_FOR_THE_HUB)) == wanted


def test_all_of_it_is_compared(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    assert compare(describe(source), describe(copy)).is_equal
    (copy / "additional_chat_templates" / "rag.jinja").write_text("another")
    (copy / "additional_chat_templates" / "tool_use.jinja").unlink()
    (copy / "preprocessor_config.json").write_text('{"size": 1}')
    (copy / "license.txt").unlink()
    (copy / "layers_own.py").write_text("layers = 2")
    (copy / "optimizer.pt").unlink()  # of which nothing goes on, and nothing is said
    assert compare(describe(source), describe(copy)).files == {
        "additional_chat_templates/rag.jinja": "different",
        "additional_chat_templates/tool_use.jinja": "only in A",
        "layers_own.py": "different",
        "license.txt": "only in A",
        "preprocessor_config.json": "different",
    }


def test_many_names_are_not_all_said() -> None:
    left = {f"{number}.png": "not known to belong to a model" for number in range(9)}
    assert (
        left_behind(left)
        == "0.png, 1.png, 2.png, 3.png, 4.png, 5.png and 3 more (not known to belong to a model)"
    )
    assert left_behind({"optimizer.pt": "of training"}) == ""


@pytest.mark.parametrize("told", [{}, {"companions": 3}, {"companions": {"left_behind": [1]}}])
def test_of_reports_that_say_nothing_of_it_nothing_is_said(told: dict[str, Any]) -> None:
    assert left_by(told) == {}


def test_a_folder_says_the_same_of_itself(furnished: Path) -> None:
    found = companions_of(furnished, Checkpoint(furnished).file_names)
    assert found.left == expected()
