"""Two racks and what is between them, where either may be killed and the connection cut at any moment."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgeon.runtime.comm.link import Link
from surgeon.training.racks.inbox import Absence, Inbox
from surgeon.training.racks.items import ItemKey, ItemKind
from surgeon.training.racks.outbox import Closed, Outbox
from surgeon.training.racks.rack_log import RackLog
from surgeon.training.racks.wire import Lane
from tests.waiting import PATIENCE, takes_less_than, wait_until

TOKEN = bytes(range(16))
WINDOWS = 3  # of a step
TELLING = Absence(silent=0.05, limit=PATIENCE)
BRIEF = Absence(silent=9.0, limit=0.2)


def order(steps: int) -> list[ItemKey]:
    """What a run hands on: every second step is measured, and all of it before the first one."""
    keys = [ItemKey(0, ItemKind.HELD_OUT, window) for window in range(2)]
    for step in range(1, steps + 1):
        keys += [ItemKey(step, ItemKind.TRAINING, place) for place in range(WINDOWS)]
        keys += [ItemKey(step, ItemKind.HELD_OUT, window) for window in range(2 if step % 2 == 0 else 0)]
    return keys


def content(key: ItemKey) -> Tensor:
    """What an item has in it, made anew each time."""
    seed = (key.step * 10 + key.kind) * 10 + key.place
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))


def offer(box: Outbox, keys: list[ItemKey]) -> None:
    for key in keys:
        box.offer((key, content(key)))


def outbox(folder: Path, ahead: int = 4, **options: Any) -> Outbox:
    return Outbox(folder, TOKEN, {Lane.STREAMS: [1]}, ahead, **options)


def inbox(where: Callable[[], Any], absence: Absence = TELLING, token: bytes = TOKEN, **options: Any) -> Inbox:
    return Inbox(1, 0, where, token, absence=absence, **options)


@contextmanager
def joined(folder: Path, ahead: int = 4, **options: Any) -> Iterator[tuple[Outbox, Inbox]]:
    before = outbox(folder, ahead, **options)
    after = inbox(lambda: before.address)
    try:
        yield before, after
    finally:
        after.close()
        before.close()


def test_items_arrive_in_order_bit_for_bit(tmp_path: Path) -> None:
    keys = order(4)
    with joined(tmp_path) as (before, after):
        offering = threading.Thread(target=offer, args=(before, keys))
        offering.start()
        for key in keys:
            assert torch.equal(after.ask(key), content(key))
        offering.join()


def test_nobody_runs_far_ahead(tmp_path: Path) -> None:
    keys, made = order(5), list[ItemKey]()

    def offer_and_note() -> None:
        for key in keys:
            before.offer((key, content(key)))
            made.append(key)

    def settled(count: int) -> bool:
        wait_until(lambda: len(made) >= count)
        time.sleep(0.02)
        return len(made) == count

    with joined(tmp_path, ahead=4) as (before, after):
        offering = threading.Thread(target=offer_and_note)
        offering.start()
        assert settled(4)
        for taken, key in enumerate(keys[:6], start=1):
            after.ask(key)
            assert settled(taken + 4)
        after.end()
        offering.join()


def test_what_belongs_together_is_handed_on_together(tmp_path: Path) -> None:
    """Micro-batches of one rack need not be those of the next one."""
    keys = order(1)[2:]
    with joined(tmp_path, ahead=1) as (before, after):
        before.offer(*((key, content(key)) for key in keys))
        for key in keys:
            assert torch.equal(after.ask(key), content(key))


def test_one_goes_back_and_asks_again(tmp_path: Path) -> None:
    keys = order(2)
    with joined(tmp_path, ahead=50) as (before, after):
        for key in keys:
            before.offer((key, content(key)))
        for key in (*keys, *keys[3:], keys[-1], keys[0]):
            assert torch.equal(after.ask(key), content(key))


def test_what_is_covered_is_forgotten(tmp_path: Path) -> None:
    keys = order(4)
    with joined(tmp_path, ahead=50) as (before, after):
        for key in keys:
            before.offer((key, content(key)))
        after.ask(keys[-1])
        after.cover(3)
        after.ask(keys[-2])  # so that it has been heard
        kept = {path.name for path in (tmp_path / "streams").iterdir()}
        assert kept == {"step-000000004.items"}
        with pytest.raises(
            ValueError, match="rack 0: window 1 of step 2 is not kept any more.*remove the run's folder"
        ):
            after.ask(ItemKey(2, ItemKind.TRAINING, 1))
        assert after.end(PATIENCE)
        before.wait_until_taken()
        assert {path.name for path in (tmp_path / "streams").iterdir()} == {"rack-1.ended"}
        before.offer((ItemKey(5, ItemKind.TRAINING, 0), content(keys[0])))  # to nobody, and without waiting
    again = outbox(tmp_path)
    again.wait_until_taken()  # a process that comes back knows it
    again.close()


def test_lost_items_are_not_waited_for(tmp_path: Path) -> None:
    """A rack that goes on from a checkpoint does not make earlier items again."""
    with joined(tmp_path) as (before, after):
        before.begin(step=3)
        with pytest.raises(ValueError, match="window 0 of step 3 is not kept any more"):
            after.ask(ItemKey(3, ItemKind.TRAINING, 0))
        before.offer((ItemKey(4, ItemKind.TRAINING, 0), torch.ones(2)))
        assert torch.equal(after.ask(ItemKey(4, ItemKind.TRAINING, 0)), torch.ones(2))


def test_a_file_that_is_gone_is_said_to_who_asks(tmp_path: Path) -> None:
    keys = order(2)
    before = outbox(tmp_path, 50)
    offer(before, keys)
    before.close()
    with joined(tmp_path, ahead=50) as (_, after):
        (tmp_path / "streams" / "step-000000002.items").unlink()
        assert torch.equal(after.ask(keys[0]), content(keys[0]))
        with pytest.raises(ValueError, match="window 0 of step 2 is not kept any more"):
            after.ask(ItemKey(2, ItemKind.TRAINING))


def test_codas_go_to_all_that_ask(tmp_path: Path) -> None:
    before = Outbox(tmp_path, TOKEN, {Lane.CODAS: [1, 2]})
    askers = [Inbox(rack, 0, lambda: before.address, TOKEN, Lane.CODAS, absence=TELLING) for rack in (1, 2)]
    for step in range(1, 20):  # far ahead of anybody who asks
        before.offer((ItemKey(step, ItemKind.CODA), torch.full((4,), float(step))))
    for step in (1, 7, 19):
        for asker in askers:
            assert torch.equal(asker.ask(ItemKey(step, ItemKind.CODA)), torch.full((4,), float(step)))
    askers[0].cover(18)
    askers[0].ask(ItemKey(19, ItemKind.CODA))
    assert len(list((tmp_path / "codas").iterdir())) == 19
    askers[1].cover(10)
    askers[1].ask(ItemKey(19, ItemKind.CODA))
    assert len(list((tmp_path / "codas").iterdir())) == 9
    for asker in askers:
        asker.close()
    before.close()


def test_a_link_delays_what_arrives_and_not_who_sends(tmp_path: Path) -> None:
    steps, offers = itertools.count(1), list[float]()
    with joined(tmp_path, ahead=50, link=Link(delay=0.3)) as (before, after):

        def seconds() -> float:
            step = next(steps)
            keys = [ItemKey(step, ItemKind.TRAINING, place) for place in range(4)]
            begun = time.monotonic()
            for key in keys:
                before.offer((key, content(key)))
            offers.append(time.monotonic() - begun)
            for key in keys:
                assert torch.equal(after.ask(key), content(key))
            took = time.monotonic() - begun
            assert took >= 0.3
            after.cover(step)
            return took

        assert takes_less_than(1.1, seconds)  # they travel together
        assert min(offers) < 0.3


def test_a_link_has_a_bandwidth(tmp_path: Path) -> None:
    with joined(tmp_path, link=Link(bandwidth=100_000)) as (before, after):
        begun = time.monotonic()
        for place in range(3):
            before.offer((ItemKey(1, ItemKind.TRAINING, place), torch.zeros(1000)))
        for place in range(3):
            after.ask(ItemKey(1, ItemKind.TRAINING, place))
        assert time.monotonic() - begun >= 3 * 0.04


def test_bytes_are_counted_at_both_ends(tmp_path: Path) -> None:
    sent, received = RackLog(tmp_path), RackLog()
    before = outbox(tmp_path, log=sent)
    after = inbox(lambda: before.address, log=received)
    keys = order(2)
    for key in keys:
        before.offer((key, content(key)))
        after.ask(key)
    assert after.end(PATIENCE)
    before.wait_until_taken()  # what is said is counted once it has been sent, in another thread
    after.close()
    before.close()
    out, back = sent.traffic(), received.traffic()
    assert out["sent"]["forward"] == back["received"]["forward"]
    assert out["received"]["backward"] == back["sent"]["backward"]
    numbers = len(keys) * content(keys[0]).nbytes
    assert numbers < out["sent"]["forward"]["bytes"] < numbers + 100 * len(keys)
    assert out["sent"]["forward"]["training"]["items"] == 6
    assert out["sent"]["forward"]["held_out"]["items"] == 4
    assert len(keys) < out["received"]["backward"]["items"] <= 3 * len(keys)
    assert out["received"]["forward"]["bytes"] == 0
    assert out["peak"] > 1 << 20
    sent.write()
    again = RackLog(tmp_path)  # of the process after it
    again.count("sent", "forward", keys[-1]._replace(kind=ItemKind.TRAINING), 10)
    total = again.traffic()["sent"]["forward"]
    assert total["bytes"] == out["sent"]["forward"]["bytes"] + 10
    assert total["training"]["items"] == 7


def test_a_rack_that_is_away_is_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    places: list[tuple[str, int]] = []
    after = inbox(lambda: places[-1] if places else None)
    key, found = ItemKey(1, ItemKind.TRAINING), list[Tensor]()
    asking = threading.Thread(target=lambda: found.append(after.ask(key)))
    asking.start()
    said = ""

    def told() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "\n" in said

    wait_until(told)
    assert "rack 1: waiting for rack 0 at an address that it has not said yet, which is away" in said
    before = outbox(tmp_path)
    places.append(before.address)
    before.offer((key, torch.ones(3)))
    asking.join()
    assert torch.equal(found[0], torch.ones(3))
    after.close()
    before.close()


def test_a_rack_that_is_gone_for_good(tmp_path: Path) -> None:
    before = outbox(tmp_path)
    after = inbox(lambda: before.address)
    before.offer((ItemKey(1, ItemKind.TRAINING), torch.ones(3)))
    after.ask(ItemKey(1, ItemKind.TRAINING))
    after.absence = BRIEF  # from now on, and not while it connects
    before.close()
    with pytest.raises(ConnectionError, match=r"rack 0 at 127\.0\.0\.1:\d+ has been away for .* start it again"):
        after.ask(ItemKey(2, ItemKind.TRAINING))
    after.close()


def test_racks_of_other_runs_are_sent_away(tmp_path: Path) -> None:
    before = outbox(tmp_path)
    for token, lane in ((bytes(16), Lane.STREAMS), (TOKEN, Lane.CODAS)):
        after = Inbox(1, 0, lambda: before.address, token, lane, absence=BRIEF)
        wait_until(lambda inbox=after: "of another run" in inbox._why)  # type: ignore[misc]
        with pytest.raises(ConnectionError, match="of another run"):
            after.ask(ItemKey(1, ItemKind.TRAINING))
        after.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.1 400 Bad Request"), daemon=True).start()
        after = inbox(server.getsockname, BRIEF)
        with pytest.raises(ConnectionError, match="away"):
            after.ask(ItemKey(1, ItemKind.TRAINING))
        after.close()
    with socket.create_connection(before.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with suppress(ConnectionResetError):
            said = b"".join(iter(lambda: stranger.recv(100), b""))
            assert said.startswith(b"#CHALLENGE#", 4)
            assert len(said) < 100
    before.close()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    before = outbox(tmp_path / "one")
    with pytest.raises(OSError, match=r"cannot listen at 127\.0\.0\.1:\d+ .*--listen"):
        outbox(tmp_path / "other", listen=before.address)
    before.close()
    with pytest.raises(ValueError, match="at least 1 item ahead"):
        outbox(tmp_path / "other", ahead=0)


class Cutting:
    """A wire that breaks after so many bytes, one after the other; then it stays whole."""

    def __init__(self, target: Callable[[], tuple[str, int]], lengths: list[int]) -> None:
        self.target, self.lengths = target, lengths
        self.server = socket.create_server(("127.0.0.1", 0))
        self.broken = 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self.server.accept()[0]
                length = self.lengths.pop(0) if self.lengths else 1 << 40
                far = socket.create_connection(self.target())
                threading.Thread(target=self.forward, args=(near, far, 1 << 40), daemon=True).start()
                threading.Thread(target=self.forward, args=(far, near, length), daemon=True).start()

    def forward(self, source: socket.socket, target: socket.socket, length: int) -> None:
        with suppress(OSError):
            while data := source.recv(min(length, 4096)):
                target.sendall(data)
                length -= len(data)
                if not length:
                    self.broken += 1
                    break
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_a_connection_is_cut_in_the_middle(tmp_path: Path) -> None:
    keys = order(4)
    before = outbox(tmp_path)
    wire = Cutting(lambda: before.address, [3, 9, 20, 70, 100, 500, 333])
    after = inbox(wire.server.getsockname)
    offering = threading.Thread(target=offer, args=(before, keys))
    offering.start()
    for key in keys:
        assert torch.equal(after.ask(key), content(key))
    offering.join()
    assert wire.broken >= 5
    after.close()
    before.close()
    wire.server.close()


def test_what_is_heard_too_late_changes_nothing(tmp_path: Path) -> None:
    """The folder is the next outbox's as soon as this one is closed."""
    keys = order(2)
    with joined(tmp_path, ahead=50) as (before, after):
        offer(before, keys)
        for key in keys:
            after.ask(key)
        with before._changed:
            after.cover(2)
            time.sleep(0.05)  # it has come, and waits for the lock
            before.close()
    assert [path.name for path in sorted((tmp_path / "streams").iterdir())] == [
        f"step-{step:09}.items" for step in range(3)
    ]


class Drawn:
    """Two racks of which each has a checkpoint, and is killed now and then."""

    def __init__(self, folder: Path, ahead: int, steps: int, every: int) -> None:
        self.folder, self.ahead, self.keys, self.every = folder, ahead, order(steps), every
        self.saved = {"before": 0, "after": 0}  # steps
        self.place: dict[str, tuple[str, int]] = {}
        self.begin_before()
        self.begin_after()

    def begin_before(self) -> None:
        self.outbox = outbox(self.folder, self.ahead)
        self.place["before"] = self.outbox.address
        self.outbox.begin(self.saved["before"])
        self.offering = threading.Thread(target=self.offer, args=(self.outbox, self.saved["before"]))
        self.offering.start()

    def offer(self, box: Outbox, begin: int) -> None:
        with suppress(Closed):
            for key in self.left(begin):
                box.offer((key, content(key)))
                if key == self.last_of(key.step) and key.step % self.every == 0:
                    self.saved["before"] = key.step

    def begin_after(self) -> None:
        self.inbox = inbox(lambda: self.place["before"])
        self.asked = iter(self.left(self.saved["after"]))

    def left(self, step: int) -> list[ItemKey]:
        return [key for key in self.keys if key.step > step or step == 0]

    def last_of(self, step: int) -> ItemKey:
        return max(key for key in self.keys if key.step == step)

    def take(self, count: int) -> None:
        for _, key in zip(range(count), self.asked, strict=False):
            assert torch.equal(self.inbox.ask(key), content(key)), key
            if key == self.last_of(key.step) and key.step and key.step % (self.every + 1) == 0:
                self.saved["after"] = key.step
                self.inbox.cover(key.step)

    def kill_before(self) -> None:
        self.outbox.close()
        self.offering.join()
        self.begin_before()

    def kill_after(self) -> None:
        self.inbox.close()
        self.begin_after()

    def end(self) -> None:
        self.take(len(self.keys))
        self.inbox.close()
        self.offering.join()
        self.outbox.close()


def test_either_side_is_killed_at_any_moment(tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=25, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(
        ahead=st.integers(1, 6),
        every=st.integers(1, 3),
        events=st.lists(st.sampled_from([1, 2, 5, 9, "before", "after", "both"]), max_size=14),
    )
    def check(ahead: int, every: int, events: list[int | str]) -> None:
        drawn = Drawn(tmp_path_factory.mktemp("drawn"), ahead, 6, every)
        for event in events:
            if isinstance(event, int):
                drawn.take(event)
            if event in ("before", "both"):
                drawn.kill_before()
            if event in ("after", "both"):
                drawn.kill_after()
        drawn.end()

    check()
