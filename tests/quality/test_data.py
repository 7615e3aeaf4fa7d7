"""Windows of text: what is in them, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from surgeon.opened import open_model
from surgeon.quality.data import default_data, load_windows, window_for
from surgeon.quality.sources import DEMO, files_in
from tests.tiny_models import TEXT, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def write(folder: Path, text: str) -> str:
    path = folder / "data.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_windows_are_the_text_in_order(tokenizer: Any, tmp_path: Path) -> None:
    windows = load_windows(tokenizer, write(tmp_path, TEXT * 20), window=16, tokens=100)
    assert windows.ids.shape == (6, 16)
    assert windows.predicted_tokens == 90
    assert windows.ids.flatten().tolist() == tokenizer(TEXT * 20)["input_ids"][:96]
    assert windows.ids[0, 0] == tokenizer.bos_token_id
    assert not windows.notes


def test_a_long_text_is_tokenized_like_its_whole(tokenizer: Any, tmp_path: Path) -> None:
    text = TEXT * 2000
    windows = load_windows(tokenizer, write(tmp_path, text), window=32, tokens=320)
    assert windows.ids.flatten().tolist() == tokenizer(text)["input_ids"][:320]


def test_documents_are_kept_apart_by_bos(tokenizer: Any, tmp_path: Path) -> None:
    data = write(tmp_path, "the fox<|end|>\n\n the dog\n<|end|> \n<|end|>sleeping<|end|>")
    windows = load_windows(tokenizer, data, window=2, tokens=1000, separator="<|end|>")
    # Its own space.
    documents = [tokenizer(text)["input_ids"] for text in ("the fox", " the dog", "sleeping")]
    assert all(ids[0] == tokenizer.bos_token_id for ids in documents)
    flat = [token for ids in documents for token in ids]
    assert windows.ids.flatten().tolist() == flat[: len(flat) // 2 * 2]
    assert "only" in windows.notes[0]


def test_without_a_bos_documents_end_with_eos(tmp_path: Path) -> None:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.bos_token = None
    data = write(tmp_path, "the fox<|end|>the dog")
    ids = (
        load_windows(tokenizer, data, window=2, tokens=1000, separator="<|end|>").ids.flatten().tolist()
    )
    fox = tokenizer("the fox", add_special_tokens=False)["input_ids"]
    assert ids[: len(fox) + 1] == [*fox, tokenizer.eos_token_id]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no BOS and no EOS; drop the separator"):
        load_windows(tokenizer, data, window=2, separator="<|end|>")


def test_a_separator_read_as_text_is_warned_of(tokenizer: Any, tmp_path: Path) -> None:
    data = write(tmp_path, f"{TEXT}<|endoftext|>{TEXT}")
    (note,) = load_windows(tokenizer, data, window=8, tokens=80).notes
    assert "the separator '<|endoftext|>'" in note
    assert not load_windows(tokenizer, data, window=8, tokens=80, separator="<|endoftext|>").notes


def test_the_digest_tells_texts_and_windows_apart(tokenizer: Any, tmp_path: Path) -> None:
    data = write(tmp_path, TEXT * 20)
    first = load_windows(tokenizer, data, window=16, tokens=96)
    assert first.digest == load_windows(tokenizer, data, window=16, tokens=96).digest
    others = [load_windows(tokenizer, data, window=w, tokens=t) for w, t in ((16, 80), (8, 96))]
    others.append(load_windows(tokenizer, write(tmp_path, TEXT[1:] * 20), window=16, tokens=96))
    assert len({first.digest, *(other.digest for other in others)}) == 4


def test_demo_data_is_there(tokenizer: Any) -> None:
    windows = load_windows(tokenizer, DEMO, window=64, tokens=256)
    assert windows.ids.shape == (4, 64)
    assert windows.ids[0, 0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n ", "is empty"),
        (b"fox", r"has \d tokens, fewer than one window of 16; use a smaller window or more text"),
        (b"abc \xff\xfe", r"not UTF-8 text \(byte 4\)"),
    ],
)
def test_files_that_cannot_be_measured_on(
    tokenizer: Any, tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_windows(tokenizer, str(path), window=16, tokens=96)


def test_only_separators_is_empty(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is empty"):
        load_windows(tokenizer, write(tmp_path, "## ## ##"), window=16, separator="##")


def test_an_empty_separator_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="separator is empty"):
        load_windows(tokenizer, write(tmp_path, TEXT), window=16, separator="")


@pytest.mark.parametrize("name", ["missing.txt", "/nowhere/text", "./text", "a/b/c"])
def test_a_missing_file(tokenizer: Any, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"there is no file {name}"):
        load_windows(tokenizer, name)


def test_files_of_a_folder_are_documents(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in {
        "c.txt": "third",
        "a.md": "first",
        "b/one.txt": "second",
        "b/picture.png": "none",
    }.items():
        (tmp_path / name).write_text(text)
    found = load_windows(tokenizer, str(tmp_path), window=2, tokens=1000).ids.flatten().tolist()
    begin = tokenizer.bos_token_id
    wanted = []
    for text in ("first", "second", "third"):
        wanted += [begin, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert found == wanted[: len(wanted) // 2 * 2]


def test_links_in_a_folder_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "texts" / "b").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    for name in ("texts/c.txt", "texts/b/one.txt", "far/two.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "texts" / "a.txt").symlink_to(tmp_path / "far" / "two.txt")
    (tmp_path / "texts" / "linked").symlink_to(tmp_path / "far")
    (tmp_path / "texts" / "b" / "round").symlink_to(tmp_path / "texts")
    found = [
        path.relative_to(tmp_path / "texts").as_posix() for path in files_in(str(tmp_path / "texts"))
    ]
    assert found == ["a.txt", "b/one.txt", "c.txt", "linked/two.txt"]


def test_a_folder_without_texts(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no files of text in it, by their endings \(.txt, "):
        load_windows(tokenizer, str(tmp_path))


@pytest.mark.parametrize(
    ("window", "tokens", "message"), [(1, 96, "at least 2"), (16, 15, "one window of 16, not 15")]
)
def test_sizes_that_make_no_sense(tokenizer: Any, window: int, tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_windows(tokenizer, DEMO, window=window, tokens=tokens)


def test_a_window_fits_the_model() -> None:
    assert window_for(SimpleNamespace(max_position_embeddings=128), None) == 128
    assert window_for(SimpleNamespace(max_position_embeddings=4096), None) == 512
    assert window_for(SimpleNamespace(), 1000) == 1000
    with pytest.raises(ValueError, match="use a window of 128"):
        window_for(SimpleNamespace(max_position_embeddings=128), 129)


def fake_datasets(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]] | Exception) -> list[Any]:
    """Stand in for `datasets`, which would look for the network; returns the list of calls."""
    calls: list[Any] = []

    def load_dataset(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
        calls.append((arguments, options["split"]))
        if isinstance(rows, Exception):
            raise rows
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_a_dataset_is_one_text_or_a_row_a_document(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_datasets(monkeypatch, [{"id": 1, "text": "the fox"}, {"id": 2, "text": "the dog"}])
    whole = load_windows(tokenizer, "some/name:config:validation", window=2)
    assert calls == [(("some/name", "config"), "validation")]
    expected = tokenizer("the fox\n\nthe dog")["input_ids"]
    assert whole.ids.flatten().tolist() == expected[: len(expected) // 2 * 2]
    apart = load_windows(tokenizer, "name", window=2, separator="##").ids.flatten().tolist()
    assert calls[1] == (("name", None), "test")
    assert apart.count(tokenizer.bos_token_id) == 2


def test_a_dataset_out_of_reach_says_what_to_do(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, ConnectionError("no route\nto host"))
    with pytest.raises(
        FileNotFoundError, match=r"be read as a dataset \(no route\); give a local text, .jsonl"
    ):
        load_windows(tokenizer, "wikitext")
    fake_datasets(monkeypatch, [{"label": 3}])
    with pytest.raises(ValueError, match="no column of text"):
        load_windows(tokenizer, "wikitext")


def test_without_a_text_the_one_that_ships_is_used_where_the_tokenizer_can_read_it() -> None:
    with pytest.warns(
        UserWarning, match="no text was given, so the one that ships with surgeon is used: source files"
    ):
        assert default_data(open_model("demo").tokenizer) == "demo"
    letters = Tokenizer(WordLevel({"a": 0, "e": 1, "?": 2}, unk_token="?"))
    letters.pre_tokenizer = Split("", "isolated")
    blind = PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="?")
    with pytest.raises(ValueError, match=r"has no tokens for \d\d% of its characters; give a text"):
        default_data(blind)
