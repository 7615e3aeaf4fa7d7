"""The direction of imports, and that what should be light is light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = Path(__file__).resolve().parents[1] / "surgeon"

# A module may import from its own floor and from those above it in this list; a folder stands for all its modules. What
# several rooms use and knows nothing of models stands first. `demo` is only data (a model's folder and text) and the
# command of that name lies in `commands`.
FLOORS = [
    [
        "version",
        "errors",
        "progress",
        "machine",
        "named",
        "words",
        "demo",
    ],
    ["processes"],
    ["language"],
    ["models"],
    ["checkpoint"],
    ["opened"],
    ["quality", "findings"],
    ["exports"],
    ["analysis"],
    ["runtime"],
    ["cost"],
    ["training"],
    ["benchmarks"],
    ["searches"],
    ["server"],
    ["vllm_plugin"],
    ["testing"],
    ["commands"],
    ["cli"],
]
LEVELS = {name: level for level, floor in enumerate(FLOORS) for name in floor}
# The floors of the runtime; what lies beside its folders is the client's side, which knows all of them.
ROOMS = ["kernels", "batching", "plan", "comm", "model", "worker"]
WITHOUT_TORCH = ["batching", "plan"]
HEAVY = {
    "torch",
    "transformers",
    "pandas",
    "matplotlib",
    "optuna",
    "numpy",
    "datasets",
    "lm_eval",
    "yaml",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def modules() -> list[Path]:
    """Every module but the package's own __init__, which only forwards names, and files shipped with checkpoints."""
    found = [path for path in PACKAGE.rglob("*.py") if "remote_code" not in path.parts]
    return sorted(path for path in found if path != PACKAGE / "__init__.py")


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py") if "remote_code" not in path.parts}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports_in(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Constant]:
    """All imports of a file, at its top or inside functions, and strings that name modules; parsed once."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MODULES)
    ]


def imported_parts(path: Path) -> Iterator[tuple[str, int]]:
    """The parts of surgeon that a module imports, anywhere in it, with the line; by a string counts, too."""
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            assert node.module is not None
            names = (
                [f"surgeon.{alias.name}" for alias in node.names]
                if node.module == "surgeon"
                else [node.module]
            )
        else:
            names = [str(node.value)]
        for name in names:
            top, _, rest = name.partition(".")
            if top == "surgeon" and rest:
                yield rest.partition(".")[0], node.lineno


def test_every_part_has_its_place() -> None:
    assert {part_of(path) for path in modules()} <= set(LEVELS)


def test_imports_go_one_way() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports surgeon.{other}"
        for path in modules()
        for other, line in imported_parts(path)
        if other in LEVELS and LEVELS[other] > LEVELS[part_of(path)]
    ]
    assert not wrong


def test_no_room_imports_the_whole_package() -> None:
    """Which forwards names of the highest floors; its version has a file of its own."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in modules()
        for node in imports_in(path)
        if (isinstance(node, ast.Import) and any(alias.name == "surgeon" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "surgeon")
    ]
    assert not wrong


def test_the_program_knows_nothing() -> None:
    assert {part for part, _ in imported_parts(PACKAGE / "language" / "program.py")} <= {"language"}


def test_an_import_by_a_string_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "by_name.py"
    path.write_text('import_module("surgeon.exports.in_memory").save_edited(model)')
    assert list(imported_parts(path)) == [("exports", 1)]


def room_of(name: str) -> int:
    """On which floor of the runtime a module's name lies; the client's side is the highest."""
    room = name.removeprefix("surgeon.runtime.").partition(".")[0]
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def test_rooms_of_the_runtime_import_one_way() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in import_graph().items()
        if name.startswith("surgeon.runtime.")
        for other in others
        if other.startswith("surgeon.runtime.") and room_of(other) > room_of(name)
    ]
    assert not wrong


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_rooms_without_torch(room: str) -> None:
    for path in (PACKAGE / "runtime" / room).glob("*.py"):
        for node in imports_in(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert "torch" not in {name.partition(".")[0] for name in names}, f"{path}:{node}"


def import_graph() -> dict[str, set[str]]:
    """The modules of the package that each module imports, at its top, for its types, or inside a function."""
    # Which only forwards names.
    modules = {name: path for name, path in MODULES.items() if name != "surgeon"}
    return {name: imports_of(path, modules) - {name} for name, path in modules.items()}


def imports_of(path: Path, names: Mapping[str, Path]) -> set[str]:
    """Which of these modules a file imports anywhere in it."""
    found: set[str] = set()
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            one_by_one = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in names else str(node.module) for each in one_by_one}
    return found & names.keys()


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one node (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_nodes: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        open_nodes.append(node)
        for other in graph[node]:
            if other not in number:
                visit(other)
            if other in open_nodes:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == number[node]:
            first = open_nodes.index(node)
            component = set(open_nodes[first:])
            del open_nodes[first:]
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in number:
            visit(node)
    return found


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a", "e"}}
    assert sorted(map(sorted, circles(graph))) == [["a", "b", "c"], ["d", "e"]]


def test_imports_inside_functions_are_seen(tmp_path: Path) -> None:
    """Two modules of which one imports the other only as it is called make a circle."""
    files = {"one": "import two", "two": "def late():\n    from one import thing\n    return thing"}
    paths = {name: tmp_path / f"{name}.py" for name in files}
    for name, text in files.items():
        paths[name].write_text(text)
    graph = {name: imports_of(path, paths) for name, path in paths.items()}
    assert circles(graph) == [{"one", "two"}]


def test_there_are_no_circles() -> None:
    assert circles(import_graph()) == []


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in modules():
        for name in re.findall(r"^ *class ([A-Za-z]\w*)[\[(:]", path.read_text(), re.MULTILINE):
            places.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


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
        "from surgeon.commands.app import main; main(['--help'])",
        "from surgeon.commands.app import main; main(['scan', '--help'])",
        "from surgeon.commands.app import main; main(['--version'])",
        "import surgeon.runtime.batching.scheduler",
        "import surgeon.searches.quantities; surgeon.searches.quantities.aspect_of('depth', None, 'depth')",
        "import surgeon.runtime.plan.placement, surgeon.runtime.plan.specification",
    ],
)
def test_light_things_import_nothing_heavy(code: str) -> None:
    assert modules_imported_by(code) & HEAVY == set()


@pytest.mark.parametrize("listed", ["surgeon.language.operations", "surgeon.searches.spaces"])
def test_what_help_texts_list_is_light(listed: str) -> None:
    assert modules_imported_by(f"import {listed}") & {*HEAVY, "pydantic"} == set()


@pytest.mark.parametrize(
    ("code", "left_out"),
    [
        (
            "import surgeon.runtime.worker.rank, surgeon.runtime.worker.worker",
            ["transformers", "pandas", "scipy", "datasets"],
        ),
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


def requirements_of(package: str, extra: str = "") -> set[str]:
    """What is installed with a package, by the names that packages have in their metadata."""
    found: set[str] = set()
    waiting = [(package, extra)]
    while waiting:
        name, chosen = waiting.pop()
        for text in requires(name) or []:
            requirement = Requirement(text)
            needed = requirement.marker is None or requirement.marker.evaluate({"extra": chosen})
            if needed and (name := canonicalize_name(requirement.name)) not in found:
                found.add(name)
                waiting += [(name, each) for each in ("", *requirement.extras)]
    return found


def test_what_is_imported_is_installed_with_surgeon() -> None:
    """Not only with the tools of developers, as in the environment of these tests."""
    installed, homes = requirements_of("surgeon", "all"), packages_distributions()
    for path in modules():
        # For those who have pytest, vLLM, a PyTorch for GPUs, which brings triton, or its liger-kernel.
        if part_of(path) in ("testing", "vllm_plugin") or "triton" in path.parts:
            continue
        for node in imports_in(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in (
                {name.partition(".")[0] for name in names}
                - sys.stdlib_module_names
                - {"surgeon", "liger_kernel"}
            ):
                assert {canonicalize_name(home) for home in homes[top]} & installed, (
                    f"{path} imports {top}"
                )
