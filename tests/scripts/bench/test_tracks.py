"""scripts/bench/tracks.py: what it compares, and its rows, from measurements made by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from scripts.bench import tracks
from surgeon.benchmarks.measure import Measurement, Result, Split
from surgeon.cost.deployment import Workload
from surgeon.language.program import Program
from surgeon.runtime.comm.collectives import Counts


def test_what_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config = LlamaConfig(
        num_hidden_layers=tracks.LAYERS, vocab_size=97, max_position_embeddings=64, **small
    )
    monkeypatch.setattr(tracks, "CONFIG", config)
    models = tracks.Models.write(tmp_path, 4)
    assert models == tracks.Models.write(tmp_path, 4)  # and nothing is written again
    found = models.plans([1, 8], 32)
    syncs = {name: Program.parse(plan.program).sync_points(4) for name, plan in found.items()}
    assert syncs == {
        "dense": 32,
        **{f"{kind}, D = {depth}": 16 // depth for kind in ("native", "sliced") for depth in (1, 8)},
    }
    assert {(name.partition(",")[0], plan.hidden, plan.layers) for name, plan in found.items()} == {
        ("dense", 64, 16),
        ("native", 32, 64),
        ("sliced", 64, 16),
    }


def test_rows() -> None:
    def result(name: str, seconds: list[float], syncs: int) -> Result:
        plan: Any = SimpleNamespace(program="A0 F0", ranks=2, family=SimpleNamespace(steps_per_layer=2))
        split = Split(0, 0.0, 0.0, Counts(syncs, 0, 1600 * syncs), Counts())
        rounds = [Measurement(one, one, one, one / 10, 100 / one, split, split) for one in seconds]
        return Result(name, plan, Workload(2, 4, 8), rounds=rounds)

    dense, other = result("dense", [1.0, 2.0, 4.0], 32), result("one", [0.5, 1.8, 3.6], 4)
    first, second = tracks.rows([dense, other])
    assert first == [2, "dense", 32, "25.6", "2000.0", "", "200.0", "", "50.0", ""]
    assert second == [2, "one", 4, "3.2", "1800.0", "-10%", "180.0", "-10%", "55.6", "+11%"]
