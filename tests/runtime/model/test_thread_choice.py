"""Numbers of threads chosen by what passes take, on a clock that says what they take."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from surgeon.runtime.model.thread_choice import PASSES_PER_TRIAL, ThreadChoice


class Machine:
    """A clock, and how many threads are at work on it."""

    def __init__(self, most: int) -> None:
        self.time = 0.0
        self.threads = most
        self.choice = ThreadChoice(most, lambda: self.time, self.use)

    def use(self, threads: int) -> None:
        self.threads = threads

    def passes(self, count: int, seconds: Callable[[int], float], tokens: int = 8) -> list[int]:
        """How many threads each of so many passes had, given what they take on how many."""
        used = []
        for _ in range(count):
            with self.choice.during_pass(tokens):
                used.append(self.threads)
                self.time += seconds(self.threads)
        return used


@pytest.fixture(autouse=True)
def _dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_DYNAMIC", raising=False)


def alone(threads: int) -> float:
    """Two threads are nearly twice as fast as one."""
    return 0.018 if threads == 1 else 0.01


def beside_another(threads: int) -> float:
    """Two threads wait for each other."""
    return 0.02 if threads == 1 else 0.2


def test_trials_are_few_where_all_threads_pay() -> None:
    machine = Machine(2)
    used = machine.passes(4000, alone)
    assert used[:4] == [2, 2, 2, 2]
    assert 1 in used
    assert machine.time < 4000 * 0.01 * (1 + 1.5 / PASSES_PER_TRIAL)
    assert machine.threads == 2, "what else the process computes has all threads again"


def test_a_neighbour_comes_and_goes() -> None:
    machine = Machine(2)
    machine.passes(500, alone)
    beside = machine.passes(1000, beside_another)
    assert beside.index(1) <= 3
    assert beside[10:].count(2) <= 10
    after = machine.passes(4000, alone)
    assert after[-100:].count(2) >= 97


def test_one_unlucky_trial_decides_nothing_for_ever() -> None:
    machine = Machine(2)
    luck = iter([0.01] * 4 + [0.001] * 3)  # one thread seems to be ten times as fast, and is not
    machine.passes(7, lambda _: next(luck))
    assert machine.passes(300, alone)[-1] == 2


def test_sizes_are_told_apart() -> None:
    """One token is faster on one thread, many on two."""
    machine = Machine(2)
    for _ in range(200):
        one = machine.passes(1, lambda threads: 0.01 * threads, tokens=1)
        many = machine.passes(1, lambda threads: 1.0 / threads, tokens=512)
    assert (one, many) == ([1], [2])


def test_a_new_size_begins_as_the_one_before() -> None:
    """Which is put right at once where it was wrong."""
    machine = Machine(2)
    assert machine.passes(100, beside_another, tokens=8)[-1] == 1
    assert machine.passes(100, beside_another, tokens=512).count(2) <= 2
    assert machine.passes(9, alone, tokens=64) == [1] + [2] * 8


def test_one_core_fewer_of_many() -> None:
    machine = Machine(16)
    used = machine.passes(3000, lambda threads: 0.1 if threads == 16 else 0.16 / threads)
    assert used[-500:].count(15) > 480


def test_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_DYNAMIC", "false")
    assert set(Machine(2).passes(50, beside_another)) == {2}
    assert set(Machine(1).passes(50, alone)) == {1}


def test_an_error_leaves_the_threads_as_they_were() -> None:
    machine = Machine(2)
    machine.passes(100, beside_another)
    with pytest.raises(ZeroDivisionError):
        machine.passes(1, lambda threads: threads / 0)
    assert machine.threads == 2
