"""Traces by torch.profiler: a file for each rank, with programs and steps by their names."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from surgeon.benchmarks.timing import TimedEngine, trace_files, write_profile
from surgeon.cost.workload import Workload
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.comm.pipes import Sender
from surgeon.runtime.plan.checks import make_plan
from tests.tiny_models import tiny_model


def test_a_file_for_each_rank(tmp_path: Path) -> None:
    assert [path.name for path in trace_files(tmp_path / "t.json", 2)] == ["t.rank0.json", "t.rank1.json"]


def test_a_profile_has_programs_and_their_steps(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    options = SimpleNamespace(ranks=1)
    rank: Any = SimpleNamespace(
        rank=0, device=torch.device("cpu"), engines={}, settings=SimpleNamespace(options=options), sender=Sender([])
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
    spans = {name: [one for one in events if one.get("name") == name] for name in ("dense", "ladder", ">A1", "A0")}
    assert [len(spans[name]) for name in ("dense", "ladder", ">A1", "A0")] == [1, 1, 3, 6]
    (ladder,) = spans["ladder"]
    for late in spans[">A1"]:
        assert ladder["ts"] <= late["ts"] <= ladder["ts"] + ladder["dur"]
    assert any(str(one.get("name")).startswith("aten::") for one in events)
    assert not any(engine.recorder.profiled for engine in rank.engines.values())
