"""What a section of the page is made of: paragraphs, tables, charts, maps and texts, independent of how they look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from matplotlib.figure import Figure

from surgeon.findings.drawing import Chart


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    kind: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True)
class Table:
    """A table; the first column heads its rows.

    Attributes:
        rows: cells as text; as many as `head` has, or fewer where the rest is empty.
        left: columns that hold words and stand left, beside the first.
        folded: shown only when asked for (and on paper if `printed`).
        marked: (row, column) of cells that stand out.
    """

    kind: ClassVar[str] = "table"
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    left: frozenset[int] = frozenset()
    folded: bool = False
    printed: bool = True
    marked: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Legend:
    """The colours of maps, and what they say."""

    figure: Figure
    title: str


@dataclass(frozen=True)
class Map:
    """A heatmap whose cells can be read one by one.

    Attributes:
        cells: what the script needs to show a cell's values, as JSON values.
        table: the same numbers, for readers without a pointer.
        described: read out for those who do not see it; the title where there is nothing more to say.
    """

    kind: ClassVar[str] = "map"
    figure: Figure
    title: str
    caption: str
    cells: dict[str, Any]
    table: Table | None = None
    legend: Legend | None = None
    described: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Gallery:
    """Charts or maps side by side, under one legend.

    Attributes:
        many: of cells; the drawings get more room each.
        wide: they are flat maps, wider than high.
    """

    kind: ClassVar[str] = "gallery"
    items: Sequence[Chart | Map]
    caption: str = ""
    legend: Legend | None = None
    many: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Code:
    """A text as it stands in a file, or a command."""

    kind: ClassVar[str] = "code"
    caption: str
    text: str
    note: str = ""


Block = Paragraph | Heading | Table | Chart | Map | Gallery | Code


@dataclass(frozen=True)
class Finding:
    """Something the data say, for the summary.

    Attributes:
        lead: a few words that say what it is about.
        text: one or two sentences in plain language.
        figure: the number to remember, if it is one of those at the top, with what it is.
        label: what the number is.
        table: the numbers behind it.
    """

    lead: str
    text: str
    figure: str = ""
    label: str = ""
    table: Table | None = None
