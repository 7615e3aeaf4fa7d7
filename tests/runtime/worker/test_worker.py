"""Engines that a rank keeps: what Python's garbage collector has to do with them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from surgeon.runtime.worker.worker import follow, keep, unload


class Engine:
    """One that refers to itself, as modules and closures do."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def rank() -> Iterator[Any]:
    yield SimpleNamespace(engines={})
    gc.unfreeze()
    gc.freeze()  # as for all tests (tests/conftest.py)


def kept(rank: Any, name: str) -> weakref.ref[Engine]:
    engine: Any = Engine()
    keep(rank, name, engine)
    return weakref.ref(engine)


def test_passes_are_spared_walks_through_what_is_kept(rank: Any) -> None:
    engine = kept(rank, "one")
    assert engine() is rank.engines["one"]
    assert not any(each is engine() for each in gc.get_objects())


def test_an_engine_that_another_replaces_is_freed(rank: Any) -> None:
    first, second = kept(rank, "one"), kept(rank, "one")
    assert first() is None
    assert second() is rank.engines["one"]
    assert not any(each is second() for each in gc.get_objects())


def test_an_engine_that_is_unloaded_is_freed_and_others_stay(rank: Any) -> None:
    first, second = kept(rank, "first"), kept(rank, "second")
    unload(rank, "first")
    assert first() is None
    assert second() is rank.engines["second"]
    assert not any(each is second() for each in gc.get_objects())


def test_what_followers_do_with_rows() -> None:
    messages = iter([("step", [1]), ("record_ahead", [2]), ("draft", [3]), ("several", [4], 5), None])
    done: list[tuple[object, ...]] = []
    names = ("step", "record_ahead", "draft", "several")
    ways = {name: lambda *what, name=name: done.append((name, *what[:-1])) for name in names}
    engine: Any = SimpleNamespace(**ways, pause=lambda: None)
    rank: Any = SimpleNamespace(receive=lambda: next(messages))
    follow(rank, engine, Any)
    assert done == [("step", [1]), ("record_ahead", [2]), ("draft", [3]), ("several", [4], 5)]
