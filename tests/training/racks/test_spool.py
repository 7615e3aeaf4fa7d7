"""Items on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from surgeon.training.racks import spool as spool_module
from surgeon.training.racks.items import BEGINNING, Item, ItemKey, ItemKind
from surgeon.training.racks.spool import Spool


def key(step: int, place: int = 0) -> ItemKey:
    return ItemKey(step, ItemKind.TRAINING, place)


def item(step: int, place: int = 0) -> Item:
    return Item.of(key(step, place), torch.full((2, 3), 10.0 * step + place))


def filled(folder: Path, steps: int = 3) -> Spool:
    spool = Spool(folder)
    for step in range(1, steps + 1):
        for place in range(2):
            spool.add(item(step, place))
    return spool


def test_what_is_kept_is_found_again_by_another_process(tmp_path: Path) -> None:
    filled(tmp_path)
    spool = Spool(tmp_path)
    assert spool.keys == [key(step, place) for step in (1, 2, 3) for place in (0, 1)]
    for each in (key(1), key(2, 1), key(3, 1)):
        assert spool.get(each) == item(each.step, each.place)
    with pytest.raises(KeyError):
        spool.get(key(4))


def test_what_is_kept_already_stays(tmp_path: Path) -> None:
    spool = filled(tmp_path)
    spool.add(Item.of(key(2, 1), torch.zeros(5)))
    assert spool.get(key(2, 1)) == item(2, 1)


def test_steps_are_dropped_as_a_whole(tmp_path: Path) -> None:
    spool = filled(tmp_path)
    spool.drop(2)
    assert spool.keys == [key(3), key(3, 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003.items"]
    spool.drop(3)
    spool.add(item(3))  # made again by a rack that has gone back
    assert spool.get(key(3)) == item(3)


def test_how_many_lie_between(tmp_path: Path) -> None:
    spool = filled(tmp_path)
    assert spool.between(BEGINNING, key(2)) == 2
    assert spool.between(key(1), key(3)) == 3
    assert spool.between(key(1, 5), key(3)) == 2
    assert spool.between(key(3), key(1)) == 0


@pytest.mark.parametrize("cut", [1, 30, 50])
def test_half_an_item_is_dropped(cut: int, tmp_path: Path) -> None:
    filled(tmp_path)
    path = tmp_path / "step-000000002.items"
    os.truncate(path, path.stat().st_size - cut)
    spool = Spool(tmp_path)
    assert spool.keys == [key(1), key(1, 1), key(2), key(3), key(3, 1)]
    spool.add(item(2, 1))
    assert [Spool(tmp_path).get(key(2, place)) for place in (0, 1)] == [item(2, 0), item(2, 1)]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = filled(tmp_path)

    def write(self: Item, file: Any) -> None:
        file.write(self.data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Item, "write", write)
    with pytest.raises(OSError, match=r"filled up with window 2 of step 3: make room, and run the same command"):
        spool.add(item(3, 2))
    monkeypatch.undo()
    spool.add(item(3, 2))
    assert [Spool(tmp_path).get(key(3, place)) for place in range(3)] == [item(3, place) for place in range(3)]


def test_all_is_synchronised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(spool_module, "sync", lambda path: synced.append(path.name))
    spool = filled(tmp_path, steps=2)
    spool.sync()
    assert synced == ["step-000000001.items", "step-000000002.items", tmp_path.name]
    spool.sync()
    assert len(synced) == 3
