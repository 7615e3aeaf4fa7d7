"""The direction of imports, and that what should be light is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "surgeon"

# A module may import from its own group and from those above it; a folder stands for all its modules. `demo` is only
# data (a model's folder and text) and the command of that name lies in `cli`.
GROUPS = [
    ["program", "errors", "progress", "memory", "provenance", "journal", "safe_yaml", "threads", "demo"],
    ["families"],
    ["execute", "weights", "model", "operations", "recipe"],
    ["analysis", "quality", "heal", "checkpoint", "runtime", "cost"],
    ["search", "vllm_plugin"],
    ["report", "server", "cli"],
]
LEVELS = {name: level for level, group in enumerate(GROUPS) for name in group}
HEAVY = {"torch", "transformers", "pandas", "matplotlib", "optuna", "numpy", "datasets", "lm_eval", "yaml"}


def modules() -> list[Path]:
    """Every module but the package's own __init__, which only forwards names, and files shipped with checkpoints."""
    found = [path for path in PACKAGE.rglob("*.py") if "remote_code" not in path.parts]
    return sorted(path for path in found if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> Iterator[tuple[str, int]]:
    """The parts of surgeon that a module imports, anywhere in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            assert node.module is not None
            names = [f"surgeon.{alias.name}" for alias in node.names] if node.module == "surgeon" else [node.module]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "surgeon" and rest:
                yield rest.partition(".")[0], node.lineno


def test_every_part_has_its_place() -> None:
    assert {part_of(path) for path in modules()} <= set(LEVELS)


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    wrong = [
        f"{path.name}:{line} imports surgeon.{other}"
        for other, line in imported_parts(path)
        if other in LEVELS and LEVELS[other] > LEVELS[part]
    ]
    assert not wrong


def test_the_program_knows_nothing() -> None:
    assert set(imported_parts(PACKAGE / "program.py")) == set()


def modules_imported_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after running some code."""
    script = f"import sys\n{code}\nprint('MODULES', *{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "code",
    [
        "import surgeon",
        "import surgeon; surgeon.Program.dense(2)",
        "from surgeon.cli.app import main; main(['--help'])",
        "from surgeon.cli.app import main; main(['scan', '--help'])",
        "from surgeon.cli.app import main; main(['--version'])",
    ],
)
def test_light_things_import_nothing_heavy(code: str) -> None:
    assert modules_imported_by(code) & HEAVY == set()


@pytest.mark.parametrize(
    ("code", "left_out"),
    [
        ("import surgeon.runtime.rank, surgeon.runtime.worker", ["transformers", "pandas", "scipy", "datasets"]),
        (
            "from surgeon.runtime.service import make_plan; make_plan('demo', 2, 64)",
            ["transformers.modeling_utils", "transformers.models.llama.modeling_llama"],
        ),
    ],
    ids=["ranks", "services"],
)
def test_what_runs_ranks_imports_no_models(code: str, left_out: list[str]) -> None:
    script = f"import sys\n{code}\nprint([name for name in {left_out} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


def test_every_public_name_is_there() -> None:
    import surgeon

    for name in surgeon.__all__:
        assert getattr(surgeon, name) is not None
    assert set(surgeon.__all__) <= set(dir(surgeon))
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = surgeon.laod
