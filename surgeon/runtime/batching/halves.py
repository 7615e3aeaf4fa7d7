"""The rows of a pass in two halves that can take turns (model/halves.py)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from surgeon.runtime.batching.sequence import Row

LEAST = 2  # tokens of a text that is cut, on either side

Halves = tuple[list[Row], list[Row]]


def halves_of(rows: Sequence[Row]) -> Halves | None:
    """The rows in two halves, whose tokens are in the same order; None if that cannot be.

    The row in the middle is cut if it is long enough, and otherwise in the half that is nearer.
    """
    ends = list(accumulate(len(row.tokens) for row in rows))
    middle = ends[-1] // 2
    number = next(number for number, end in enumerate(ends) if end > middle)
    row, before = rows[number], [*rows[:number]]
    count = middle - (ends[number] - len(row.tokens))  # of its tokens that come before the middle
    if LEAST <= count <= len(row.tokens) - LEAST:
        first = row._replace(tokens=row.tokens[:count])
        second = row._replace(tokens=row.tokens[count:], start=row.start + count)
        return [*before, first], [second, *rows[number + 1 :]]
    if before and (2 * count <= len(row.tokens) or number + 1 == len(rows)):
        return before, [*rows[number:]]
    return ([*before, row], [*rows[number + 1 :]]) if number + 1 < len(rows) else None
