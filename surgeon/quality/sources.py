"""Where text comes from: a text file, a table (.jsonl, .json, .parquet), a dataset, the demo's files.

Everything is read as a stream, so that the first thousand tokens of a large file cost no more than those of a small
one. What is not read is not checked either.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from surgeon.checkpoint.offline import without_retries
from surgeon.errors import first_line, shown
from surgeon.named import is_path, on_disk

DEMO = "demo"
DEMO_TRAINING = "demo:train"
JSON_LINES = (".jsonl", ".json", ".ndjson")
PARQUET = ".parquet"
TEXT_COLUMN = "text"
ROW_SEPARATOR = "\n\n"  # between rows that are read as one text
_ROWS_TOGETHER, _CHARACTERS_TOGETHER = 1000, 1 << 20
_PARQUET_ROWS = 64
_FIRST_BLOCK, _LARGEST_BLOCK = 1 << 16, 1 << 26


class Text:
    """A text that is read only as far as it is asked for."""

    def __init__(self, pieces: Iterable[str]) -> None:
        self._pieces = iter(pieces)
        self._read = ""

    def head(self, length: int) -> str:
        """Its first `length` characters, or all of it if there are fewer."""
        while len(self._read) < length and (piece := next(self._pieces, None)) is not None:
            self._read += piece
        return self._read[:length]

    def is_blank(self) -> bool:
        """Whether it is nothing but white space."""
        while not self._read.strip():
            before = len(self._read)
            if len(self.head(2 * before + 1)) == before:
                return True
        return False


def documents(data: str, separator: str | None) -> Iterator[Text]:
    """The documents of some text: apart where there is a separator (rows of tables then, too), else all as one.

    Args:
        data: as `surgeon.quality.data.load_windows` takes it.

    Raises:
        FileNotFoundError: if there is no such file or dataset.
        ValueError: if it is no text, or a row of it is damaged, naming file and line.
    """
    path, column = file_and_column(data)
    if data in (DEMO, DEMO_TRAINING) and path is None:
        from surgeon.demo import demo_data, demo_training_data

        texts: Iterable[str] = demo_data() if data == DEMO else demo_training_data()
        return _apart(texts, separator) if separator is not None else map(_whole, texts)
    if path is not None and not is_table(path):
        return _text_file(path, column, separator)
    rows = _dataset_rows(data) if path is None else read_table(path, column)
    return _apart(rows, separator) if separator is not None else map(_whole, _joined(rows))


def file_and_column(data: str) -> tuple[Path | None, str | None]:
    """The file that is meant, and the column of it; no file if this is the name of a dataset (or demo)."""
    there = on_disk(data)
    if there is not None and there.is_file():
        return there, None
    name, colon, column = data.rpartition(":")
    beside = on_disk(name) if colon else None
    if beside is not None and beside.is_file():
        return beside, column
    if there is not None and data != DEMO:
        raise ValueError(f"{data} is a folder; --data takes a file, a dataset's name, or demo")
    name = name if colon and is_table(Path(name)) else data
    if _looks_like_a_file(name):
        raise FileNotFoundError(f"there is no file {name}")
    return None, None


def _looks_like_a_file(name: str) -> bool:
    path = Path(name)
    known = path.suffix in (".txt", ".md", ".py", ".gz") or is_table(path)
    return known or is_path(name)


def is_table(path: Path) -> bool:
    """Whether a file's name says that it has rows and columns: what `read_table` reads."""
    return _format(path) in (*JSON_LINES, PARQUET)


def _format(path: Path) -> str:
    """The ending that says what is in the file, whether it is compressed or not."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _whole(text: str) -> Text:
    return Text([text])


def _apart(texts: Iterable[str], separator: str) -> Iterator[Text]:
    for text in texts:
        yield from map(_whole, _split([text], separator))


def _split(pieces: Iterable[str], separator: str) -> Iterator[str]:
    """What stands between separators, in a text that comes in pieces; blank parts are left out."""
    rest = ""
    for piece in pieces:
        *parts, rest = (rest + piece).split(separator)
        yield from (part.strip() for part in parts if part.strip())
    if rest.strip():
        yield rest.strip()


def _joined(rows: Iterable[str]) -> Iterator[str]:
    """Rows as one running text, in pieces long enough to tokenize well."""
    piece: list[str] = []
    characters = 0
    for row in rows:
        if len(piece) == _ROWS_TOGETHER or characters > _CHARACTERS_TOGETHER:
            yield ROW_SEPARATOR.join([*piece, ""])
            piece, characters = [], 0
        piece.append(row)
        characters += len(row)
    if any(row.strip() for row in piece):
        yield ROW_SEPARATOR.join(piece)


def _text_file(path: Path, column: str | None, separator: str | None) -> Iterator[Text]:
    if column is not None:
        raise ValueError(f"{path} is read as a text file, which has no columns; drop :{column}")
    text = Text(_pieces(path))
    if text.is_blank():
        raise ValueError(f"{path} is empty; give a text file with something in it")
    if separator is None:
        return iter([text])
    return map(_whole, _split(_pieces(path), separator))


def _pieces(path: Path) -> Iterator[str]:
    """The text of a file in pieces, each twice as long as the last, so that joining them stays cheap."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size, before = _FIRST_BLOCK, 0
    with _open(path) as file, _readable(path):
        while True:
            block = file.read(size)
            held = len(decoder.getstate()[0])  # the beginning of a character that the last block ended in
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                byte = before - held + error.start
                raise ValueError(f"{path} is not UTF-8 text (byte {byte}); convert it, or give another file") from error
            if not block:
                return
            before, size = before + len(block), min(2 * size, _LARGEST_BLOCK)


def _open(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path) if path.suffix == ".gz" else path.open("rb"))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say which file it is whose compressed content is damaged."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or not compressed by gzip ({error}); fetch or copy it again") from error


def read_table(path: Path, column: str | None = None) -> Iterator[str]:
    """One column of a .jsonl, .json (one object a line) or .parquet file, as a stream.

    Args:
        column: by default the column named text, or else the only one that holds strings.

    Raises:
        ValueError: if a row is damaged or holds no string there (with file and line), the file has no such column, or
            it is not clear which is meant.
    """
    rows = _parquet_rows(path, column) if _format(path) == PARQUET else _json_rows(path, column)
    try:
        first = next(rows)
    except StopIteration:
        raise ValueError(f"{path} is empty; give a file with rows in it") from None
    return chain([first], rows)


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file that has one on each line, with the number of the line; blank lines are left out.

    Raises:
        ValueError: if a line is no JSON object, with file and line.
    """
    with _open(path) as file, _readable(path):
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not valid JSON ({error}); each line must be one object") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: each line must be one JSON object, not {type(row).__name__}")
            yield number, row


def _json_rows(path: Path, column: str | None) -> Iterator[str]:
    for number, row in read_json_lines(path):
        if column is None:
            column = choose_column(str(path), [key for key, value in row.items() if isinstance(value, str)])
        if column not in row:
            raise ValueError(f"{path}:{number}: there is no column {column!r}; the columns are {', '.join(row)}")
        yield _checked(row[column], f"{path}:{number}", column)


def _parquet_rows(path: Path, column: str | None) -> Iterator[str]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if column is None:
            column = choose_column(str(path), [field.name for field in file.schema_arrow if _holds_text(field.type)])
        elif column not in names:
            raise ValueError(f"{path} has no column {column!r}; the columns are {', '.join(names)}")
        row = 0
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[column]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield _checked(value, f"{path}: row {row}", column)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged or no parquet file ({first_line(error)}); copy it again") from error


def _holds_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def choose_column(source: str, with_text: list[str], how: str = "{source}:{column}") -> str:
    """The column to read: the one named text, or else the only one that holds strings.

    Args:
        how: how a user says which column is meant.

    Raises:
        ValueError: if none is or several are.
    """
    if TEXT_COLUMN in with_text:
        return TEXT_COLUMN
    if len(with_text) == 1:
        return with_text[0]
    if not with_text:
        raise ValueError(f"{source} has no column of text")
    example = how.format(source=source, column=with_text[0])
    raise ValueError(f"{source} has several columns of text: {', '.join(with_text)}; say which one, as in {example}")


def _checked(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        found = "null" if value is None else shown(value)
        raise ValueError(f"{where}: column {column!r} should hold text, not {found}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: column {column!r} is not text in UTF-8 (at character {error.start})") from error
    return value


def _dataset_rows(data: str) -> Iterator[str]:
    """The text column of a dataset, read as a stream."""
    parts = data.split(":", 3)
    name, config, split, column = parts + [""] * (4 - len(parts))
    import datasets

    try:
        with without_retries():
            rows = datasets.load_dataset(name, config or None, split=split or "test", streaming=True)
            first = next(iter(rows))
    except Exception as error:  # whatever fails inside `datasets`, the way out is the same
        raise FileNotFoundError(
            f"{data} is no file here and could not be read as a dataset ({first_line(error)}); give a local text, "
            ".jsonl or .parquet file with --data, or name:config:split of a dataset that can be reached"
        ) from error
    if column and column not in first:
        raise ValueError(f"dataset {name} has no column {column!r}; the columns are {', '.join(first)}")
    with_text = [key for key, value in first.items() if isinstance(value, str)]
    chosen = column or choose_column(f"dataset {name}", with_text, f"{name}:{config}:{split}:{{column}}")
    return (_checked(row[chosen], f"{name}: row {number}", chosen) for number, row in enumerate(rows, start=1))
