"""What a profile of a GPU says of passes, by events as `torch.profiler` gives them; none elsewhere."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from surgeon.benchmarks.measure import Measurement, RankBench, Split
from surgeon.benchmarks.timing import PASS, TimedEngine, waits_of_passes
from surgeon.cost.workload import Workload
from surgeon.language.program import Program
from surgeon.runtime.batching.sequence import Row, Wanted
from surgeon.runtime.comm.collectives import Alone, Counts
from surgeon.runtime.plan.checks import make_plan
from tests.pretended import pretended_gpus
from tests.tiny_models import tiny_model


def event(name: str, start: float, end: float, device: Any = DeviceType.CUDA, annotation: bool = False) -> Any:
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
        event("one_shot_all_reduce_kernel", 360, 365),
        event("norm", 345, 350),
        event("aten::mm", 310, 311, DeviceType.CPU),
    ]
    assert waits_of_passes(reversed(events)) == pytest.approx([20e-6, 10e-6])


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
    monkeypatch.setattr(RankBench, "run", lambda *given, **how: asked.append(how) or given)
    monkeypatch.setattr("surgeon.benchmarks.measure.summarise", lambda *_: profiled)
    found = bench.split("dense", Workload(), rounds)
    assert asked == [{"profiled": True}]
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
