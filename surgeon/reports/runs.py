"""The folders that commands write, read for the page: recognised by their JSON record, their tables checked."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from surgeon.errors import did_you_mean, first_line, shown
from surgeon.provenance import FORMAT
from surgeon.reports.blocks import Block, Finding
from surgeon.reports.drawing import MOST_LAYERS

SHORT_HASH = 12


@dataclass(frozen=True)
class TableFile:
    """A CSV file of a run.

    Attributes:
        numbers: columns that must be there and hold numbers (infinity and nan are numbers).
        words: columns that must be there and hold text.
        layers: columns that must be there and hold layers, whole numbers from 0.
        one_of: columns of `words` that hold one of these.
        may_be_empty: the command writes it without rows if there is nothing to write.
    """

    name: str
    numbers: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    one_of: Mapping[str, Collection[str]] = field(default_factory=dict)
    optional: bool = False
    may_be_empty: bool = False


@dataclass(frozen=True)
class Run:
    """One run of one command.

    Attributes:
        folder: where it lies.
        name: what the page calls it.
        record: its JSON record.
        tables: by file name.
        texts: other files, by name.
    """

    kind: Kind
    folder: Path
    file: Path
    name: str
    record: dict[str, Any]
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """As the user named it."""
        return self.kind.model_of(self.record)[0]

    @property
    def model_hash(self) -> str:
        """Of the model that was operated on; empty where the record has none."""
        return self.kind.model_of(self.record)[1]


def model_in_record(record: dict[str, Any]) -> tuple[str, str]:
    """Model and its hash where `surgeon.provenance` puts them."""
    return str(record.get("model") or "a model without a name"), str(record.get("model_hash") or "")


@dataclass(frozen=True)
class Kind:
    """A kind of run: how it is recognised, which files it has, and what the page shows of it.

    Attributes:
        name: the command that writes it.
        title: of its section.
        record: pattern of its JSON record's name.
        show: the section's contents.
        findings: what it has to say in the summary.
        together: what the page shows once of several runs of a model, at the end of the last one's section.
        without: what a page cannot say that has no such run; empty if nothing is missed.
        missing: what a run leaves out.
        provenance: of the record, what says where the numbers come from.
        is_ours: looks into a record whose name alone does not tell.
        model_of: the model's name and its hash in a record.
        of_surgery: whether it has to do with a model that is operated on, of which a page misses what it does not have.
    """

    name: str
    title: str
    record: str
    show: Callable[[Run], Sequence[Block]]
    tables: tuple[TableFile, ...] = ()
    texts: tuple[str, ...] = ()
    findings: Callable[[Run], Sequence[Finding]] = lambda _: ()
    missing: Callable[[Run], Sequence[str]] = lambda _: ()
    together: Callable[[Sequence[Run]], Sequence[Block]] = lambda _: ()
    without: str = ""
    provenance: Callable[[dict[str, Any]], dict[str, Any]] = lambda record: record
    is_ours: Callable[[dict[str, Any]], bool] = lambda _: True
    model_of: Callable[[dict[str, Any]], tuple[str, str]] = model_in_record
    of_surgery: bool = True


@contextmanager
def told_with_files(run: Run) -> Iterator[None]:
    """Name the run's files where what is said of it trips over what they hold.

    Raises:
        ValueError: as it was, if it names them already.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ValueError) and str(run.folder) in str(error):
            raise
        raise ValueError(
            f"{run.file}, or a table beside it, holds what surgeon {run.kind.name} does not write "
            f"({type(error).__name__}: {first_line(error)}); make it again"
        ) from error


def read_runs(path: Path, kinds: Sequence[Kind]) -> list[Run]:
    """Everything that a folder holds, or the one run whose record the path is.

    Raises:
        FileNotFoundError: if there is no such folder, or a file of a run is missing.
        ValueError: if the folder holds no known record, or a file is damaged.
    """
    if not path.exists():
        raise FileNotFoundError(f"no folder {path}; give folders that surgeon commands wrote")
    files = [path] if path.is_file() else sorted(path.iterdir())
    runs = [run for kind in kinds for file in files if file.match(kind.record) and (run := _read(kind, file))]
    if not runs:
        looked_for = ", ".join(dict.fromkeys(kind.record for kind in kinds))
        raise ValueError(f"{path} holds no run of a surgeon command; looked for {looked_for}")
    return runs


def _read(kind: Kind, file: Path) -> Run | None:
    record = _read_record(file)
    if not kind.is_ours(record):
        return None
    _check_format(kind, file, record)
    folder = file.parent
    tables = {}
    for table in kind.tables:
        if (folder / table.name).is_file():
            tables[table.name] = read_table(folder / table.name, table)
        elif not table.optional:
            raise FileNotFoundError(f"{folder} has {file.name} but no {table.name}; run surgeon {kind.name} to its end")
    texts = {name: _read_text(folder / name) for name in kind.texts if (folder / name).is_file()}
    return Run(kind, folder, file, folder.resolve().name, record, tables, texts)


def _check_format(kind: Kind, file: Path, record: dict[str, Any]) -> None:
    """Refuse numbers that older versions measured; what `surgeon.provenance` wrote tells them, by its command line."""
    made = kind.provenance(record)
    if "command" in made and made.get("format") != FORMAT:
        raise ValueError(
            f"{file} was written by an older version of surgeon (format {made.get('format')}, not {FORMAT}), which "
            f"measured models with dropout wrongly; run surgeon {kind.name} again, with another output folder"
        )


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); make it again") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} should hold a JSON object, not {type(record).__name__}; make it again")
    return record


def read_table(path: Path, wanted: TableFile) -> pd.DataFrame:
    """A CSV file with the columns wanted of it.

    Raises:
        ValueError: naming the file, and the column if one is missing or holds something else than it should.
    """
    try:
        table = pd.read_csv(io.StringIO(_read_text(path)), keep_default_na=False, na_values=["", "nan", "NaN"])
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{path} is no table of comma-separated values ({error}); make it again") from error
    for name in (*wanted.words, *wanted.layers, *wanted.numbers):
        if name not in table.columns:
            raise ValueError(f"{path} has no column {name}; make it again with this version of surgeon")
    if table.empty and not wanted.may_be_empty:
        raise ValueError(f"{path} has no rows; run the command that writes it to its end")
    intervals = [name for name in table.columns if name.endswith(("_low", "_high")) and name not in wanted.numbers]
    for name in (*wanted.layers, *wanted.numbers, *intervals):
        table[name] = _as_numbers(path, table[name])
    for name in wanted.layers:
        table[name] = _as_layers(path, table[name])
    table = table.assign(**{name: table[name].fillna("").astype(str) for name in wanted.words})
    for name, known in wanted.one_of.items():
        _check_words(path, table[name], known)
    return table


def _check_words(path: Path, column: pd.Series[Any], known: Collection[str]) -> None:
    wrong = ~column.isin(list(known))
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        word = column.iloc[row]
        raise ValueError(
            f"{path} has {shown(word)} in column {column.name}, line {row + 2}; {did_you_mean(word, known)} "
            "(or make it again)"
        )


def _as_numbers(path: Path, column: pd.Series[Any]) -> pd.Series[Any]:
    if pd.api.types.is_bool_dtype(column):
        return column.astype(float)
    values = pd.to_numeric(column, errors="coerce")
    wrong = values.isna() & column.notna()
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        raise ValueError(
            f"{path} has {str(column.iloc[row])[:40]!r} in column {column.name}, line {row + 2}, where a number should "
            "be; make it again"
        )
    return values


def _as_layers(path: Path, column: pd.Series[Any]) -> pd.Series[Any]:
    wrong = ~((column >= 0) & (column < MOST_LAYERS) & (column % 1 == 0))
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        raise ValueError(
            f"{path} has {column.iloc[row]} in column {column.name}, line {row + 2}, where a layer (0, 1, 2, ...) "
            "should be; make it again"
        )
    return column.astype(int)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error}); make it again") from error
