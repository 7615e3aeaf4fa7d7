"""Timing by torch.profiler: traces with programs and steps by their names, and waiting by events of a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from surgeon.benchmarks.measure import SPLIT_TOKENS, Measurement, RankBench, Split
from surgeon.benchmarks.timing import (
    PASS,
    TimedEngine,
    collectives_of_passes,
    trace_files,
    write_profile,
)
from surgeon.cost.deployment import Workload
from surgeon.language.program import Program
from surgeon.runtime.batching.request import Row, Wanted
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.comm.collectives import Alone, Counts
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import Sender
from tests.pretended import pretended_gpus
from tests.tiny_models import tiny_model


def test_a_file_for_each_rank(tmp_path: Path) -> None:
    assert [path.name for path in trace_files(tmp_path / "t.json", 2)] == [
        "t.rank0.json",
        "t.rank1.json",
    ]


def test_a_profile_has_programs_and_their_steps(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    options = SimpleNamespace(ranks=1)
    rank: Any = SimpleNamespace(
        rank=0,
        device=torch.device("cpu"),
        engines={},
        settings=SimpleNamespace(options=options),
        sender=Sender([]),
    )
    rank.notify = lambda _: None
    load = Workload(1, 4, 3)
    loads = {}
    for name, program in (("dense", "A0 F0 A1 F1"), ("ladder", "A0 F0 >A1 >F1")):
        rank.engines[name] = TimedEngine(make_plan(tmp_path / "tiny", 1, 32, program), rank, Alone())
        loads[name] = (load.requests(256), 2, Limits(1, 32, pass_tokens=4))
    write_profile(rank, loads, str(tmp_path / "trace.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny", "trace.rank0.json"]
    events = json.loads((tmp_path / "trace.rank0.json").read_text())["traceEvents"]
    spans = {
        name: [one for one in events if one.get("name") == name]
        for name in ("dense", "ladder", ">A1", "A0")
    }
    assert [len(spans[name]) for name in ("dense", "ladder", ">A1", "A0")] == [1, 1, 3, 6]
    (ladder,) = spans["ladder"]
    for late in spans[">A1"]:
        assert ladder["ts"] <= late["ts"] <= ladder["ts"] + ladder["dur"]
    assert any(str(one.get("name")).startswith("aten::") for one in events)
    assert not any(engine.recorder.profiled for engine in rank.engines.values())


def event(
    name: str, start: float, end: float, device: Any = DeviceType.CUDA, annotation: bool = False
) -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=device, time_range=span, is_user_annotation=annotation)


def test_waiting_is_what_nothing_but_collectives_takes() -> None:
    """In microseconds: a sum that nothing hides, one hidden but for its end, and one of the symmetric memory."""
    events = [
        event(PASS, 100, 200, DeviceType.CPU),
        event(PASS, 300, 400, DeviceType.CPU),
        event(PASS, 100, 200, annotation=True),
        event("ncclDevKernel_AllReduce_Sum", 110, 130),
        event("gemm", 130, 150),
        event("gemm", 310, 340),
        event("ncclDevKernel_AllReduce_Sum", 320, 350),
        event("one_shot_all_reduce_kernel", 360, 363),
        event("barrier_kernel", 363, 365),
        event("norm", 345, 350),
        event("aten::mm", 310, 311, DeviceType.CPU),
    ]
    (waits, hidden), (waits_later, hidden_later) = collectives_of_passes(reversed(events))
    assert (waits, waits_later) == pytest.approx((20e-6, 10e-6))
    assert (hidden, hidden_later) == pytest.approx((0.0, 25e-6))


def test_spans_may_overlap_and_reach_beyond_a_pass() -> None:
    events = [
        event(PASS, 100, 200, DeviceType.CPU),
        event("ncclDevKernel_AllReduce_Sum", 50, 120),
        event("ncclDevKernel_AllReduce_Sum", 60, 70),
        event("gemm", 110, 130),
        event("gemm", 150, 250),
        event("ncclDevKernel_AllReduce_Sum", 140, 300),
        event("norm", 400, 500),
    ]
    assert collectives_of_passes(events) == [pytest.approx((20e-6, 60e-6))]


def test_the_split_of_a_profiled_run_goes_to_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Split(0, math.nan, 1.0, Counts(), Counts())
    rounds = [Measurement(1, 1, 1, seconds, 1, nothing, nothing) for seconds in (2.0, 3.0)]
    asked = []
    ranks: Any = SimpleNamespace(options=SimpleNamespace(device="cpu"))
    bench = RankBench(ranks, {})
    assert bench.split("dense", Workload(), rounds) == rounds
    ranks.options.device = "cuda"
    known = Split(1, 0.25, 0.5, Counts(), Counts())
    profiled = Measurement(9, 9, 9, 9, 9, known, known)
    monkeypatch.setattr(
        RankBench, "run", lambda *given, **how: asked.append((given[2].new, how)) or given
    )
    monkeypatch.setattr("surgeon.benchmarks.measure.summarise", lambda *_: profiled)
    found = bench.split("dense", Workload(new=4096), rounds)
    assert asked == [
        (SPLIT_TOKENS, {"profiled": True})
    ]  # a profile of all passes would take minutes to read
    assert [(one.per_token, one.decode_pass) for one in found] == [(2.0, known), (3.0, known)]


@pytest.mark.parametrize("decoding", ["dynamic", "static", "auto"])
def test_passes_on_gpus_are_not_marked(tmp_path: Path, decoding: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pretended_gpus(1):
        plan = make_plan(tmp_path, 1, 64, str(Program.dense(4)), "cuda", decoding=decoding)
        rank: Any = SimpleNamespace(device=torch.device("cuda", 0), engines={})
        engine = TimedEngine(plan, rank, Alone())
        cache = engine.new_cache(4)
        for start, tokens in ((0, [1, 2, 3]), (3, [4]), (4, [5])):
            engine.step([Row(start, tokens, ([(0, 4)],), Wanted.BEST)], cache)
    assert [(one.decode, one.waiting) for one in engine.recorder.passes] == [
        (False, None),
        (True, None),
        (True, None),
    ]
