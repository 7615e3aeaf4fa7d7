"""Tokens on the disk: made once, as far as they are needed, and whole whatever happens."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surgeon.quality.data import digest_of
from surgeon.quality.tokens import Tokens
from surgeon.training import token_store
from surgeon.training.packing import Documents
from surgeon.training.token_store import TokenStore


class Numbers:
    """Documents of the numbers 0, 1, ...; it counts what it was asked for, and may end, or fail."""

    source = "numbers"

    def __init__(self, end: int = 100, fails_at: int | None = None, name: str = "numbers") -> None:
        self.end, self.fails_at, self.name, self.at = end, fails_at, name, 0
        self.given = 0

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}

    def read(self) -> Iterator[list[Tokens]]:
        for number in range(self.at, self.end):
            if number == self.fails_at:
                raise OSError("the stream ended in an error; try again")
            self.at, self.given = number + 1, self.given + 1
            yield [Tokens(np.arange(5 * number, 5 * number + 5, dtype=np.int32))]

    def state(self) -> dict[str, Any]:
        return {"at": self.at}

    def resume(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def known(self) -> dict[str, Any]:
        return {"column": None, "left_out": {}, "notes": [f"{self.at} read"]}


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "_FILE_TOKENS", 64)


def ids_of(store: TokenStore, count: int) -> torch.Tensor:
    found: torch.Tensor = store.rows(range(count)).with_format("torch")[:]["input_ids"]
    return found


WINDOWS = torch.arange(496).view(62, 8)


def test_it_is_made_once_as_far_as_it_is_needed(tmp_path: Path) -> None:
    first = Numbers()
    store = TokenStore(first, 8, cache=tmp_path)
    assert store.fill(10) == 10
    assert first.given == 16
    assert torch.equal(ids_of(store, 10), WINDOWS[:10])
    again = Numbers()
    store = TokenStore(again, 8, cache=tmp_path)
    assert (store.fill(10), again.given) == (10, 0)
    assert (store.fill(20), again.given) == (20, 16)
    assert torch.equal(ids_of(store, 20), WINDOWS[:20])
    assert store.known["notes"] == ["32 read"]
    assert store.fill(1 << 40) == 62
    assert torch.equal(ids_of(store, 62), WINDOWS)
    end = Numbers()
    assert (TokenStore(end, 8, cache=tmp_path).fill(1 << 40), end.given) == (62, 0)
    other = Numbers(name="others")
    assert (TokenStore(other, 8, cache=tmp_path).fill(1), TokenStore(Numbers(), 4, cache=tmp_path).fill(1)) == (1, 1)
    assert len(list(tmp_path.iterdir())) == 3


def test_stores_of_whole_documents_that_were_marked_otherwise_are_not_taken(tmp_path: Path) -> None:
    for documents, same in (("joined", True), ("apart", True), ("whole", False)):
        follows = {"format": 1, "window": 8, "documents": documents, "pad": 0, **Numbers().identity()}
        earlier = hashlib.sha256(json.dumps(follows, sort_keys=True).encode()).hexdigest()[:32]
        assert (TokenStore(Numbers(), 8, documents, cache=tmp_path).folder.name == earlier) == same


def test_digests_and_what_is_shared(tmp_path: Path) -> None:
    store = TokenStore(Numbers(), 8, cache=tmp_path)
    store.fill(30)
    assert store.digest(30) == digest_of(WINDOWS[:30])
    assert store.digest(13) == digest_of(WINDOWS[:13])
    assert store.shared(30, WINDOWS[28:32], "a") == 2
    assert store.shared(28, WINDOWS[28:32], "a") == 0


@pytest.mark.parametrize("documents", ["joined", "apart", "whole"])
def test_what_breaks_goes_on(tmp_path: Path, documents: Documents) -> None:
    whole = TokenStore(Numbers(), 8, documents, cache=tmp_path / "whole")
    count = whole.fill(1 << 40)
    broken = TokenStore(Numbers(fails_at=40), 8, documents, cache=tmp_path / "broken")
    with pytest.raises(OSError, match="ended in an error; try again"):
        broken.fill(1 << 40)
    rest = Numbers()
    store = TokenStore(rest, 8, documents, cache=tmp_path / "broken")
    assert store.fill(1 << 40) == count
    assert rest.given == 60
    wanted, found = whole.rows(range(count)), store.rows(range(count))
    assert wanted.to_dict() == found.to_dict()
    assert whole.digest(count) == store.digest(count)


def dies_at_second(name: str, finishes: bool) -> None:
    """Have a process killed when it writes something for the second time, with half of it written, or all."""
    write, count = getattr(token_store, name), 0

    def dying(path: Path, *rest: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            (path.parent / f".{path.name}.0.part").write_bytes(b"half")
            if finishes:
                write(path, *rest)
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, *rest)

    setattr(token_store, name, dying)


@pytest.mark.parametrize(("name", "finishes"), [("write_rows", False), ("write_rows", True), ("write_json", False)])
def test_killed_it_goes_on(tmp_path: Path, name: str, finishes: bool) -> None:
    pid = os.fork()
    if pid == 0:
        dies_at_second(name, finishes)
        TokenStore(Numbers(), 8, cache=tmp_path).fill(1 << 40)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    store = TokenStore(Numbers(), 8, cache=tmp_path)
    assert store.fill(1 << 40) == 62
    assert torch.equal(ids_of(store, 62), WINDOWS)
    assert not list(store.folder.glob(".*.part"))
