"""Scripts import each other one way: one that is a command would else be loaded twice, once under its own name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_imports import circles

PROJECT = Path(__file__).resolve().parents[2]


def imported(path: Path) -> Iterator[str]:
    """The modules that a script imports, also inside functions and for types only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_script_imports_itself_by_way_of_others() -> None:
    names = {
        ".".join(path.relative_to(PROJECT).with_suffix("").parts): path
        for path in PROJECT.glob("scripts/**/*.py")
    }
    assert "scripts.bench.racks" in names
    assert (
        circles({name: set(imported(path)) & names.keys() - {name} for name, path in names.items()})
        == []
    )
