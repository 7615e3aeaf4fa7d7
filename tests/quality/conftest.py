"""Tables of every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.quality.written import Row, write_jsonl, write_parquet


@pytest.fixture(params=["rows.jsonl", "rows.json", "rows.JSONL.GZ", "rows.parquet", "rows.Parquet"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[list[Row]], Path]:
    """Write rows as a table of each format."""

    def write(rows: list[Row]) -> Path:
        path = tmp_path / request.param
        return (
            write_parquet(path, rows) if path.suffix.lower() == ".parquet" else write_jsonl(path, rows)
        )

    return write
