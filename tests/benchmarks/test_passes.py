"""Marks of a pass on a pretended device: events that are read at its end, and noted anew by every replay."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surgeon.benchmarks.measure import Measurement, RankBench, Split
from surgeon.benchmarks.passes import DeviceClock, HostClock, PassRecorder, now
from surgeon.benchmarks.timing import TimedEngine, watched
from surgeon.cost.workload import Workload
from surgeon.language.program import Program
from surgeon.runtime.batching.sequence import Row, Wanted
from surgeon.runtime.comm.collectives import Alone, Counts, Unconnected
from surgeon.runtime.comm.link import EmulatedLink, Link
from surgeon.runtime.model.engine import Figures
from surgeon.runtime.plan.checks import make_plan
from tests.pretended import pretended_gpus
from tests.tiny_models import tiny_model

DELAY = 0.002


@dataclass
class Device:
    """Comes to what it is given late: its events have times of its own, and can be read when it was waited for."""

    late: float = 0.5
    waited: int = 0
    events: list[Any] = field(default_factory=list)

    def event(self) -> Any:
        device = self

        class Event:
            time = math.nan
            readable = -1

            def record(self) -> None:
                self.time, self.readable = now() + device.late, device.waited

            def elapsed_time(self, other: Any) -> float:
                assert other.readable < device.waited, "read before the device was waited for"
                return float(1e3 * (other.time - self.time))

        self.events.append(Event())
        return self.events[-1]

    def wait(self) -> None:
        self.waited += 1

    @property
    def clock(self) -> DeviceClock:
        return DeviceClock(self.event, self.wait)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def timed(checkpoint: Path, program: str, decoding: Any = "dynamic", **rank: Any) -> TimedEngine:
    slow = EmulatedLink(Unconnected(0, (0, 1)), Link(DELAY))
    plan = make_plan(checkpoint, 2, 64, program, decoding=decoding)
    stand_in: Any = SimpleNamespace(device=torch.device("cpu"), engines={}, **rank)
    return TimedEngine(plan, stand_in, slow)


def step(engine: TimedEngine, cache: Any, start: int, tokens: list[int]) -> Any:
    engine.step([Row(start, tokens, ([(0, 4)],), Wanted.BEST)], cache)
    return engine.recorder.passes[-1]


def kept(recorder: PassRecorder) -> list[tuple[Any, Any]]:
    """Computations and exchanges of each pass from now on, as they are when it is over."""
    found = []
    drop = recorder.drop

    def noting() -> None:
        if recorder.computations:
            found.append((recorder.computations, recorder.exchanges))
        drop()

    recorder.drop = noting  # type: ignore[method-assign]
    return found


def test_a_devices_marks_say_what_the_hosts_do(checkpoint: Path) -> None:
    """The same engine by both clocks; one that is late all the time changes nothing."""
    engine, device = timed(checkpoint, "A0 F0 >A1 >F1 [A2 A3] [F2 F3]"), Device()
    cache = engine.new_cache(4)
    host = step(engine, cache, 0, [1, 2, 3])
    engine.recorder.clock = device.clock
    noted = kept(engine.recorder)
    found = step(engine, cache, 3, [4])
    assert [len(one.steps) for one in (host, found)] == [6, 6]
    assert math.isnan(host.launching)
    assert 0 < found.launching < found.seconds + 0.01
    assert found.waiting == pytest.approx(host.waiting, rel=1.0)
    assert sum(found.steps) < found.seconds
    computations, exchanges = noted[-1]
    began = [one.began for one in computations]
    assert began == sorted(began)
    assert found.began <= began[0] <= began[-1] <= found.ended
    assert all(one.began <= one.started <= one.waited <= one.ended for one in exchanges)
    assert device.waited == 1


def test_what_is_not_marked_takes_no_events(checkpoint: Path) -> None:
    engine, device = timed(checkpoint, str(Program.dense(4))), Device()
    engine.recorder.clock, engine.recorder.marking = device.clock, False
    device.events.clear()
    found = step(engine, engine.new_cache(4), 0, [1, 2])
    assert (found.waiting, found.steps, device.events) == (None, [], [])
    assert found.layers.all_reduces == 8
    assert math.isnan(found.launching)


def test_marking_records_passes_anew_on_a_device_only(checkpoint: Path) -> None:
    engine = timed(checkpoint, str(Program.dense(4)))
    ways = engine.ways
    engine.mark(False)
    assert engine.ways is ways
    assert engine.recorder.marking
    engine.recorder.clock, engine.recorder.marking = Device().clock, False
    engine.mark(True)
    assert engine.ways is not ways
    assert engine.recorder.marking


def test_every_replay_notes_the_marks_of_its_recording(checkpoint: Path) -> None:
    """As of a CUDA graph: Python runs when it is recorded, and its events are recorded again when it is replayed."""
    engine, device = timed(checkpoint, "A0 F0 >A1 >F1 A2 F2 A3 F3", "static"), Device()

    def graphs(compute: Any) -> Any:
        compute()  # to warm up
        first = len(device.events)
        outputs = compute()
        held = device.events[first:]

        def replay() -> Any:
            for event in held:
                event.record()
                time.sleep(1e-5)
            return outputs

        return replay

    recorder = engine.recorder
    recorder.clock = device.clock
    noted = kept(recorder)
    engine.model.graphs = watched(graphs, recorder)
    engine.mark(False)
    engine.mark(True)
    cache = engine.new_cache(4)
    step(engine, cache, 0, [1, 2, 3])
    passes = [step(engine, cache, 3 + number, [number]) for number in range(3)]
    for one, (computations, exchanges) in zip(passes, noted[-3:], strict=True):
        assert len(one.steps) == 8
        assert len(exchanges) == 8 + 2  # the embedding's and the head's
        assert all(one.began <= each.began <= one.ended for each in computations)
        assert 0 < one.waiting < one.seconds
        assert one.launching <= one.seconds
    starts = [computations[0].began for computations, _ in noted[-3:]]
    assert starts == sorted(set(starts))


def test_the_split_of_marked_runs_goes_to_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Split(0, math.nan, 1.0, Counts(), Counts())
    rounds = [Measurement(1, 1, 1, seconds, 1, nothing, nothing) for seconds in (2.0, 3.0)]
    asked = []
    ranks: Any = SimpleNamespace(options=SimpleNamespace(device="cpu"))
    bench = RankBench(ranks, {})
    assert bench.split("dense", Workload(), rounds) == rounds
    ranks.options.device = "cuda"
    known = Split(1, 0.25, 0.5, Counts(), Counts(), 0.125)
    marked = Measurement(9, 9, 9, 9, 9, known, known)
    monkeypatch.setattr(RankBench, "run", lambda *given, **how: asked.append(how) or given)
    monkeypatch.setattr("surgeon.benchmarks.measure.summarise", lambda *_: marked)
    found = bench.split("dense", Workload(), rounds)
    assert asked == [{"marked": True}] * 2
    assert [(one.per_token, one.decode_pass) for one in found] == [(2.0, known), (3.0, known)]


def test_a_clock_of_a_gpu_needs_none_to_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **how: made.append(how))
    DeviceClock.of(torch.device("cuda", 1))
    assert made == [{"enable_timing": True, "external": True}]
    assert PassRecorder(Figures()).clock.deferred is HostClock.deferred is False


@pytest.mark.parametrize("decoding", ["dynamic", "static", "captured"])
def test_passes_on_gpus_are_marked_when_that_is_asked_for(checkpoint: Path, decoding: Any) -> None:
    with pretended_gpus(1):
        plan = make_plan(checkpoint, 1, 64, str(Program.dense(4)), "cuda", decoding=decoding)
        rank: Any = SimpleNamespace(device=torch.device("cuda", 0), engines={})
        engine, found = TimedEngine(plan, rank, Alone()), []
        for marking in (False, True, False):
            engine.mark(marking)
            cache = engine.new_cache(4)
            step(engine, cache, 0, [1, 2, 3])
            found.append([step(engine, cache, 3 + number, [number]) for number in range(2)])
    for passes, marked in zip(found, (False, True, False), strict=True):
        for one in passes:
            assert len(one.steps) == (8 if marked else 0)
            assert (one.waiting is None) is not marked
            assert math.isnan(one.launching) is not marked


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_of_a_gpu() -> None:
    device = torch.device("cuda")
    clock = DeviceClock.of(device)
    x = torch.ones(4096, 4096, device=device)
    torch.cuda.synchronize()
    for _ in range(2):
        clock.begin()
        marks = [clock.mark()]
        began = now()
        for _ in range(5):
            x = x @ x / 4096
        marks.append(clock.mark())
        clock.end()
        spent = now() - began
        first, last = map(clock.read, marks)
        assert abs(first - began) < 1e-3
        assert 0 < last - first <= spent + 1e-3
        assert clock.launched < began + spent
