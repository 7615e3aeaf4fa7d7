"""Waiting threads sleep and ranks have huge pages, unless the user wants something else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from surgeon import threads
from surgeon.gpus import CUDNN_LAST
from surgeon.memory import HUGE_PAGES
from surgeon.threads import LOOKS, POLICY, SPIN, keep_to_share, wait_asleep

LATE = """
import sys
from importlib import import_module
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            import os
            names = "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE", "TORCH_CUDNN_SDPA_DEPRIORITIZED"
            print(*map(os.environ.get, names), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
"""
STARTS = {
    "command": "from surgeon.commands.app import main; main(['show', 'demo'])",
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
    ours = (SPIN, POLICY, HUGE_PAGES, CUDNN_LAST)
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    code = LATE + STARTS[start]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    huge_pages = "1" if start == "rank" else None
    cudnn = None if start == "tests" else "1"
    assert done.stdout == f"100000 {huge_pages} {cudnn}\n", done.stderr


@pytest.mark.parametrize(
    ("cores", "count", "shares"),
    [
        (range(8), 2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),  # a processor each, of which a core is two
        (range(8), 4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (range(8), 3, [{0, 4}, {1, 5, 2}, {6, 3, 7}]),
        ((1, 5, 7), 2, [{1}, {5, 7}]),
        ((2,), 2, [None, None]),  # fewer cores than processes
    ],
)
def test_shares_of_the_cores(
    cores: range | tuple[int, ...],
    count: int,
    shares: list[set[int] | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cores of one processor together, and those that are one physical core."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 4 // 2}\n")
        (folder / "core_id").write_text(f"{core % 4}\n")
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path)
    bound: list[set[int] | None] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: bound.append(set(chosen)), raising=False)
    for number in range(count):
        before = len(bound)
        keep_to_share(number, count)
        bound += [None] * (before + 1 - len(bound))
    assert bound == shares


def test_cores_of_which_the_system_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 0, 1, 2}, raising=False)

    def forbidden(_: int, chosen: list[int]) -> None:
        assert list(chosen) == [2, 3]
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbidden, raising=False)
    keep_to_share(1, 2)
