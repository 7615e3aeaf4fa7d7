"""Waiting threads sleep and ranks have huge pages, unless the user wants something else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import pytest

from surgeon import machine
from surgeon.machine import (
    CUDNN_LAST,
    HUGE_PAGES,
    LOOKS,
    POLICY,
    SPIN,
    Background,
    Beside,
    in_order,
    keep_to_share,
    one_at_a_time,
    wait_asleep,
)

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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
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
    monkeypatch.setattr(machine, "TOPOLOGY", tmp_path)
    bound: list[set[int] | None] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores), raising=False)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, chosen: bound.append(set(chosen)), raising=False
    )
    for number in range(count):
        before = len(bound)
        keep_to_share(number, count)
        bound += [None] * (before + 1 - len(bound))
    assert bound == shares


def test_cores_of_which_the_system_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 0, 1, 2}, raising=False)

    def forbidden(_: int, chosen: list[int]) -> None:
        assert list(chosen) == [2, 3]
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbidden, raising=False)
    keep_to_share(1, 2)


def test_work_in_the_background_hands_over_its_result_and_its_error() -> None:
    assert Background(lambda: 5).result() == 5
    with pytest.raises(ZeroDivisionError):
        Background(lambda: 1 // 0).result()


def test_work_beside_something_that_fails_ends_with_it() -> None:
    begun, ended = Event(), Event()

    def endless(go_on: Callable[[], None]) -> None:
        begun.set()
        try:
            while True:
                go_on()
                time.sleep(0.001)
        finally:
            ended.set()

    def fails() -> None:
        with Beside(endless):
            begun.wait()
            raise KeyError("something")

    with pytest.raises(KeyError):
        fails()
    assert ended.is_set()


def test_results_come_in_order_and_few_are_under_way() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            yield item

    def slow(item: int) -> int:
        time.sleep(0.002 * (item % 3))
        return item * item

    with ThreadPoolExecutor(3) as pool:
        for number, found in enumerate(in_order(pool, slow, items(), 4)):
            assert found == number * number
            assert len(taken) <= number + 4
    assert len(taken) == 20


def test_what_fails_in_a_pool_is_raised_in_its_turn() -> None:
    with ThreadPoolExecutor(2) as pool:
        results = in_order(pool, lambda divisor: 6 // divisor, [1, 2, 0, 3], 4)
        assert [next(results), next(results)] == [6, 3]
        with pytest.raises(ZeroDivisionError):
            next(results)


def test_amounts_told_by_several_threads_add_up() -> None:
    total = 0.0

    def slow_sum(amount: float) -> None:
        nonlocal total
        before = total
        time.sleep(0.0001)
        total = before + amount

    told = one_at_a_time(slow_sum)
    threads = [Thread(target=lambda: [told(1) for _ in range(20)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total == 60


def test_a_thread_that_is_ended_leaves_nobody_waiting() -> None:
    with pytest.raises(SystemExit, match="3"):
        Background(lambda: sys.exit(3)).result()
