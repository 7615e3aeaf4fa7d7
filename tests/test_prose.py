"""How docstrings and names read: rules that a stranger's eye would hold them to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "surgeon"
# A docstring begins with a verb or with the field's noun.
POINTING = {
    *("what", "which", "whether", "how", "where", "when", "who", "whose", "if"),
    *("it", "its", "those", "that", "these", "they", "as", "of"),
}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented() -> Iterator[tuple[str, str]]:
    """Where each docstring stands, and its first line."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, Documented) else None
            if text:
                line = getattr(node, "lineno", 1)
                yield f"{path.relative_to(PACKAGE.parent)}:{line}", text.splitlines()[0]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    pointing = []
    for place, line in documented():
        words = line.lower().replace("`", "").split()
        if words[0].strip(".,:;") in POINTING or words[:2] == ["the", "same"]:
            pointing.append(f"{place} {line}")
    assert not pointing, "\n".join(pointing)
