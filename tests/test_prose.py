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
# A participle names a state and hides who does it. These are adjectives of the field, or fixtures of a contract.
PARTICIPLES = {
    *(
        "known",
        "told",
        "given",
        "found",
        "taken",
        "kept",
        "made",
        "held",
        "drawn",
        "shown",
        "written",
        "said",
        "seen",
    ),
    *(
        "sent",
        "chosen",
        "begun",
        "lent",
        "lost",
        "meant",
        "thrown",
        "understood",
        "bound",
        "caught",
        "done",
        "gone",
    ),
}
ADJECTIVES = {
    *("biased", "debiased", "wrapped", "needed", "described", "limited", "wanted"),
    *("refused", "exported", "given", "mixed", "averaged", "narrowed"),
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


def test_functions_are_not_named_by_a_participle_alone() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if "remote_code" in path.parts:  # travels in checkpoints, and stays as it was written there
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name.strip("_")
                is_participle = name in PARTICIPLES or (
                    name.endswith("ed") and "_" not in name and name != "embed"
                )
                if is_participle and name not in ADJECTIVES:
                    found.append(f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}")
    assert not found, "\n".join(found)
