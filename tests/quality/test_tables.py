"""Which column of a table is read, and what becomes of rows without text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from surgeon.quality import sources
from surgeon.quality.data import load_windows
from surgeon.quality.sources import Reading, open_rows, read_column
from tests.quality.written import Row, texts, write_jsonl
from tests.tiny_models import tiny_tokenizer

Write = Callable[[list[Row]], Path]


def test_the_column(write: Write) -> None:
    path = write([{"content": "a", "n": 1}, {"content": "b", "n": 2}])
    assert texts(path, "##") == ["a", "b"]
    path = write([{"title": "a", "text": "b"}])
    assert texts(path) == ["b"]
    assert texts(f"{path}:title") == ["a"]
    path = write([{"title": "a", "body": "b"}])
    with pytest.raises(
        ValueError, match=rf"several columns of text: title, body; say which one, as in {path}:title"
    ):
        texts(path)
    with pytest.raises(ValueError, match="no column 'bodie'; the columns are title, body"):
        texts(f"{path}:bodie")


def test_rows_without_text_are_left_out_wherever_they_stand(write: Write) -> None:
    """Be it the first one: no other column of strings is read in its place."""
    rows = [{"id": f"page-{i}", "text": None if i in (0, 3) else f"text {i}"} for i in range(5)]
    reading = Reading()
    assert texts(write(rows), "##", reading) == ["text 1", "text 2", "text 4"]
    assert (reading.column, reading.rows, dict(+reading.left_out)) == ("text", 5, {"null_rows": 2})
    (line,) = reading.lines("rows")
    assert line == "rows: left out 2 rows with null in column 'text' (of 5 rows read)"
    assert texts(f"{write(rows)}:id", "##") == [f"page-{i}" for i in range(5)]


def test_rows_without_such_a_key(tmp_path: Path) -> None:
    rows = [{"id": "a"}, {"id": "b", "text": None}, {"id": "c", "text": "fox"}, {"id": "d"}]
    path, reading = write_jsonl(tmp_path / "rows.jsonl", rows), Reading()
    assert texts(path, None, reading) == ["fox"]
    assert dict(reading.left_out) == {"byte_order_marks": 0, "null_rows": 1, "rows_without_column": 2}
    windows = load_windows(tiny_tokenizer(), str(path), window=2)
    assert windows.record() == {
        "data": str(path),
        "data_hash": windows.digest,
        "data_column": "text",
        "data_left_out": {"null_rows": 1, "rows_without_column": 2},
    }
    assert windows.notes[1] == (
        f"{path}: left out 1 row with null in column 'text', 2 rows without column 'text' (of 4 rows read)"
    )


def test_a_column_in_which_no_row_has_text(write: Write, tmp_path: Path) -> None:
    for name in ("text", "body"):
        path = write([{"id": "a", "n": 1, name: None}, {"id": "b", "n": 2, name: None}])
        with pytest.raises(
            ValueError, match=f"column '{name}' of {path} has no text in any of its 2 rows; say another"
        ):
            texts(path if name == "text" else f"{path}:{name}")
    columns = {"id": ["a", "b"], "text": pa.nulls(2)}
    parquet.write_table(pa.table(columns), tmp_path / "untyped.parquet")
    with pytest.raises(
        ValueError, match="column 'text' of .*untyped.parquet has no text in any of its 2 rows"
    ):
        texts(tmp_path / "untyped.parquet")


@pytest.mark.parametrize("stranger", ["text", "note"])
def test_a_column_that_begins_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    """Where all rows are looked at, they decide; where not, a row that speaks against the choice is not read over."""
    rows: list[Row] = [{"content": "a"}, {}, {"content": "b"}, {"content": "c", stranger: "d"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    if stranger == "text":
        assert texts(path, "##") == ["d"]
    else:
        with pytest.raises(ValueError, match="has several columns of text: content, note"):
            texts(path)
    assert texts(f"{path}:content", "##") == ["a", "b", "c"]
    monkeypatch.setattr(sources, "_ROWS_LOOKED_AT", 3)
    where = rf"rows.jsonl:4: a column '{stranger}' begins here, and 'content' was the only one of text in .*rows.jsonl"
    with pytest.raises(
        ValueError, match=rf"{where} \(its first 3 rows\); say which one, as in {path}:{stranger}"
    ):
        texts(path)
    reading = Reading()
    assert texts(write_jsonl(path, rows[:3] * 2), "##", reading) == ["a", "b"] * 2
    assert reading.lines("rows") == [
        f"column 'content' is read, the only one of text in {path} (its first 3 rows)",
        "rows: left out 2 rows without column 'content' (of 6 rows read)",
    ]
    with pytest.raises(
        ValueError, match=r"\(its first 3 rows\) has no column 'body'; the columns are content"
    ):
        texts(f"{path}:body")


def test_long_rows_are_looked_at_no_further_than_need_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_CHARACTERS_LOOKED_AT", 10)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"content": "the quick brown fox"}\n' * 2 + "damaged")
    table = open_rows(str(path), Reading())
    assert table is not None
    rows = read_column(table, Reading())
    assert next(rows) == (f"{path}:1", "the quick brown fox")


def test_what_is_no_text(write: Write) -> None:
    path = write([{"text": "a", "n": 1}, {"text": "b", "n": 2}])
    with pytest.raises(ValueError, match="column 'n' should hold text, not 1"):
        texts(f"{path}:n")
    with pytest.raises(ValueError, match="column 'text' should hold text, not 3; say another one"):
        texts(write([{"text": 3, "body": "b"}]))
    with pytest.raises(ValueError, match="has no column of text"):
        texts(write([{"n": 1}]))
    with pytest.raises(ValueError, match="is empty; give a text file"):
        load_windows(tiny_tokenizer(), str(write([{"text": ""}, {"text": " "}])), window=2)


def test_empty_documents(write: Write) -> None:
    """They are text where rows are one text, as in corpora of paragraphs, and no documents."""
    path, reading = write([{"text": "a"}, {"text": ""}, {"text": "b## ##c##"}, {"text": " "}]), Reading()
    assert texts(path) == ["a\n\n\n\nb## ##c##\n\n "]
    assert texts(path, "##", reading) == ["a", "b", "c"]
    assert reading.lines("rows") == ["rows: left out 3 empty documents (of 4 rows read)"]


def test_a_nul_that_a_row_spells_out_is_a_character(write: Write) -> None:
    assert texts(write([{"text": "a\0b\r\nc"}])) == ["a\0b\r\nc"]


def test_a_parquet_column_of_categories_is_text(tmp_path: Path) -> None:
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    parquet.write_table(pa.table({"kind": column, "n": [1, 2, 3]}), tmp_path / "rows.parquet")
    assert texts(tmp_path / "rows.parquet", "##") == ["a", "b", "a"]


def test_damaged_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(30))
    with pytest.raises(ValueError, match=r"a.parquet is damaged or no parquet file"):
        texts(tmp_path / "a.parquet")
    column = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    parquet.write_table(pa.table({"text": column}), tmp_path / "b.parquet")
    with pytest.raises(
        ValueError, match=r"b.parquet: column 'text' is not text in UTF-8 \(byte 1 of a row behind row 0"
    ):
        texts(tmp_path / "b.parquet")
    (tmp_path / "b.parquet").rename(tmp_path / "b.parquet.gz")
    with pytest.raises(ValueError, match=r"b.parquet.gz is compressed as a whole, .* unpack it"):
        texts(tmp_path / "b.parquet.gz")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            '{"text": "a"}\n\n{"text": "b"\n',
            r"rows.jsonl:3: not valid JSON \(.*\); each line must be one object",
        ),
        ('{"text": "a"}\n["b"]\n', "rows.jsonl:2: each line must be one JSON object, not list"),
        ('{"text": "a"}\nnull\n', "rows.jsonl:2: each line must be one JSON object, not NoneType"),
        (
            '{"text": "a\\ud83d"}\n',
            r"rows.jsonl:1: column 'text' is not .* \(a lone surrogate, U\+D83D, at character 1",
        ),
        ("\n\n", "rows.jsonl is empty; give a file with rows in it"),
        (
            b'{"text": "a"}\n{"text": "\xff"}\n',
            r"rows.jsonl:2 is not UTF-8 text \(byte 24\); convert it",
        ),
        (b'{"text": "a\0b"}\n', "rows.jsonl:1: not valid JSON"),
        ('{"text": ' + "[" * 100_000, "rows.jsonl:1: not valid JSON"),
        (
            json.dumps({"text": "a"}).encode("utf-16"),
            r"rows.jsonl begins as text in UTF-16 does \(FF FE\)",
        ),
        (json.dumps({"text": "a"}).encode("utf-16-le"), "rows.jsonl:1: not valid JSON"),
    ],
)
def test_damaged_json(tmp_path: Path, lines: str | bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    with pytest.raises(ValueError, match=message):
        texts(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_beside_conversations_no_column_is_guessed(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    rows = [{"id": "the fox", "dialog": [{"role": "user", "content": "the dog"}]}]
    if name.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_jsonl(path, rows)
    with pytest.raises(
        ValueError, match=rf"conversations in column 'dialog', .* \(as {path}:dialog\); .* {path}:id$"
    ):
        texts(path)
    assert texts(f"{path}:id") == ["the fox"]
