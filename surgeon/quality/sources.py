"""Sources of text: a text file, a table (.jsonl, .json, .parquet), a dataset, the demo's files.

Everything is streamed, and only what is read is checked. Files are read here instead of by the builders of `datasets`:
these name no line of a damaged file (an error says "in row 2" of a block), give a missing column as null, keep a byte
order mark at the start of text and refuse one inside joined JSON files, and pass NUL bytes on.

Text is UTF-8. A byte order mark at its start is dropped and CRLF read as LF; both are counted. UTF-16, other encodings,
archives and NUL bytes are refused by name.

The column of a table does not depend on where the table begins: it is the named one; or text, if any row has such a
key, be it null; or the only one that holds strings. At most a thousand rows are looked through; a later row that
contradicts the choice is refused. Rows without text are counted.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from surgeon.checkpoint.config import without_retries
from surgeon.named import is_path, on_disk
from surgeon.words import first_line, plural, show_value

DEMO = "demo"
DEMO_TRAINING = "demo:train"
TEXT_FILES = (".txt", ".md", ".py")
JSON_LINES = (".jsonl", ".json", ".ndjson")
PARQUET = ".parquet"
TEXT_COLUMN = "text"
ROW_SEPARATOR = "\n\n"  # between rows that are read as one text
_ROLE_KEYS = {"role", "from"}  # of messages
_ROWS_TOGETHER = 1000
_CHARACTERS_TOGETHER = 1 << 20
_PARQUET_ROWS = 32
_ROWS_LOOKED_AT = 1000
_CHARACTERS_LOOKED_AT = 1 << 26
Row = dict[str, Any]
PACKED = ".gz"
_FIRST_BLOCK = 1 << 16
_LARGEST_BLOCK = 1 << 22
_CONVERT = "convert it, as in: iconv -f {} -t UTF-8 {{path}} > utf8.txt"
# What a file is that begins so, and what to do; of two beginnings the longer one comes first.
_NO_TEXT = {
    codecs.BOM_UTF32_LE: ("text in UTF-32", _CONVERT.format("UTF-32")),
    codecs.BOM_UTF32_BE: ("text in UTF-32", _CONVERT.format("UTF-32")),
    codecs.BOM_UTF16_LE: ("text in UTF-16", _CONVERT.format("UTF-16")),
    codecs.BOM_UTF16_BE: ("text in UTF-16", _CONVERT.format("UTF-16")),
    b"\x1f\x8b": ("a file compressed by gzip", "give it a name that ends in .gz"),
    b"\x28\xb5\x2f\xfd": ("a file compressed by zstd", "unpack it (unzstd {path})"),
    b"\xfd7zXZ": ("a file compressed by xz", "unpack it (unxz {path})"),
    b"PK\x03\x04": ("a zip archive", "unpack it (unzip {path})"),
}
_LONGEST_MARK = max(map(len, _NO_TEXT))
_FEW = 0.1  # of the tokens of answers


@dataclass
class Reading:
    """Counts and notes of a text, as far as it has been read.

    Attributes:
        column: of a table or dataset; None for text.
        rows: of a table, read so far.
        left_out: counts of byte_order_marks, carriage_returns, null_rows, rows_without_column, empty_documents; of
            conversations rows_without_answer, rows_too_long (the first answer ends beyond the limit), answers_cut
            (beyond the limit), answers_behind_empty, answers_rewritten (read, not trained on), and rows with each key
            that is not used, as "column 'id'" or "key 'name' of messages".
        sizes: of conversations: `characters` of the `tokens`; `answer_characters` of rows, trained on or not;
            answers_across, answers whose first token begins in the prompt; and tokens `trained` on.
        notes: further ones, one line each.
    """

    column: str | None = None
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def lines(self, source: str) -> list[str]:
        count = self.left_out
        words = {
            "byte_order_marks": "the byte order mark at its start",
            "carriage_returns": f"{plural(count['carriage_returns'], 'carriage return')} of CRLF line ends",
            "null_rows": f"{plural(count['null_rows'], 'row')} with null in column {self.column!r}",
            "rows_without_column": f"{plural(count['rows_without_column'], 'row')} without column {self.column!r}",
            "empty_documents": plural(count["empty_documents"], "empty document"),
            "rows_without_answer": f"{plural(count['rows_without_answer'], 'row')} without an answer",
            "rows_too_long": f"{plural(count['rows_too_long'], 'row')} whose first answer ends behind a window's end",
            "answers_cut": f"{plural(count['answers_cut'], 'answer')} behind a window's end",
            "answers_behind_empty": f"{plural(count['answers_behind_empty'], 'answer')} behind an empty one",
            "answers_rewritten": f"the learning of {plural(count['answers_rewritten'], 'answer')} that the chat "
            "template writes in another way than the model at its turn",
        }
        words |= {
            name: f"{name} of {plural(count[name], 'row')}"
            for name in sorted(count)
            if name not in words
        }
        named = [words[name] for name in words if count[name]]
        read = ""
        if self.rows:
            read = f" (of {plural(self.rows, 'row')} read)"
        left_out = []
        if named:
            left_out = [f"{source}: left out {', '.join(named)}{read}"]
        answers = []
        size = self.sizes
        if across := size["answers_across"]:
            answers.append(
                f"{source}: {plural(across, 'answer')} that begin inside a token, together with the end of what was "
                "asked, count from that token on; a prompt that ends in a space is better without, and the answer with "
                "it"
            )
        about = round(size["answer_characters"] * size["tokens"] / max(1, size["characters"]))
        if size["trained"] < _FEW * about:
            answers.append(
                f"{source}: only {plural(size['trained'], 'token')} of answers count, where the answers in its rows "
                f"are about {about:,}; see what is left out, and one row as it is trained on (--show-row)"
            )
        return [*self.notes, *left_out, *answers]


def suffix_of(path: Path) -> str:
    """The suffix of a file in small letters, without that of compression."""
    return (path.with_suffix("") if is_packed(path) else path).suffix.lower()


def is_packed(path: Path) -> bool:
    """Tell whether a file's name ends in .gz."""
    return path.suffix.lower() == PACKED


def require_utf8(text: str, where: str) -> str:
    """Refuse text with lone surrogates, which JSON may spell out.

    Raises:
        ValueError: with the place.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}"
        raise ValueError(f"{where} is not text in UTF-8 ({half}); mend this row") from None
    return text


@contextmanager
def open_text(path: Path, reading: Reading) -> Iterator[BinaryIO]:
    """Open a file's bytes, unpacked, behind a byte order mark."""
    try:
        with gzip.open(path) if is_packed(path) else path.open("rb") as opened:
            file = cast("BinaryIO", opened)
            start = file.read(_LONGEST_MARK)
            for mark, (what, advice) in _NO_TEXT.items():
                if start.startswith(mark):
                    bytes_ = mark.hex(" ").upper()
                    raise ValueError(
                        f"{path} begins as {what} does ({bytes_}); {advice.format(path=path)}"
                    )
            marked = start.startswith(codecs.BOM_UTF8)
            reading.left_out["byte_order_marks"] += marked
            file.seek(len(codecs.BOM_UTF8) if marked else 0)
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is truncated or not compressed by gzip ({error}); fetch or copy it again"
        ) from error


def read_pieces(path: Path, reading: Reading | None = None) -> Iterator[str]:
    """Read a text file in pieces, each twice as long as the last, so that joining them stays cheap."""
    reading = reading or Reading()
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_text(path, reading) as file:
        size = _FIRST_BLOCK
        before = file.tell()
        begun = ""
        while True:
            block = file.read(size)
            if (place := block.find(0)) >= 0:
                raise ValueError(
                    f"{path} is no text: byte {before + place} is NUL, as in a binary file, or in UTF-16 without a "
                    "byte order mark; convert it, or give another file"
                )
            # The beginning of a character that the last block ended in.
            carried = len(decoder.getstate()[0])
            try:
                piece = begun + decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, before - carried + error.start) from error
            # Of a line end, perhaps.
            begun = ""
            if block and piece.endswith("\r"):
                begun = "\r"
            piece = piece.removesuffix(begun)
            reading.left_out["carriage_returns"] += piece.count("\r\n")
            yield piece.replace("\r\n", "\n")
            if not block:
                return
            before = before + len(block)
            size = min(2 * size, _LARGEST_BLOCK)


def _not_utf8(where: object, byte: int) -> ValueError:
    return ValueError(f"{where} is not UTF-8 text (byte {byte}); convert it, or give another file")


def read_json_lines(path: Path, reading: Reading | None = None) -> Iterator[tuple[str, Row]]:
    """Read the objects of a file with one on each line, with file and line; blank lines are skipped."""
    with open_text(path, reading or Reading()) as file:
        before = file.tell()
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                # Joined files have byte order marks inside.
                text = line.decode().removeprefix("\ufeff").strip()
                row = json.loads(text or "null")
            except UnicodeDecodeError as error:
                raise _not_utf8(where, before + error.start) from error
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{where}: not valid JSON ({error}); each line must be one object"
                ) from error
            if isinstance(row, dict):
                yield where, row
            elif text:
                raise ValueError(f"{where}: each line must be one JSON object, not {type(row).__name__}")
            before += len(line)


def are_apart(data: str, separator: str | None, by_row: bool = False) -> bool:
    """Tell whether a text is several documents, with a tokenizer's marks between them."""
    return separator is not None or by_row or data in (DEMO, DEMO_TRAINING) or is_folder(data)


def documents(
    data: str, separator: str | None, reading: Reading | None = None, by_row: bool = False
) -> Iterator[Iterable[str]]:
    """Stream the documents of a text, each in pieces: several where there is a separator, else one.

    A folder gives at least one for each text file, in the order of their paths.

    Args:
        data: as `surgeon.quality.data.load_windows` takes it.
        by_row: make every row of a table or a dataset a document without a separator, too.
        reading: counts what is left out as the text is read.

    Raises:
        FileNotFoundError: if there is no such file or dataset.
        ValueError: if it is no text, or a row of it is damaged, naming file and line.
    """
    reading = reading or Reading()
    if is_folder(data):
        for file in files_in(data):
            yield from documents(str(file), separator, reading, by_row)
        return
    rows = open_rows(data, reading, whole_rows=False)
    if rows is None and data not in (DEMO, DEMO_TRAINING):
        yield from _file_documents(data, separator, reading)
        return
    texts: Iterable[str]
    if rows is None:
        from surgeon.demo import demo_data, demo_training_data

        texts = demo_data() if data == DEMO else demo_training_data()
    else:
        texts = (text for _, text in read_column(rows, reading) if text is not None)
        if separator is None and not by_row:
            texts = _join_rows(texts)
    for text in texts:
        if separator is not None:
            yield from ([part] for part in _split_text([text], separator, reading))
        elif by_row and not text.strip():
            reading.left_out["empty_documents"] += 1
        else:
            yield [text]


def _file_documents(data: str, separator: str | None, reading: Reading) -> Iterator[Iterable[str]]:
    """Stream the documents of a text file, which has one at least."""
    path, column = file_and_column(data)
    assert path is not None
    if column is not None:
        raise ValueError(f"{path} is read as a text file, which has no columns; drop :{column}")
    pieces = read_pieces(path, reading)
    if separator is None:
        yield _require_text(pieces, path)
    else:
        yield from ([part] for part in _split_text(pieces, separator, reading))


def is_folder(data: str) -> bool:
    """Tell whether data is a folder of texts."""
    there = on_disk(data)
    return data != DEMO and there is not None and there.is_dir()


def files_in(folder: str) -> list[Path]:
    """List the text files below a folder, in the order of their paths."""
    there = _walk_files(on_disk(folder) or Path(folder))
    files = [path for path in there if suffix_of(path) in TEXT_FILES or is_table(path)]
    if not files:
        endings = ", ".join((*TEXT_FILES, *JSON_LINES, PARQUET))
        raise ValueError(
            f"{folder} has no files of text in it, by their endings ({endings}); give another folder"
        )
    return files


def _walk_files(folder: Path, within: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Walk a folder; links are followed, but for those that lead back."""
    within |= {folder.resolve()}
    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path
        elif path.is_dir() and path.resolve() not in within:
            yield from _walk_files(path, within)


def _require_text(pieces: Iterable[str], path: Path) -> Iterator[str]:
    has_text = False
    for piece in pieces:
        has_text = has_text or bool(piece.strip())
        yield piece
    if not has_text:
        raise ValueError(f"{path} is empty; give a text file with something in it")


def file_and_column(data: str) -> tuple[Path | None, str | None]:
    """Find the file and column that data names; no file for the name of a dataset or demo."""
    there = on_disk(data)
    if there is not None and there.is_file():
        return there, None
    name, colon, column = data.rpartition(":")
    beside = None
    if colon:
        beside = on_disk(name)
    if beside is not None and beside.is_file():
        return beside, column
    if there is not None and data != DEMO:
        if there.is_dir():
            raise ValueError(f"{data} is a folder; name a file in it")
        raise ValueError(
            f"{data} is a pipe or a device, which can be read only once; write it to a file (zcat text.gz > text.txt), "
            "or name the file itself (text and JSON lines are also read from .gz)"
        )
    if not (colon and is_table(Path(name))):
        name = data
    file = Path(name)
    if suffix_of(file) in TEXT_FILES or is_packed(file) or is_table(file) or is_path(name):
        raise FileNotFoundError(f"there is no file {name}")
    return None, None


def _split_text(pieces: Iterable[str], separator: str, reading: Reading) -> Iterator[str]:
    """Split a text at separators, without line ends beside them; blank parts are left out."""
    rest = ""
    is_first = True
    for piece in pieces:
        *parts, rest = (rest + piece).split(separator)
        for part in parts:
            is_first = False
            if part.strip():
                yield part.strip("\n")
            else:
                reading.left_out["empty_documents"] += 1
    if rest.strip():
        yield rest.strip("\n")
    elif is_first:  # else it is the end of a text whose documents all end with a separator
        reading.left_out["empty_documents"] += 1


def _join_rows(rows: Iterable[str]) -> Iterator[str]:
    piece: list[str] = []
    characters = 0
    for row in rows:
        if len(piece) == _ROWS_TOGETHER or characters > _CHARACTERS_TOGETHER:
            yield ROW_SEPARATOR.join([*piece, ""])
            piece = []
            characters = 0
        piece.append(row)
        characters += len(row)
    if any(row.strip() for row in piece):
        yield ROW_SEPARATOR.join(piece)


def open_rows(data: str, reading: Reading, whole_rows: bool = True) -> TextRows | None:
    """Open the rows of a table or a dataset; None for other text. Errors in a file come as rows are read.

    Args:
        whole_rows: else only the named column, or text, of a parquet file that has it.
    """
    if data in (DEMO, DEMO_TRAINING) or is_folder(data):
        return None
    path, column = file_and_column(data)
    if path is not None:
        if not is_table(path):
            return None
        if suffix_of(path) == PARQUET:
            found = _parquet_rows(path, None if whole_rows else column or TEXT_COLUMN)
        else:
            found = read_json_lines(path, reading)
        return TextRows(found, str(path), column, str(path))
    name, config, split, chosen = (data.split(":", 3) + [""] * 3)[:4]
    if not name:
        raise ValueError(
            f"{data!r} names no text; give a file, a folder, name:config:split of a dataset, or demo"
        )
    import datasets

    try:
        with without_retries():
            stream = iter(
                datasets.load_dataset(name, config or None, split=split or "test", streaming=True)
            )
            first = list(islice(stream, 1))
    except Exception as error:  # whatever fails inside `datasets`, the way out is the same
        raise FileNotFoundError(
            f"{data} is no file here and could not be read as a dataset ({first_line(error)}); give a local text, "
            ".jsonl or .parquet file, or name:config:split of a dataset that can be reached"
        ) from error

    def rows() -> Iterator[tuple[str, Row]]:
        try:
            for number, row in enumerate(chain(first, stream), start=1):
                yield f"{name}: row {number}", without_nulls(row)
        except Exception as error:  # `datasets` has given up
            raise OSError(
                f"the stream of dataset {data} ended in an error ({type(error).__name__}: {first_line(error)}); try "
                "again"
            ) from error

    return TextRows(rows(), f"dataset {name}", chosen or None, f"{name}:{config}:{split}")


def is_table(path: Path) -> bool:
    """Tell whether `open_rows` reads a file, by its name."""
    return suffix_of(path) in (*JSON_LINES, PARQUET)


class TextRows(NamedTuple):
    """Rows of a file or a dataset.

    Attributes:
        rows: a stream, each with its place.
        source: for error messages.
        column: named by the user.
        named: as a user names it, in front of a colon and a column.
    """

    rows: Iterator[tuple[str, Row]]
    source: str
    column: str | None
    named: str


def _parquet_rows(path: Path, wanted: str | None) -> Iterator[tuple[str, Row]]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    if is_packed(path):
        raise ValueError(
            f"{path} is compressed as a whole, and parquet is so within; unpack it (gunzip {path})"
        )
    row = 0
    which = " is"
    try:
        file = parquet.ParquetFile(path)
        columns = None
        if wanted in file.schema_arrow.names:
            columns = [wanted]
            which = f": column {wanted!r} is"
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=columns):
            for values in batch.to_pylist():
                row += 1
                yield f"{path}: row {row}", without_nulls(values)
    except (pyarrow.ArrowException, OSError) as error:
        reason = first_line(error)
        raise ValueError(f"{path} is damaged or no parquet file ({reason}); copy it again") from error
    except UnicodeDecodeError as error:
        reason = f"not text in UTF-8 (byte {error.start} of a row behind row {row})"
        raise ValueError(f"{path}{which} {reason}; mend that row") from error


def without_nulls(row: Row) -> Row:
    """Drop the null keys that Arrow adds to objects of a row."""
    return {name: _without_null_keys(value) for name, value in row.items()}


def _without_null_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_null_keys(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_null_keys(each) for each in value]
    return value


def read_column(table: TextRows, reading: Reading) -> Iterator[tuple[str, str | None]]:
    """Read one column of rows.

    Args:
        reading: notes the column, and counts rows without text.

    Returns:
        Place and text of each row; None where that is null, or the row has no such column.

    Raises:
        ValueError: if a row is damaged or holds something else there (with file and line), no row has text there, or
            the column is ambiguous.
    """
    rows, source, column, named = table
    chosen = column or TEXT_COLUMN
    looked_at, is_whole = _read_ahead(rows, chosen)
    if not looked_at:
        raise ValueError(f"{source} is empty; give a file with rows in it")
    place = source
    if not is_whole:
        place = f"{source} (its first {len(looked_at):,} rows)"
    is_guessed = column is None and chosen not in looked_at[-1][1]
    if is_guessed:
        chosen = _choose_column(looked_at, place, named)
        if not is_whole:
            reading.notes.append(f"column {chosen!r} is read, the only one of text in {place}")
    elif chosen not in looked_at[-1][1]:
        names = dict.fromkeys(name for _, row in looked_at for name in row)
        raise ValueError(f"{place} has no column {chosen!r}; the columns are {', '.join(names)}")
    reading.column = chosen
    has_text = False
    for where, row in chain(looked_at, rows):
        reading.rows += 1
        if is_guessed and (others := [name for name in _text_columns(row) if name != chosen]):
            raise ValueError(
                f"{where}: a column {others[0]!r} begins here, and {chosen!r} was the only one of text in {place}; say "
                f"which one, as in {named}:{others[0]}"
            )
        value = row.get(chosen)
        if value is None:
            reading.left_out["null_rows" if chosen in row else "rows_without_column"] += 1
            yield where, None
        else:
            has_text = True
            yield where, _check_text(value, where, chosen)
    if not has_text:
        raise ValueError(
            f"column {chosen!r} of {source} has no text in any of its {reading.rows:,} rows; say another one, as in "
            f"{named}:COLUMN"
        )


def _read_ahead(rows: Iterator[tuple[str, Row]], wanted: str) -> tuple[list[tuple[str, Row]], bool]:
    """Read rows up to the first that has a column, within limits; and whether these are all."""
    looked_at: list[tuple[str, Row]] = []
    characters = 0
    for where, row in rows:
        looked_at.append((where, row))
        characters += sum(len(value) for value in row.values() if isinstance(value, str))
        if wanted in row or len(looked_at) == _ROWS_LOOKED_AT or characters > _CHARACTERS_LOOKED_AT:
            return looked_at, False
    return looked_at, True


def _text_columns(row: Row) -> list[str]:
    """Columns of a row that may hold its text."""
    return [name for name, value in row.items() if isinstance(value, str) or name == TEXT_COLUMN]


def _choose_column(rows: Sequence[tuple[str, Row]], place: str, named: str) -> str:
    """Choose the column of text of rows in `place`, the part of a source that was looked at."""
    names = [*dict.fromkeys(name for _, row in rows for name in _text_columns(row))]
    if TEXT_COLUMN in names:
        return TEXT_COLUMN
    for _, row in rows:
        for chat, value in row.items():
            first = value[0] if isinstance(value, list) and value else None
            if isinstance(first, dict) and not first.keys().isdisjoint(_ROLE_KEYS):
                columns = " or ".join(f"{named}:{name}" for name in names)
                raise ValueError(
                    f"{place} holds conversations in column {chat!r}, which are not read as text; heal and train take "
                    f"them (as {named}:{chat}); to read another column as text, say which: "
                    f"{columns or 'give text'}"
                )
    if len(names) == 1:
        return names[0]
    if not names:
        raise ValueError(f"{place} has no column of text")
    raise ValueError(
        f"{place} has several columns of text: {', '.join(names)}; say which one, as in {named}:{names[0]}"
    )


def _check_text(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: column {column!r} should hold text, not {show_value(value)}; say another one if need be"
        )
    return require_utf8(value, f"{where}: column {column!r}")
