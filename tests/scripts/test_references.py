"""Scripts and tests name only what exists: also scripts without .py, and code in strings, which no linter reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import surgeon

PROJECT = Path(__file__).resolve().parents[2]
DOTTED = re.compile(r"(?<![\w./'-])(?:surgeon|scripts)(?:\.[A-Za-z_]\w*)+")
IMPORT = re.compile(r"from ((?:surgeon|scripts|tests)\b[\w.]*) import (\([^)]*\)|[^\n;\"']+)")
REPLACED = re.compile(r"setattr\(\s*\"((?:surgeon|scripts|tests)\.[\w.]+)\"")


@cache
def names_in(module: str) -> set[str] | None:
    """What a module binds at its top, with the modules in its folder; None where there is no such module."""
    if module == "surgeon":
        found = set(surgeon.__all__)
    else:
        found = set()
    path = PROJECT.joinpath(*module.split("."))
    if path.is_dir():
        found |= {other.stem for other in path.iterdir() if other.suffix == ".py" or other.is_dir()}
        file = path / "__init__.py"
    else:
        file = path.with_suffix(".py")
        if not file.exists():
            return None
    if file.exists():
        found |= set(top_names(ast.parse(file.read_text())))
    return found


def top_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        else:
            yield from top_names(node)


def is_there(name: str) -> bool:
    """Whether each part of a dotted name is in the module before it, up to the first that is no module."""
    module, *parts = name.split(".")
    for part in parts:
        found = names_in(module)
        if found is None:  # an attribute of something
            return True
        if part not in found:
            return False
        module = f"{module}.{part}"
    return True


def named(text: str) -> Iterator[str]:
    """The dotted names of our modules in a text, with those that it imports."""
    yield from DOTTED.findall(text)
    for module, names in IMPORT.findall(text):
        for line in names.strip("()").splitlines():
            for name in line.partition("#")[0].split(","):
                if words := name.split():
                    yield f"{module}.{words[0]}"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("import surgeon.server.run", []),
        ("KEY = '''\nimport surgeon.server.app; print(1)\n'''", ["surgeon.server.app"]),
        ("from surgeon.language import program, programs", ["surgeon.language.programs"]),
        (
            "from surgeon.words import (\n    plural,  # or one\n    many as most,\n)",
            ["surgeon.words.many"],
        ),
        ("from surgeon.gone import x", ["surgeon.gone", "surgeon.gone.x"]),
        ("from scripts.gpu.sides import judge_error, no_side", ["scripts.gpu.sides.no_side"]),
        ("surgeon.load(folder).eval(); surgeon.loads(folder)", ["surgeon.loads"]),
        ("surgeon.opened.open_model.cache; x/surgeon.yaml; surgeon.training", []),
    ],
)
def test_a_missing_name_is_seen(text: str, wrong: list[str]) -> None:
    assert [name for name in named(text) if not is_there(name)] == wrong


def test_scripts_name_what_is_there() -> None:
    wrong = []
    for path in sorted(PROJECT.glob("scripts/**/*")):
        if path.is_file() and "__pycache__" not in path.parts:
            missing = {name for name in named(path.read_text()) if not is_there(name)}
            wrong += [f"{path.relative_to(PROJECT)}: {name}" for name in sorted(missing)]
    assert not wrong


def test_tests_import_and_replace_what_is_there() -> None:
    """Those that run seldom, too: names in imports, and in `monkeypatch.setattr("module.name", ...)`."""
    wrong = []
    for path in sorted(PROJECT.glob("tests/**/*.py")):
        text = path.read_text()
        names = REPLACED.findall(text)
        for found in re.finditer(rf"^ *{IMPORT.pattern}", text, re.MULTILINE):
            names += named(found[0])
        wrong += [f"{path.relative_to(PROJECT)}: {name}" for name in names if not is_there(name)]
    assert not wrong
