"""Tables with a column of text: .jsonl, .json (one object a line), .parquet, or rows from elsewhere.

The column does not depend on where a table begins: it is the named one; or text, if any row has such a key, be it null;
or the only one that holds strings. At most a thousand rows are looked through; a later row that contradicts the choice
is refused. Rows without text are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from surgeon.errors import first_line, shown
from surgeon.quality.text_files import Reading, ending, is_packed, read_json_lines, require_utf8

JSON_LINES = (".jsonl", ".json", ".ndjson")
PARQUET = ".parquet"
TEXT_COLUMN = "text"
_ROLE_KEYS = {"role", "from"}  # of messages
_PARQUET_ROWS = 64
_ROWS_LOOKED_AT = 1000
_CHARACTERS_LOOKED_AT = 1 << 26

Row = dict[str, Any]


def is_table(path: Path) -> bool:
    """Tell whether `open_table` reads a file, by its name."""
    return ending(path) in (*JSON_LINES, PARQUET)


class TextRows(NamedTuple):
    """Rows of a file or a dataset.

    Attributes:
        rows: a stream, each with its place.
        source: for error messages.
        column: named by the user.
        how: pattern by which a user names a column.
    """

    rows: Iterator[tuple[str, Row]]
    source: str
    column: str | None = None
    how: str = "{source}:{column}"


def open_table(path: Path, column: str | None, reading: Reading, whole_rows: bool = True) -> TextRows:
    """Open the rows of a .jsonl, .json (one object a line) or .parquet file; errors come as rows are read.

    Args:
        whole_rows: else only the named column, or text, of a parquet file that has it.
    """
    if ending(path) == PARQUET:
        return TextRows(
            _parquet_rows(path, None if whole_rows else column or TEXT_COLUMN), str(path), column
        )
    rows = ((f"{path}:{number}", row) for number, row in read_json_lines(path, reading))
    return TextRows(rows, str(path), column)


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
    rows, source, column, how = table
    chosen = column or TEXT_COLUMN
    looked_at, is_whole = _read_ahead(rows, chosen)
    if not looked_at:
        raise ValueError(f"{source} is empty; give a file with rows in it")
    place = source
    if not is_whole:
        place = f"{source} (its first {len(looked_at):,} rows)"
    is_guessed = column is None and chosen not in looked_at[-1][1]
    if is_guessed:
        chosen = _choose_column(looked_at, place, source, how)
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
                f"which one, as in {how.format(source=source, column=others[0])}"
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
            f"{how.format(source=source, column='COLUMN')}"
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


def _choose_column(rows: Sequence[tuple[str, Row]], place: str, source: str, how: str) -> str:
    """Choose the column of text of rows in `place`, the part of `source` that was looked at."""
    names = [*dict.fromkeys(name for _, row in rows for name in _text_columns(row))]
    if TEXT_COLUMN in names:
        return TEXT_COLUMN
    for _, row in rows:
        for chat, value in row.items():
            first = value[0] if isinstance(value, list) and value else None
            if isinstance(first, dict) and not first.keys().isdisjoint(_ROLE_KEYS):
                columns = " or ".join(how.format(source=source, column=name) for name in names)
                raise ValueError(
                    f"{place} holds conversations in column {chat!r}, which are not read as text; heal and train take "
                    f"them (as {how.format(source=source, column=chat)}); to read another column as text, say which: "
                    f"{columns or 'give text'}"
                )
    if len(names) == 1:
        return names[0]
    if not names:
        raise ValueError(f"{place} has no column of text")
    example = how.format(source=source, column=names[0])
    raise ValueError(
        f"{place} has several columns of text: {', '.join(names)}; say which one, as in {example}"
    )


def _check_text(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: column {column!r} should hold text, not {shown(value)}; say another one if need be"
        )
    return require_utf8(value, f"{where}: column {column!r}")
