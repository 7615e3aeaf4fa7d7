"""scripts/cost/racks.py: its tables and its picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.cost import racks


def test_the_articles_case_is_in_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "racks.md"
    monkeypatch.setattr(sys, "argv", ["racks.py", "-o", str(page)])
    racks.main()
    text = page.read_text()
    assert "| 4 | 27% | 1.38x |" in text
    assert "| 13B | 10.2 kB each way | 18 million | 20 |" in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_codas_cost_what_the_bubble_gives() -> None:
    free, longer = (racks.speed_table(8, coda)[3].split(" | ")[3] for coda in (0, 4))
    assert float(free.rstrip("x")) > float(longer.rstrip("x"))
