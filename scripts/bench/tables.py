"""Tables as benchmarks print them, read back, and what has become worse between two of the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
EDGES = re.compile(r"\s*[|│┃]\s*")
RULE = re.compile(r"[-:|\s─━┄═╞╡╪├┤┼┡┩╇┌┐└┘┬┴┏┓┗┛┳┻╭╮╰╯]+")
ESCAPED = "\\|"
# Headings with these words say that more is better, or less; on any machine, or on the same one only.
MORE_ANYWHERE = {"times", "x", "speed", "faster", "accepted"}
MORE_HERE = {"tokens/s", "gb/s"}
LESS_ANYWHERE = {"divergence", "perplexity", "loss"}
LESS_HERE = {"s", "seconds", "ms", "resident", "token"}


class Cell(NamedTuple):
    """Where a number stands: the table's place on the page, its row's label, the heading, the place in the cell."""

    table: int
    row: str
    column: str
    place: int


@dataclass(frozen=True)
class Worse:
    """A figure that is worse than it was, so many times."""

    cell: Cell
    before: float
    now: float
    times: float

    def line(self) -> str:
        """For a reader."""
        return f"{self.cell.row}, {self.cell.column}: {self.before:g}, now {self.now:g} ({self.times:.2f} times worse)"


def numbers_of(page: str) -> dict[Cell, float]:
    """All numbers in a page's tables, in markdown or drawn with lines; a row's label is what stands before them."""
    found: dict[Cell, float] = {}
    for at, table in enumerate(_tables(page)):
        head, *rows = table
        for row in rows:
            # A label is the first cell, and those after it that do not begin with a number.
            rest = next((k for k, cell in enumerate(row) if k and NUMBER.match(cell)), len(row))
            label = row[: max(1, rest)]
            for column, text in zip(head[len(label) :], row[len(label) :], strict=False):
                for place, number in enumerate(NUMBER.findall(text)):
                    cell = Cell(at, " ".join(label), column, place)
                    found.setdefault(cell, float(number.replace(",", "")))
    return found


def _tables(page: str) -> Iterator[list[list[str]]]:
    """The rows of every table, its head first."""
    table: list[list[str]] = []
    for line in [*page.splitlines(), ""]:
        if row := _row(line):
            table.append(row)
        elif table and not (line.strip() and RULE.fullmatch(line)):
            if len(table) > 1:
                yield table
            table = []


def _row(line: str) -> list[str]:
    """The cells of a line of a table; none if it is no such line, or a rule between rows."""
    text = line.strip()
    if not text or text[0] not in "|│┃" or RULE.fullmatch(text):
        return []
    return [cell.replace("\0", "|").strip() for cell in EDGES.split(text.replace(ESCAPED, "\0"))[1:-1]]


def direction(heading: str, anywhere: bool) -> int:
    """1 if more of a heading's numbers is better, -1 if less is, 0 if neither is known or it depends on the machine.

    Args:
        anywhere: only of what can be compared between machines.
    """
    words = set(re.findall(r"[a-z/']+", heading.lower()))  # the s of "oneDNN's" is no unit
    if words & (MORE_ANYWHERE if anywhere else MORE_ANYWHERE | MORE_HERE):
        return 1
    if words & (LESS_ANYWHERE if anywhere else LESS_ANYWHERE | LESS_HERE):
        return -1
    return 0


def worse(before: str, now: str, tolerance: float, anywhere: bool) -> list[Worse]:
    """The figures that two pages of the same tables share, and that have become worse by more than a share.

    Args:
        anywhere: whether the pages are of different machines, on which only ratios can be compared.
    """
    found = []
    numbers = numbers_of(now)
    for cell, old in numbers_of(before).items():
        new = numbers.get(cell, 0.0)
        way = direction(cell.column, anywhere)
        if way and old > 0 and new > 0:
            times = (old / new) ** way
            if times > 1 + tolerance:
                found.append(Worse(cell, old, new, times))
    return sorted(found, key=lambda one: -one.times)
