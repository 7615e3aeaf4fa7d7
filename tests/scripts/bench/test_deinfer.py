"""scripts/bench/deinfer.py: what it compares, and how its figures are made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts.bench import deinfer
from surgeon.benchmarks.measure import Measurement, Result, Split
from surgeon.cost.deployment import Workload
from surgeon.runtime.comm.collectives import Counts
from tests.tiny_models import save_checkpoint


def result(name: str, *per_token: float) -> Result:
    split = Split(0.0, 0.002, 0.003, Counts(2, 2, 4000), Counts())
    rounds = [
        Measurement(0.1, 0.1, seconds, seconds, 1 / seconds, split, split) for seconds in per_token
    ]
    plan: Any = SimpleNamespace(program="A0 F0", ranks=2, family=SimpleNamespace(steps_per_layer=2))
    return Result(name, plan, Workload(4, 8, 8), rounds=rounds)


def test_every_way_of_every_keep(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "source")
    low = {0.5: save_checkpoint(tmp_path / "low"), 0.2: save_checkpoint(tmp_path / "lower")}
    found = deinfer.candidates(source, low, 2, 16)
    assert [one.name for one in found] == [
        "dense", "Base 0.5", "DeInfer 0.5", "auto 0.5", "Base 0.2", "DeInfer 0.2", "auto 0.2"
    ]  # fmt: skip
    assert [each.low_rank for each in found.values()][1:4] == ["base", "gather", "auto"]


def test_a_row() -> None:
    dense, base, own = (
        result("dense", 0.02, 0.04),
        result("Base 0.5", 0.04, 0.06),
        result("DeInfer 0.5", 0.01, 0.03),
    )
    compared = deinfer.Compared("DeInfer 0.5", 0.5, deinfer.DEINFER)
    # Medians of two rounds: 0.02 s per pass of 4 texts; twice and 4/3 as fast as dense, 4 and 2 times as Base.
    cells = deinfer.row(compared, own, dense, base)
    assert cells == [4, "0.5", "DeInfer", "200.0", "1.67", "3.00", "100.0", "20.0", "3.0", "2.0", "4.0"]
