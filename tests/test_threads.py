"""Waiting threads sleep, unless the user wants something else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from surgeon.threads import LOOKS, POLICY, SPIN, wait_asleep

LATE = """
import sys
from importlib import import_module
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            import os
            print("found", os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
"""
STARTS = {
    "command": "from surgeon.cli.app import main; main(['show', 'demo'])",
    "rank": "import runpy; sys.argv[1:] = ['/nowhere', '0', '1']; runpy.run_module('surgeon.runtime')",
    "tests": "import tests.conftest, torch",
}


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, {"GOMP_SPINCOUNT": LOOKS}),
        ({"GOMP_SPINCOUNT": "100"}, {"GOMP_SPINCOUNT": "100"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_what_the_user_has_set_stays(
    given: dict[str, str], left: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    wait_asleep()
    assert os.environ == left


@pytest.mark.parametrize("start", STARTS)
def test_said_before_torch_is_imported(start: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in (SPIN, POLICY)}
    code = LATE + STARTS[start]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "found 100000\n", done.stderr
