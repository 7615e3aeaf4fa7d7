"""What is read back out of printed tables, and which figures count as worse."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from scripts.bench.tables import Cell, direction, numbers_of, worse

PAGE = """\
### 2 ranks

| program | way | tokens/s | first token, ms | note |
|:--|:--|--:|--:|---|
| dense | shm | 1,234.5 | 20 | as it is |
| attention \\|\\| MLP | shm | 48, 200 | 12.5 (11 to 14) | |

Words with 3 numbers | and a line.

| maps | times faster |
|---|---|
| merge | 2.5 |
"""


def test_markdown_is_read() -> None:
    assert numbers_of(PAGE) == {
        Cell(0, "dense shm", "tokens/s", 0): 1234.5,
        Cell(0, "dense shm", "first token, ms", 0): 20,
        Cell(0, "attention || MLP shm", "tokens/s", 0): 48,
        Cell(0, "attention || MLP shm", "tokens/s", 1): 200,
        Cell(0, "attention || MLP shm", "first token, ms", 0): 12.5,
        Cell(0, "attention || MLP shm", "first token, ms", 1): 11,
        Cell(0, "attention || MLP shm", "first token, ms", 2): 14,
        Cell(1, "merge", "times faster", 0): 2.5,
    }


def test_drawn_tables_are_read() -> None:
    table = Table(title="a copy, 8 GB", show_lines=True)
    for heading in ("form", "GB/s", "peak resident"):
        table.add_column(heading)
    table.add_row("plain", "0.32", "430 MB")
    table.add_row("fused", "0.18", "970 MB")
    text = io.StringIO()
    Console(file=text, width=80).print(table)
    assert numbers_of(text.getvalue()) == {
        Cell(0, "plain", "GB/s", 0): 0.32,
        Cell(0, "plain", "peak resident", 0): 430,
        Cell(0, "fused", "GB/s", 0): 0.18,
        Cell(0, "fused", "peak resident", 0): 970,
    }


@pytest.mark.parametrize(
    ("heading", "here", "anywhere"),
    [
        ("tokens/s", 1, 0),
        ("batch 8: tokens/s", 1, 0),
        ("first token, ms", -1, 0),
        ("times faster", 1, 1),
        ("of a copy's speed", 1, 1),
        ("x dense", 1, 1),
        ("seconds", -1, 0),
        ("divergence", -1, -1),
        ("cells", 0, 0),
        ("bound", 0, 0),
        ("oneDNN's", 0, 0),
    ],
)
def test_what_headings_say(heading: str, here: int, anywhere: int) -> None:
    assert (direction(heading, anywhere=False), direction(heading, anywhere=True)) == (here, anywhere)


def test_what_is_worse() -> None:
    now = PAGE.replace("1,234.5", "1,000").replace("| 20 |", "| 30 |").replace("48, 200", "50, 190")
    now = now.replace("| 2.5 |", "| 2.0 |")
    assert [one.line() for one in worse(PAGE, now, 0.15, anywhere=False)] == [
        "dense shm, first token, ms: 20, now 30 (1.50 times worse)",
        "merge, times faster: 2.5, now 2 (1.25 times worse)",
        "dense shm, tokens/s: 1234.5, now 1000 (1.23 times worse)",
    ]
    assert [one.cell.row for one in worse(PAGE, now, 0.15, anywhere=True)] == ["merge"]
    assert not worse(now, PAGE, 0.15, anywhere=False)
    assert not worse(PAGE, now, 0.6, anywhere=False)
