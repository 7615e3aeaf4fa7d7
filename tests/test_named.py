"""What texts of a user's name, and that everything that takes one takes what can be no file's name for none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.checkpoint.config import locate, read_config_only
from surgeon.checkpoint.describe import describe
from surgeon.cost.hardware import load_hardware
from surgeon.language.recipe import read_recipe
from surgeon.named import (
    HubName,
    hub_name,
    is_gguf,
    is_path,
    is_program,
    is_recipe,
    model_name,
    name_of,
    on_disk,
    public,
    split_values,
)
from surgeon.opened import open_edited, open_model
from surgeon.quality.sources import documents, file_and_column

LONG = " ".join(f"A{k} F{k}" for k in range(60))  # longer than a name on any file system may be
UNNAMEABLE = [LONG, "x" * 5000, "no\0name", "lone\ud800surrogate"]


@pytest.mark.parametrize("text", ["", "missing", *UNNAMEABLE])
def test_what_no_file_is_called_is_on_no_disk(text: str) -> None:
    assert on_disk(text) is None


def test_files_folders_and_links_are_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "there").symlink_to("file")
    (tmp_path / "gone").symlink_to("nothing")
    (tmp_path / "round").symlink_to("round")
    assert on_disk(tmp_path) == tmp_path == on_disk(str(tmp_path))
    assert on_disk(tmp_path / "there") == tmp_path / "there"
    assert [on_disk(tmp_path / name) for name in ("gone", "round", "file/inside")] == [None] * 3


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "recipe.yaml").write_text("surgeon: 1\nmodel: demo\noperations: []\n")
    (tmp_path / "~nobody-has-this-name").mkdir()
    assert locate("~/model") == tmp_path / "model"
    assert file_and_column("~/text.txt") == (tmp_path / "text.txt", None)
    assert read_recipe(Path("~/recipe.yaml")).model == "demo"
    assert name_of("~") == tmp_path.name
    assert on_disk("~nobody-has-this-name") == Path("~nobody-has-this-name")


def test_a_folder_that_may_not_be_searched_is_no_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", forbidden)
    with pytest.raises(
        PermissionError, match=r"no telling whether there is locked/model: Permission denied; see who"
    ):
        on_disk("locked/model")


@pytest.mark.parametrize(
    "text",
    [
        LONG,
        "A0",
        "A10 F10",
        " >A1 >F1",
        "[A1 A2]",
        "{A1 F1 | A2 F2}",
        "A1/2:0 F1/2:0",
        "A0~A1",
        "A0@q64 F0",
        "A0F0",
    ],
)
def test_programs(text: str) -> None:
    assert is_program(text)


@pytest.mark.parametrize(
    "text", ["A100.yaml", "F5-tts/base", "A21/jamba", "F16", "demo", "lp", "a0 f0", "", "B1 F1"]
)
def test_names_are_no_programs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "F16").mkdir()  # which is on the disk here
    assert not is_program(text)


def test_recipes_hub_names_and_paths() -> None:
    assert [is_recipe(text) for text in ("a.yaml", "a/B.YML", "a.json", "yaml", LONG)] == [
        True,
        True,
        *[False] * 3,
    ]
    names = (
        "llama",
        "llama@main",
        "./a/b",
        "a/b/c",
        "~/model",
        "a b/c",
        "a/b\0",
        "-a/b",
        "a/b@",
        "a/b@c@d",
        "",
    )
    assert [hub_name(text) for text in names] == [None] * len(names)
    paths = ("/a", "./a", "..", "~/a", "a/b/c", "a/b", "owner/data:a/b:train", "name", "a/b@refs/pr/1")
    assert [is_path(text) for text in paths] == [True] * 5 + [False] * 4
    assert [public(text) for text in paths[3:6]] == ["a", "c", "a/b"]


@pytest.mark.parametrize(
    ("text", "revision"),
    [
        ("a-b/C.1", None),
        ("https://huggingface.co/a-b/C.1", None),
        ("http://www.hf.co/a-b/C.1/?library=transformers#usage", None),
        ("huggingface.co/a-b/C.1/tree/main/", "main"),
        ("https://huggingface.co/a-b/C.1/commit/0123abc", "0123abc"),
        ("https://huggingface.co/a-b/C.1/tree/refs%2Fpr%2F5", "refs/pr/5"),
        ("hf://a-b/C.1", None),
        ("hf://a-b/C.1@v1.0", "v1.0"),
        ("a-b/C.1@refs/pr/5", "refs/pr/5"),
    ],
)
def test_addresses_of_the_hub(text: str, revision: str | None) -> None:
    name = HubName("a-b/C.1", revision)
    assert hub_name(text) == name == hub_name(str(name)) == hub_name(name.address)
    assert model_name(text) == name_of(text) == str(name)


@pytest.mark.parametrize("revision", [None, "v1"])
def test_gguf_files_on_the_hub(revision: str | None, tmp_path: Path) -> None:
    name = HubName("a/b-GGUF", revision, "sub/b.Q4_K_M-00001-of-00002.gguf")
    assert hub_name(str(name)) == name
    assert hub_name(name.address) == name._replace(revision=revision or "main")
    assert is_gguf(str(name))
    assert not is_gguf("a/b-GGUF")
    assert not is_path(str(name))
    assert is_gguf(tmp_path / "x.GGUF")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("https://huggingface.co/a/b/blob/v1/config.json", "opened as a whole; type a/b@v1$"),
        ("https://huggingface.co/a/b/tree/v1/onnx", "opened as a whole; type a/b@v1$"),
        (
            "https://huggingface.co/datasets/a/b",
            "no address of a model on .* is typed owner/name, or owner/name@REV",
        ),
        ("https://huggingface.co/datasets/a", "no address of a model"),
        ("https://huggingface.co/a", "no address of a model"),
        ("hf://a/b/config.json", "no address of a model"),
        ("https://example.com/a/b", "no address of a model"),
    ],
)
def test_other_addresses_say_what_to_type(text: str, message: str) -> None:
    for take in (hub_name, locate, read_config_only, open_model):
        with pytest.raises(ValueError, match=message):
            take(text)


def test_a_revision_is_opened_from_the_cache(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """And stands in what is recorded; the newest one is another."""
    cached, commits = tmp_path / "models--org--tiny", {"main": "0" * 40, "v1": "1" * 40}
    (cached / "refs").mkdir(parents=True)
    for revision, commit in commits.items():
        shutil.copytree(tiny_checkpoint, cached / "snapshots" / commit)
        (cached / "refs" / revision).write_text(commit)
    config = cached / "snapshots" / commits["main"] / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert open_model("org/tiny").folder.name == commits["main"]
    for typed in ("org/tiny@v1", "https://huggingface.co/org/tiny/tree/v1", f"org/tiny@{commits['v1']}"):
        found = open_model(typed)
        assert found.folder.name == commits["v1"]
        assert found.name == found.public_name == found.reference == str(hub_name(typed))
        assert found.hash == open_model(tiny_checkpoint).hash != open_model("org/tiny").hash
        assert open_edited(typed).provenance()["model"] == found.name
        assert open_model(typed, weights=False).config.rms_norm_eps == found.config.rms_norm_eps
    assert surgeon.check("hf://org/tiny@v1").record["model"] == "org/tiny@v1"
    with pytest.raises(
        FileNotFoundError, match="org/tiny@v2 is no folder here, and could not be fetched"
    ):
        open_model("org/tiny@v2")


def test_a_name_without_an_owner_says_how_models_are_named() -> None:
    with pytest.raises(
        FileNotFoundError, match="no model folder gpt2@main; a model on the hub is typed owner/name"
    ):
        open_model("gpt2@main")


@pytest.mark.parametrize("text", UNNAMEABLE)
@pytest.mark.parametrize("take", [locate, read_config_only, describe, load_hardware])
def test_what_takes_a_name_says_that_there_is_none(take: Callable[[str], Any], text: str) -> None:
    with pytest.raises((FileNotFoundError, ValueError), match="there is no "):
        take(text)


@pytest.mark.parametrize(
    "text", [f"{'x' * 300}.txt", f"{'x' * 300}.jsonl:text", "no\0name.txt", f"./{'x' * 300}"]
)
def test_data_of_such_a_name_is_missing(text: str) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file "):
        list(documents(text, None))


def test_many_tasks_are_a_list_and_no_file(tmp_path: Path) -> None:
    names = [f"task-number-{number}" for number in range(40)]
    assert split_values([",".join(names)]) == names
    (tmp_path / "a,b.jsonl").write_text("")
    assert split_values([str(tmp_path / "a,b.jsonl")]) == [str(tmp_path / "a,b.jsonl")]


def test_the_demos_text_is_no_folder_called_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert file_and_column("demo") == (None, None)
    assert sum(1 for _ in documents("demo", None)) > 0
