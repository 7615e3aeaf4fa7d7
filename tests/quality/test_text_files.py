"""Files of text as people's programs write them: what is left out, and what is refused by name."""

from __future__ import annotations

import codecs
import gzip
import json
from pathlib import Path

import pytest

from surgeon.quality.data import load_windows
from surgeon.quality.sources import Reading
from tests.quality.written import texts
from tests.tiny_models import TEXT, tiny_tokenizer

MARK = codecs.BOM_UTF8


@pytest.mark.parametrize("name", ["a.txt", "a.TXT.GZ", "a.jsonl", "a.Jsonl.gz"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    row = TEXT.encode() if "txt" in name.lower() else json.dumps({"text": TEXT}).encode() + b"\n"
    found = []
    for content in (row, MARK + row):
        path.write_bytes(gzip.compress(content) if name.lower().endswith("gz") else content)
        found.append(load_windows(tiny_tokenizer(), str(path), window=8, tokens=32))
    plain, marked = found
    assert marked.digest == plain.digest
    assert (dict(plain.left_out), dict(marked.left_out)) == ({}, {"byte_order_marks": 1})
    assert marked.notes[0].startswith(f"{path}: left out the byte order mark at its start")
    assert not plain.notes


def test_files_with_marks_that_were_joined(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes((MARK + b'{"text": "a"}\n') * 2)
    assert texts(path, "##") == ["a", "a"]
    path.with_suffix(".txt").write_bytes(MARK + b"a" + MARK + b"b")
    assert texts(path.with_suffix(".txt")) == ["a\ufeffb"]  # inside of a text it is a character


@pytest.mark.parametrize("first", [1, 2, 3, 64])
def test_line_ends_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr("surgeon.quality.sources._FIRST_BLOCK", first)
    path, reading = tmp_path / "a.txt", Reading()
    path.write_bytes(b"the\r\nquick\r\r\nbrown\rfox\n\r\n\r")
    assert texts(path, None, reading) == ["the\nquick\r\nbrown\rfox\n\n\r"]
    assert reading.lines("a") == ["a: left out 3 carriage returns of CRLF line ends"]
    path.write_bytes(b"the\r\n\r\nfox")
    assert texts(path, "\n\n") == ["the", "fox"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "the fox".encode("utf-16"),
            r"a.txt begins as text in UTF-16 does \(FF FE\); .* iconv -f UTF-16 ",
        ),
        (
            codecs.BOM_UTF16_BE + "fox".encode("utf-16-be"),
            r"a.txt begins as text in UTF-16 does \(FE FF\)",
        ),
        ("the fox".encode("utf-32"), r"a.txt begins as text in UTF-32 does \(FF FE 00 00\)"),
        (
            "the fox".encode("utf-16-le"),
            "a.txt is no text: byte 1 is NUL, .* UTF-16 without a byte order mark",
        ),
        (b"the\0fox", "a.txt is no text: byte 3 is NUL"),
        ("naïve".encode("latin-1"), r"a.txt is not UTF-8 text \(byte 2\); convert it"),
        (MARK + "naïve".encode("latin-1"), r"a.txt is not UTF-8 text \(byte 5\)"),
        ("a\ud800".encode(errors="surrogatepass"), r"a.txt is not UTF-8 text \(byte 1\)"),
        (
            gzip.compress(b"the fox", mtime=0),
            r"a.txt begins as a file compressed by gzip does \(1F 8B\); .* ends in .gz",
        ),
        (b"PK\3\4fox", r"a.txt begins as a zip archive does .*; unpack it"),
    ],
)
def test_what_is_no_text_in_utf8(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        texts(path)
    with pytest.raises(ValueError, match=message):
        texts(path, "##")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_one_long_line(tmp_path: Path, name: str) -> None:
    """Of 50 MB: its first tokens are those of any text."""
    path, words = tmp_path / name, "the quick brown fox " * 2_500_000
    path.write_text(words if name == "a.txt" else json.dumps({"text": words}))
    windows = load_windows(tiny_tokenizer(), str(path), window=32, tokens=128)
    path.write_text(words[:4000] if name == "a.txt" else json.dumps({"text": words[:4000]}))
    assert windows.digest == load_windows(tiny_tokenizer(), str(path), window=32, tokens=128).digest
