"""Tables whose rows have a column of text: .jsonl, .json (one object a line), .parquet, or rows from elsewhere.

Which column is read does not depend on where a table begins. It is the one that is said; or else the one named text,
if any row has such a key, be it null; or else the only one that holds strings. Rows are looked through until it is
known, a thousand at most; should a row behind those speak against the choice, it is refused instead of read on. Rows
without text are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from surgeon.errors import first_line, shown
from surgeon.quality.text_files import Reading, ending, is_packed, lone_surrogate, read_json_lines

JSON_LINES = (".jsonl", ".json", ".ndjson")
PARQUET = ".parquet"
TEXT_COLUMN = "text"
_ROLE_KEYS = {"role", "from"}  # of messages
_PARQUET_ROWS = 64
_ROWS_LOOKED_AT = 1000
_CHARACTERS_LOOKED_AT = 1 << 26

Row = dict[str, Any]


def is_table(path: Path) -> bool:
    """Whether a file's name says that it has rows and columns: what `read_table` reads."""
    return ending(path) in (*JSON_LINES, PARQUET)


def read_table(
    path: Path, column: str | None = None, reading: Reading | None = None
) -> Iterator[tuple[str, str | None]]:
    """One column of a .jsonl, .json (one object a line) or .parquet file, as a stream.

    Args:
        column: by default the column named text, or else the only one that holds strings.
        reading: is told the column, and how many rows have no text.

    Returns:
        Where each row stands, and its text; None where that is null, or the row has no such column.

    Raises:
        ValueError: if a row is damaged or holds something else there (with file and line), no row has text there, or
            it is not clear which column is meant.
    """
    reading = reading or Reading()
    if ending(path) == PARQUET:
        column = _parquet_column(path, column)
        rows = read_rows(path, reading, [column])
    else:
        rows = read_rows(path, reading)
    return read_column(rows, str(path), column, reading)


def read_rows(path: Path, reading: Reading, columns: list[str] | None = None) -> Iterator[tuple[str, Row]]:
    """The rows of a table, each with where it stands, as a stream.

    Args:
        columns: of a parquet file, which alone are read; None for all.

    Raises:
        ValueError: if a row is damaged, with file and line.
    """
    if ending(path) != PARQUET:
        yield from ((f"{path}:{number}", row) for number, row in read_json_lines(path, reading))
        return
    row = 0
    try:
        with _parquet(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=columns):
                for values in batch.to_pylist():
                    row += 1
                    yield f"{path}: row {row}", values
    except UnicodeDecodeError as error:
        which = " is"
        if columns:
            which = f": column {columns[0]!r} is"
        reason = f"not text in UTF-8 (byte {error.start} of a row behind row {row})"
        raise ValueError(f"{path}{which} {reason}; mend that row") from error


def read_column(
    rows: Iterator[tuple[str, Row]],
    source: str,
    column: str | None,
    reading: Reading,
    how: str = "{source}:{column}",
) -> Iterator[tuple[str, str | None]]:
    """One column of rows, as `read_table` has it of a file.

    Args:
        rows: each with where it stands.
        source: what they are from, for error messages.
        how: how a user says which column is meant.

    Raises:
        ValueError: as `read_table`.
    """
    chosen = column or TEXT_COLUMN
    looked_at, is_whole = _look(rows, chosen)
    if not looked_at:
        raise ValueError(f"{source} is empty; give a file with rows in it")
    place = source
    if not is_whole:
        place = f"{source} (its first {len(looked_at):,} rows)"
    is_guessed = column is None and chosen not in looked_at[-1][1]
    if is_guessed:
        with_text = dict.fromkeys(name for _, row in looked_at for name in _of_text(row))
        chats = dict.fromkeys(name for _, row in looked_at for name in row if _holds_messages(row[name]))
        chosen = _choose_column(place, with_text, source, chats, how)
        if not is_whole:
            reading.notes.append(f"column {chosen!r} is read, the only one of text in {place}")
    elif chosen not in looked_at[-1][1]:
        raise _no_column(chosen, place, dict.fromkeys(name for _, row in looked_at for name in row))
    reading.column = chosen
    has_text = False
    for where, row in chain(looked_at, rows):
        reading.rows += 1
        if is_guessed and (others := [name for name in _of_text(row) if name != chosen]):
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
            yield where, _checked(value, where, chosen)
    if not has_text:
        raise ValueError(
            f"column {chosen!r} of {source} has no text in any of its {reading.rows:,} rows; say another one, as in "
            f"{how.format(source=source, column='COLUMN')}"
        )


def _look(rows: Iterator[tuple[str, Row]], wanted: str) -> tuple[list[tuple[str, Row]], bool]:
    """The rows up to the first that has a column, but not more than are looked at; and whether these are all."""
    looked_at: list[tuple[str, Row]] = []
    characters = 0
    for where, row in rows:
        looked_at.append((where, row))
        characters += sum(len(value) for value in row.values() if isinstance(value, str))
        if wanted in row or len(looked_at) == _ROWS_LOOKED_AT or characters > _CHARACTERS_LOOKED_AT:
            return looked_at, False
    return looked_at, True


def _of_text(row: Row) -> list[str]:
    """The columns that a row's text may be in."""
    return [name for name, value in row.items() if isinstance(value, str) or name == TEXT_COLUMN]


def _holds_messages(value: Any) -> bool:
    first = None
    if isinstance(value, list) and value:
        first = value[0]
    return isinstance(first, dict) and not first.keys().isdisjoint(_ROLE_KEYS)


def _choose_column(
    place: str, with_text: Iterable[str], source: str, with_chats: Iterable[str], how: str = "{source}:{column}"
) -> str:
    """The column to read of `source`, by what was looked at of it, `place`; arguments as `read_column`."""
    names = list(with_text)
    if TEXT_COLUMN in names:
        return TEXT_COLUMN
    for chat in with_chats:
        columns = " or ".join(how.format(source=source, column=name) for name in names) or "give text"
        raise ValueError(
            f"{place} holds conversations in column {chat!r}, which are not read as text; heal and train take them "
            f"(as {how.format(source=source, column=chat)}); to read another column as text, say which: {columns}"
        )
    if len(names) == 1:
        return names[0]
    if not names:
        raise ValueError(f"{place} has no column of text")
    example = how.format(source=source, column=names[0])
    raise ValueError(f"{place} has several columns of text: {', '.join(names)}; say which one, as in {example}")


def _no_column(column: str, place: str, names: Iterable[str]) -> ValueError:
    return ValueError(f"{place} has no column {column!r}; the columns are {', '.join(names)}")


def _checked(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {column!r} should hold text, not {shown(value)}; say another one if need be")
    if (surrogate := lone_surrogate(value)) is not None:
        raise ValueError(f"{where}: column {column!r} is not text in UTF-8 ({surrogate}); mend this row")
    return value


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    if is_packed(path):
        raise ValueError(f"{path} is compressed as a whole, and parquet is so within; unpack it (gunzip {path})")
    try:
        yield parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = first_line(error)
        raise ValueError(f"{path} is damaged or no parquet file ({reason}); copy it again") from error


def _parquet_column(path: Path, column: str | None) -> str:
    """The column to read of a parquet file, whose schema says which have text."""
    from pyarrow import types

    with _parquet(path) as file:
        schema = file.schema_arrow
    if column is not None:
        if column not in schema.names:
            raise _no_column(column, str(path), schema.names)
        return column
    kinds = {each.name: each.type.value_type if types.is_dictionary(each.type) else each.type for each in schema}
    strings = (types.is_string, types.is_large_string, types.is_string_view)
    with_text = [name for name, kind in kinds.items() if name == TEXT_COLUMN or any(is_(kind) for is_ in strings)]
    lists = {name: kind.value_type for name, kind in kinds.items() if types.is_list(kind) or types.is_large_list(kind)}
    with_chats = [
        name
        for name, kind in lists.items()
        if types.is_struct(kind) and not _ROLE_KEYS.isdisjoint(field.name for field in kind)
    ]
    return _choose_column(str(path), with_text, str(path), with_chats)
