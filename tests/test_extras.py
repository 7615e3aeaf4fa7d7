"""What an installation without extras can do, and what the rest says: with the packages of all extras out of reach."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

import surgeon
from tests.waiting import PATIENCE

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
PACKAGES = [
    re.split(r"[^\w-]", requirement)[0].replace("-", "_")
    for extra, requirements in EXTRAS.items()
    if extra not in ("all", "dev")
    for requirement in requirements
]
OF_EXTRAS = ("heal", "serve", "train", "RackOptions")  # names of the library
BLOCKED = "import sys\nfor name in {packages}: sys.modules[name] = None\n"
RUN = """
import surgeon
from surgeon.commands.app import main
for name in {names}:
    getattr(surgeon, name)
for command in {commands}:
    print('==', main(command))
"""


def run(*commands: Sequence[object]) -> tuple[list[int], str]:
    """The exit codes of some commands in one process, and what they said."""
    names = [name for name in surgeon.__all__ if name not in OF_EXTRAS]
    code = BLOCKED.format(packages=PACKAGES) + RUN.format(
        names=names, commands=[[*map(str, one)] for one in commands]
    )
    process = [sys.executable, "-c", code]
    done = subprocess.run(process, capture_output=True, text=True, timeout=PATIENCE, check=False)
    said = done.stdout + done.stderr
    return [int(found) for found in re.findall(r"^== (\d+)$", said, re.MULTILINE)], said


def test_all_extras_are_in_all() -> None:
    assert {"peft", "lm_eval", "fastapi", "psycopg", "tensorboard"} <= set(PACKAGES)
    assert EXTRAS["all"] == [f"surgeon[{','.join(sorted(EXTRAS.keys() - {'all', 'dev'}))}]"]
    assert "surgeon[all]" in EXTRAS["dev"]


@pytest.mark.thorough
def test_a_scan_and_an_export_need_none_and_what_does_names_it(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    model = tiny_checkpoint
    task = tmp_path / "task.jsonl"
    task.write_text(json.dumps({"query": "a", "choices": ["b", "c"], "gold": 0}) + "\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"surgeon: 1\nmodel: {model}\noperations:\n  - pair: {{layers: '1:3'}}\n")
    text = ["--data", tiny_text, "--tokens", "64", "--window", "32"]
    codes, said = run(
        ["scan", model, *text, "-o", tmp_path / "scan"],
        ["search", model, *text, "--budget", "depth=3", "--trials", "2", "-o", tmp_path / "search"],
        ["export", recipe, "-o", tmp_path / "written"],
        ["eval", recipe, *text],
        ["check", model],
        ["report", tmp_path / "scan", "-o", tmp_path / "page.html"],
        ["eval", recipe, "--tasks", task],
        ["heal", recipe, *text, "--steps", "1", "-o", tmp_path / "healed"],
        ["serve", model],
    )
    assert codes == [0, 0, 0, 0, 0, 0, 1, 1, 1], said
    for extra, package in (("tasks", "lm_eval"), ("train", "peft"), ("serve", "fastapi")):
        line = rf"^error: \w[\w ]+ needs {package}, which is not installed; run: pip install 'surgeon\[{extra}\]'$"
        assert re.search(line, said, re.MULTILINE), said
