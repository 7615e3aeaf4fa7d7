"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median


def format_row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def format_table(
    columns: Sequence[str], rows: Iterable[Iterable[object]], left: Sequence[int] = (0,)
) -> list[str]:
    """The lines of a table; columns align to the right but for those at the places in `left`."""
    rules = [":--" if place in left else "--:" for place in range(len(columns))]
    return [format_row(columns), f"|{'|'.join(rules)}|", *map(format_row, rows)]


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Iterable[object]], left: Sequence[int] = (0,)
) -> None:
    print("\n".join([title, "", *format_table(columns, rows, left)]))


def spread(numbers: Sequence[float], digits: int) -> str:
    """Median, lowest and highest."""
    if not numbers:
        return ""
    ends = (median(numbers), min(numbers), max(numbers))
    return "{} ({} to {})".format(*(f"{number:.{digits}f}" for number in ends))
