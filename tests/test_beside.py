"""Work in threads beside other work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import pytest

from surgeon.beside import Background, Beside, in_order, one_at_a_time


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
