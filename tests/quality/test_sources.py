"""Texts from files, tables and datasets: which, in what order, and what is refused."""

from __future__ import annotations

import os
import socket
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from surgeon.checkpoint.config import hub_answers, without_retries
from surgeon.quality import sources
from surgeon.quality.data import load_windows
from tests.quality.written import Row, texts, write_jsonl
from tests.tiny_models import tiny_tokenizer


def test_rows_are_one_text_or_documents(write: Callable[[list[Row]], Path]) -> None:
    path = write(
        [{"id": 1, "text": "Grüße"}, {"id": 2, "text": " the fox## the dog "}, {"id": 3, "text": ""}]
    )
    assert texts(path) == ["Grüße\n\n the fox## the dog \n\n"]
    assert texts(path, "<sep>") == ["Grüße", " the fox## the dog "]
    assert texts(path, "##") == ["Grüße", " the fox", " the dog "]


def test_what_documents_begin_and_end_with_is_theirs(tmp_path: Path) -> None:
    code = "    return x\n\n"
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": code}, {"text": " \n"}, {"text": "\n  y"}])
    assert ["".join(pieces) for pieces in sources.documents(str(path), None, by_row=True)] == [
        code,
        "\n  y",
    ]
    (tmp_path / "a.txt").write_text("  x\n##\n    y \n##\n")  # but for line ends beside separators
    assert texts(tmp_path / "a.txt", "##") == ["  x", "    y "]


def test_pipes_are_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(
            ValueError, match=r"(pipe|/dev/null) is a pipe or a device, which can be read only once"
        ):
            texts(name)
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        sources.file_and_column(str(tmp_path))


def test_many_rows_are_joined_alike_at_every_place(write: Callable[[list[Row]], Path]) -> None:
    words = [f"row {i}" for i in range(2 * sources._ROWS_TOGETHER + 1)]
    assert "".join(texts(write([{"text": word} for word in words]))) == "\n\n".join(words)


def test_damaged_files(tmp_path: Path) -> None:
    whole = write_jsonl(tmp_path / "a.jsonl.gz", [{"text": "the fox" * i} for i in range(99)])
    whole.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"a.jsonl.gz is truncated or not compressed by gzip"):
        texts(whole)
    (tmp_path / "b.txt.gz").write_text("no gzip")
    with pytest.raises(ValueError, match=r"b.txt.gz is truncated or not compressed by gzip"):
        texts(tmp_path / "b.txt.gz")
    (tmp_path / "c.parquet").write_bytes(b"PAR1" + bytes(30))
    with pytest.raises(ValueError, match=r"c.parquet is damaged or no parquet file"):
        texts(tmp_path / "c.parquet")


def test_names_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the fox")
    with pytest.raises(
        ValueError, match="a.txt is read as a text file, which has no columns; drop :text"
    ):
        texts(f"{tmp_path / 'a.txt'}:text")
    odd = write_jsonl(tmp_path / "a:b.jsonl", [{"title": "a", "text": "b"}])
    assert texts(odd) == ["b"]
    assert texts(f"{odd}:title") == ["a"]
    for name in ("", ":a"):
        with pytest.raises(ValueError, match=f"^'{name}' names no text; give a file"):
            texts(name)
    for name in ("rows.jsonl", "rows.parquet", "rows.txt.gz"):
        with pytest.raises(FileNotFoundError, match=f"there is no file {name}$"):
            texts(name)
    with pytest.raises(FileNotFoundError, match="there is no file rows.parquet$"):
        texts("rows.parquet:text")


@pytest.mark.parametrize("first", [1, 2, 3, 5, 64])
def test_characters_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr(sources, "_FIRST_BLOCK", first)
    text = "aé€😀<sep>" * 50
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    assert texts(path) == [text]
    assert texts(path, "<sep>") == ["aé€😀"] * 50
    path.write_bytes(text.encode() + b"ab\xff")
    with pytest.raises(ValueError, match=rf"not UTF-8 text \(byte {len(text.encode()) + 2}\)"):
        texts(path)
    path.write_bytes(text.encode() + "€".encode()[:2])
    with pytest.raises(ValueError, match=rf"not UTF-8 text \(byte {len(text.encode())}\)"):
        texts(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("separator", [None, "<sep>"])
def test_a_large_file_is_not_read_to_its_end(tmp_path: Path, name: str, separator: str | None) -> None:
    row = "the quick brown fox " * 5000
    path, count = tmp_path / name, 300
    if name == "a.txt":
        path.write_text(f"{row}<sep>" * count)
    elif name == "a.jsonl":
        path.write_text(f'{{"text": "{row}"}}\n' * count + "damaged")
    else:
        schema = pa.schema([("text", pa.string())])
        with parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for _ in range(count):
                writer.write_batch(pa.record_batch([[row]], schema=schema))
        assert path.stat().st_size > len(row) * count
    tokenizer = tiny_tokenizer()
    tracemalloc.start()
    try:
        windows = load_windows(tokenizer, str(path), window=32, tokens=256, separator=separator)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert windows.ids.shape == (8, 32)
    assert peak < len(row) * count / 3


def fake_datasets(monkeypatch: pytest.MonkeyPatch, rows: list[Row]) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: rows))


def test_the_column_of_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, [{"title": "a", "body": "b"}, {"title": "c", "body": None}])
    assert texts("name:config:test:title") == ["a\n\nc"]
    with pytest.raises(
        ValueError, match="several columns of text: title, body; say which one, as in name:::title"
    ):
        texts("name")
    with pytest.raises(ValueError, match="dataset name has no column 'n'; the columns are title, body"):
        texts("name:::n")
    assert texts("name:::body") == ["b"]


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The hub's libraries as they are where nobody has set HF_HUB_OFFLINE."""
    import datasets
    from huggingface_hub import constants

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return constants


def test_without_a_network_nothing_is_tried_twice(online: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(online, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with without_retries():
            assert online.HF_HUB_OFFLINE
            with pytest.raises(OfflineModeIsEnabled):
                HfApi().whoami(token="none")
        assert not online.HF_HUB_OFFLINE


def test_a_network_is_used(online: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert hub_answers(address)
        monkeypatch.setattr(online, "ENDPOINT", address)
        with without_retries():
            assert not online.HF_HUB_OFFLINE
    assert not hub_answers(address)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert hub_answers(address)  # only the proxy knows
