"""The base of findings: a JSON record with tables beside it, read and written here alone, and blocks of its section.

Blocks are independent of their looks; `drawing` and `maps` have those that are drawn.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, Field, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pandas as pd

from surgeon.named import public
from surgeon.processes.files import write_json, write_table
from surgeon.version import FORMAT
from surgeon.words import (
    MOST_LAYERS,
    WIDTH,
    align_columns,
    did_you_mean,
    first_line,
    hang_indent,
    plural,
    show_value,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from surgeon.findings.drawing import Picture

SHORT_HASH = 12

Record = dict[str, Any]  # a JSON object that a command has written


ROWS = "rows"  # of a record: how many each of its tables has


@dataclass(frozen=True)
class TableFile:
    """A CSV file of a result.

    Attributes:
        numbers: required columns of numbers (infinity and nan among them).
        words: required columns of text.
        layers: required columns of layers, whole numbers from 0.
        one_of: allowed values of columns of `words`.
        optional: not written without rows.
        may_be_empty: written without rows, too.
        digits: of each number.
        missing: text of NaN.
    """

    name: str
    numbers: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    one_of: Mapping[str, Collection[str]] = field(default_factory=dict)
    optional: bool = False
    may_be_empty: bool = False
    digits: int = 9
    missing: str = "nan"

    def write(self, folder: Path, table: pd.DataFrame) -> Path:
        write_table(folder / self.name, table, self.digits, self.missing)
        return folder / self.name

    def read(self, folder: Path) -> pd.DataFrame:
        """Read and check the table; a ValueError names the file, and a column that is missing or wrong."""
        path = folder / self.name
        try:
            table = pd.read_csv(
                io.StringIO(read_text(path)), keep_default_na=False, na_values=["", "nan", "NaN"]
            )
        except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
            raise ValueError(
                f"{path} is no table of comma-separated values ({error}); make it again"
            ) from error
        for name in (*self.words, *self.layers, *self.numbers):
            if name not in table.columns:
                raise ValueError(
                    f"{path} has no column {name}; make it again with this version of surgeon"
                )
        if table.empty and not self.may_be_empty:
            raise ValueError(f"{path} has no rows; run the command that writes it to its end")
        intervals = [
            name
            for name in table.columns
            if name.endswith(("_low", "_high")) and name not in self.numbers
        ]
        for name in (*self.layers, *self.numbers, *intervals):
            column = table[name]
            if pd.api.types.is_bool_dtype(column):
                table[name] = column.astype(float)
                continue
            table[name] = pd.to_numeric(column, errors="coerce")
            wrong = table[name].isna() & column.notna()
            _refuse_first(path, column, wrong, "{!r}", "where a number should be; make it again")
        for name in self.layers:
            is_layer = (table[name] >= 0) & (table[name] < MOST_LAYERS) & (table[name] % 1 == 0)
            _refuse_first(
                path,
                table[name],
                ~is_layer,
                "{}",
                "where a layer (0, 1, 2, ...) should be; make it again",
            )
            table[name] = table[name].astype(int)
        table = table.assign(**{name: table[name].fillna("").astype(str) for name in self.words})
        for name, choices in self.one_of.items():
            unknown = ~table[name].isin([*choices]).to_numpy()
            if unknown.any():
                row = int(unknown.argmax())
                word = table[name].iloc[row]
                raise ValueError(
                    f"{path} has {show_value(word)} in column {name}, line {row + 2}; {did_you_mean(word, choices)} "
                    "(or make it again)"
                )
        return table


def table_file(name: str, *columns: Any, **more: Any) -> Any:
    """Declare a field of a result that is a CSV file, as `TableFile` takes it; an optional one may have no rows."""
    metadata = {"file": TableFile(name, *columns, **more)}
    if metadata["file"].optional:
        return field(default_factory=pd.DataFrame, metadata=metadata)
    return field(metadata=metadata)


def _refuse_first(
    path: Path, column: pd.Series[Any], wrong: pd.Series[bool], how: str, why: str
) -> None:
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        value = column.iloc[row]
        value = how.format(str(value)[:40] if isinstance(value, str) else value)
        raise ValueError(f"{path} has {value} in column {column.name}, line {row + 2}, {why}")


def read_record(path: Path) -> Record:
    """Read a JSON object; a ValueError names the file if it is none."""
    try:
        record = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); make it again") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} should hold a JSON object, not {type(record).__name__}; make it again")
    return record


def read_text(path: Path) -> str:
    """Read a text; a ValueError names the file if it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error}); make it again") from error


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a command's run; its tables are fields (`table_file`).

    A missing table has no rows. `print` shows a summary for a terminal.

    Attributes:
        record: provenance, settings and counts, as in the JSON file.
        files: written files and pictures; of a result that was read, its record.
    """

    COMMAND: ClassVar[str]  # that writes it
    RECORD: ClassVar[str]  # name of the JSON file, or a pattern of it
    TABLES: ClassVar[dict[str, TableFile]] = {}  # by field, the one that `table` returns first
    TITLE: ClassVar[str] = ""  # of its section
    WITHOUT: ClassVar[str] = ""  # what a page cannot say that has no such result
    OF_SURGERY: ClassVar[bool] = True  # whether it is of a model that is operated on

    _: KW_ONLY
    record: Record = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    def __init_subclass__(cls) -> None:
        cls.TABLES = cls.TABLES | {
            name: one.metadata["file"]
            for name, one in vars(cls).items()
            if isinstance(one, Field) and "file" in one.metadata
        }

    @classmethod
    def read(cls, path: Path, model_hash: str | None = None) -> Self:
        """Read a folder, or the files beside a record.

        Args:
            model_hash: of the model that it has to be of.

        Raises:
            FileNotFoundError: if the folder holds none, or a file is missing.
            ValueError: if a file is damaged, was written by an older version, or it is of another model.
        """
        folder, file = (path.parent, path) if path.is_file() else (path, path / cls.RECORD)
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no {file.name}; give the output folder of a finished surgeon {cls.COMMAND}"
            )
        record = read_record(file)
        stated = record.pop(ROWS, {})
        made = cls.provenance(record)
        if "command" in made and made.get("format") != FORMAT:
            raise ValueError(
                f"{file} was written by an older version of surgeon (format {made.get('format')}, not {FORMAT}), which "
                f"measured models with dropout wrongly; run surgeon {cls.COMMAND} again, with another output folder"
            )
        model, its_hash = cls.model_of(record)
        if model_hash is not None and its_hash != model_hash:
            a = "a"
            if cls.COMMAND[0] in "aeio":
                a = "an"
            raise ValueError(
                f"{folder} holds {a} {cls.COMMAND} of another model: {model} with the hash {its_hash[:SHORT_HASH]}, "
                f"while this model has {model_hash[:SHORT_HASH]}; give a folder made with the same model"
            )
        found: Record = {}
        for name, table in cls.TABLES.items():
            if (folder / table.name).is_file():
                found[name] = rows = table.read(folder)
                least = stated.get(table.name, 0)
                if len(rows) < least:
                    raise ValueError(
                        f"{folder / table.name} has {len(rows)} of the {least} rows that {file.name} tells of; run "
                        f"surgeon {cls.COMMAND} again on its folder"
                    )
            elif not table.optional:
                raise FileNotFoundError(
                    f"{folder} has {file.name} but no {table.name}; run surgeon {cls.COMMAND} to its end"
                )
        with name_file_in_errors(file, cls.COMMAND):
            return cls(**found | cls.facts(record, file), record=record, files=(file,))

    @classmethod
    def facts(cls, record: Record, file: Path) -> Record:  # noqa: ARG003
        """Fields from the record in a file, by name; a ValueError names the file if they are not there."""
        return {}

    @classmethod
    def provenance(cls, record: Record) -> Record:
        """The part of a record that tells where its numbers come from."""
        return record

    @classmethod
    def model_of(cls, record: Record) -> tuple[str, str]:
        """The model that was operated on, as the user named it, and its hash; empty where the record has none."""
        return str(record.get("model") or "a model without a name"), str(record.get("model_hash") or "")

    @classmethod
    def is_ours(cls, record: Record) -> bool:  # noqa: ARG003
        return True

    @property
    def model(self) -> str:
        return self.model_of(self.record)[0]

    @property
    def model_hash(self) -> str:
        return self.model_of(self.record)[1]

    @property
    def label(self) -> str:
        return public(self.model) or Path(self.model).resolve().name

    @property
    def name(self) -> str:
        """The folder's name."""
        if not self.files:
            return self.label
        return self.files[0].parent.resolve().name

    @property
    def heading(self) -> str:
        return str(self.record["heading"])

    def write(self, folder: Path) -> list[Path]:
        found = [(table, getattr(self, name)) for name, table in self.TABLES.items()]
        written = [
            table.write(folder, rows) for table, rows in found if not (table.optional and rows.empty)
        ]
        rows = {table.name: len(rows) for table, rows in found if len(rows)}
        write_json(folder / self.RECORD, {**self.record, ROWS: rows})
        return written

    def table(self) -> pd.DataFrame:
        """The main table, as in its CSV file; no rows where there is none."""
        return next((getattr(self, name) for name in self.TABLES), pd.DataFrame())

    def section(self) -> Iterable[Block]:
        return ()

    def summary(self) -> Iterable[Finding]:
        return ()

    def list_missing(self) -> Iterable[str]:
        return ()

    @classmethod
    def together(cls, runs: Sequence[Self]) -> Iterable[Block]:  # noqa: ARG003
        """Blocks about several runs of a model, at the end of the last one's section."""
        return ()

    @property
    def picture_title(self) -> str:
        return str(self.record.get("heading") or self.label)

    def pictures(self) -> dict[str, Picture]:
        """All pictures, by the name of their file without ending; the main one first."""
        # Reading results needs no matplotlib.
        from surgeon.findings.drawing import pictures_in

        return dict(pictures_in(self.section()))

    def plot(self, name: str = "") -> Figure:
        """Draw one of `pictures`, the first by default: a matplotlib figure, to be shown or saved as PNG, SVG or PDF.

        Raises:
            ValueError: if there is no such picture.
        """
        from surgeon.findings.drawing import sheet

        found = self.pictures()
        if not found:
            raise ValueError(f"there are no pictures of this {self.COMMAND}")
        name = name or next(iter(found))
        if name not in found:
            raise ValueError(
                f"there is no picture {name!r} of this {self.COMMAND}; {did_you_mean(name, found)}"
            )
        return sheet(found[name], self.picture_title)

    def draw(self, folder: Path) -> list[Path]:
        from surgeon.findings.drawing import save, sheet

        title = self.picture_title
        return [save(sheet(one, title), folder / f"{name}.png") for name, one in self.pictures().items()]

    def save(self, folder: Path) -> Self:
        """Write the tables, the record and every picture; returns a result that knows these files."""
        return replace(
            self, files=(*self.files, *self.write(folder), folder / self.RECORD, *self.draw(folder))
        )

    def __repr__(self) -> str:
        where = ""
        if self.files:
            where = f", in {self.files[0].parent}"
        return f"<{type(self).__name__} of {self.label}: {plural(len(self.table()), 'row')}{where}>"

    def _repr_html_(self) -> str:
        return self.table().to_html(max_rows=12, index=False)


def base_of(record: Record, file: Path, command: str) -> float:
    """The unedited model's perplexity; a ValueError names a record without one."""
    base = record.get("base_perplexity")
    if not isinstance(base, int | float) or not base > 0:
        raise ValueError(f"{file} has no base_perplexity above 0; run surgeon {command} again")
    return float(base)


@contextmanager
def name_file_in_errors(file: Path, command: str) -> Iterator[None]:
    """Name the file in errors about its contents."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        names = {str(file), str(file.parent)} - {"."}
        if isinstance(error, ValueError) and any(name in str(error) for name in names):
            raise
        raise ValueError(
            f"{file}, or a table beside it, holds what surgeon {command} does not write "
            f"({type(error).__name__}: {first_line(error)}); make it again"
        ) from error


_SHORTEST = 12  # characters that names are cut down to


@dataclass(frozen=True)
class Table:
    """A table of the page, of a terminal (`str`) and of Markdown; the first column heads its rows.

    Attributes:
        head: a unit behind a comma stands in a second line on a terminal.
        rows: cells as text; fewer than `head` has where the rest is empty.
        left: columns of words, which stand left as the first does.
        folded: shown only when asked for (and on paper if `printed`).
        marked: (row, column) of cells that stand out.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    left: Collection[int] = ()
    folded: bool = False
    printed: bool = True
    marked: Collection[tuple[int, int]] = ()

    def __str__(self) -> str:
        heads = [name.partition(", ")[::2] for name in self.head]
        lines = [[name for name, _ in heads]]
        if any(unit for _, unit in heads):
            lines.append([unit for _, unit in heads])
        lines += [list(row) for row in self.rows]
        left = {0, *self.left}
        for column in left:  # names give way
            widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
            room = max(_SHORTEST, widths[column] - max(0, sum(widths) + len(widths) - 1 - WIDTH))
            for line in lines:
                if len(line[column]) > room:
                    line[column] = f"{line[column][: room - 3]}..."
        text = align_columns(lines, left)
        notes = (hang_indent("", line) for line in self.note.splitlines())
        return "\n".join(filter(None, [self.caption, text, *notes]))

    @property
    def markdown(self) -> str:
        aligned_by = [
            ":--" if column == 0 or column in self.left else "--:" for column in range(len(self.head))
        ]
        lines = [self.head, aligned_by, *self.rows]
        return "\n".join(
            f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in line)} |"
            for line in lines
        )


@dataclass(frozen=True)
class Code:
    """A text as in a file, or a command."""

    caption: str
    text: str
    note: str = ""


def record_codes(record: Mapping[str, Any], **captions: str) -> Iterator[Code]:
    """Texts of a record, by name, that it has."""
    for name, caption in captions.items():
        if record.get(name):
            yield Code(caption, str(record[name]))


# Of a section: texts, which are paragraphs, those here, charts and drawings, maps, and pictures.
Block = object


@dataclass(frozen=True)
class Finding:
    """A sentence or two of the summary, about a lead; a figure with a label stands at the top."""

    lead: str
    text: str
    figure: str = ""
    label: str = ""
