"""Blocks of a section of the page, independent of their looks; `drawing` and `maps` have those that are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgeon.words import WIDTH, aligned, hanging

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
    left: frozenset[int] = frozenset()
    folded: bool = False
    printed: bool = True
    marked: frozenset[tuple[int, int]] = frozenset()

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
        text = aligned(lines, left)
        notes = (hanging("", line) for line in self.note.splitlines())
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
