"""What racks send each other, in threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from surgeon.runtime.comm.collectives import Link
from surgeon.training.racks.streams import ItemKey, ItemKind, RackExchange, RackLog


def together(racks: int, work: Callable[[int], Any]) -> list[Any]:
    """What each rack does in a thread of its own."""
    with ThreadPoolExecutor(racks) as pool:
        return [*pool.map(work, range(racks))]


@contextmanager
def connected(
    folder: Path, racks: int, ahead: int = 4, link: Link | None = None
) -> Iterator[list[RackExchange]]:
    """The racks' exchanges, which have to end together."""
    store = HashStore()
    folders = [folder / str(rack) for rack in range(racks)]
    for each in folders:
        each.mkdir(parents=True)
    found = together(
        racks, lambda rack: RackExchange(store, rack, racks, ahead, 64, link, RackLog(folders[rack]))
    )
    yield found
    together(racks, lambda rack: found[rack].finish())


def key(step: int, place: int = 0, kind: ItemKind = ItemKind.TRAINING) -> ItemKey:
    return ItemKey(step, kind, place)


def stream(step: int, place: int = 0) -> Tensor:
    return torch.full((3, 2), 10.0 * step + place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_go_from_each_rack_to_the_next(dtype: torch.dtype, tmp_path: Path) -> None:
    """They are as they were when they were offered, whatever becomes of the tensor."""
    with connected(tmp_path, 3) as racks:
        for step in (1, 2):
            sent = stream(step).to(dtype)
            racks[0].offer((key(step), sent), (key(step, 1), sent.T))
            sent.zero_()
            for before, after in ((0, 1), (1, 2)):
                first, second = (racks[after].ask(key(step, place)) for place in (0, 1))
                assert torch.equal(first, stream(step).to(dtype))
                assert second.shape == (2, 3)
                assert second.dtype == dtype
                if before == 0:
                    racks[1].offer((key(step), first), (key(step, 1), second))
    counted = [rack.log.traffic() for rack in racks]
    for way, rack in (("sent", 0), ("received", 1), ("sent", 1), ("received", 2)):
        assert counted[rack][way]["training"]["bytes"] == 4 * 6 * dtype.itemsize
        assert counted[rack][way]["training"]["items"] == 4


def test_a_rack_waits_when_it_is_ahead(tmp_path: Path) -> None:
    with connected(tmp_path, 2, ahead=4) as racks:
        offered = list[int]()

        def work() -> None:
            for step in range(12):
                racks[0].offer((key(step), stream(step)))
                offered.append(step)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(0.5)
        assert 3 <= len(offered) <= 5
        for step in range(12):
            assert torch.equal(racks[1].ask(key(step)), stream(step))
        thread.join()
    assert racks[0].log.waited > 0.3


def test_another_window_than_the_next_one_is_refused(tmp_path: Path) -> None:
    with connected(tmp_path, 2) as racks:
        racks[0].offer((key(3, 1), stream(3)))
        wanted = "rack 0 has sent window 1 of step 3 where rack 1 needs held-out window 0 after step 3; remove the run"
        with pytest.raises(ValueError, match=wanted):
            racks[1].ask(key(3, 0, ItemKind.HELD_OUT))


def test_a_link_is_emulated(tmp_path: Path) -> None:
    """A stream arrives a delay and its bytes later, and nothing that is sent meanwhile arrives before it."""
    with connected(tmp_path, 2, ahead=8, link=Link(delay=0.2, bandwidth=240.0)) as racks:
        begun = time.monotonic()
        racks[0].offer(*((key(1, place), stream(1)) for place in range(4)))  # of 24 bytes: 0.1 s each
        for place in range(4):
            racks[1].ask(key(1, place))
        assert 0.6 <= time.monotonic() - begun < 3


def test_a_checkpoint_waits_for_everyone_s_last_one(tmp_path: Path) -> None:
    with connected(tmp_path, 2) as racks:
        racks[0].checkpoint_saved()
        thread = threading.Thread(target=racks[0].before_checkpoint)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        racks[1].checkpoint_saved()
        thread.join(10)
        assert not thread.is_alive()
