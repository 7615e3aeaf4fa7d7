"""Tables and picture of what was measured on ranks, from measurements made by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from surgeon.benchmarks.measure import Measurement, Result, Split, bench_record, bench_table
from surgeon.cost.deployment import Workload
from surgeon.findings.speeds import Benchmark
from surgeon.models.families import FAMILIES
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.plan.specification import Plan
from surgeon.words import NO_VALUE

PLAN = Plan(
    folder=Path("model"),
    family=FAMILIES["llama"],
    program="A0 F0 A1 F1",
    ranks=2,
    head_dim=8,
    hidden=32,
    vocabulary=97,
    layers=2,
    max_tokens=16,
    tied=False,
    dtype="float32",
)


def measured(per_token: float, waiting: float, decodes: bool = True) -> Measurement:
    split = Split(1, waiting, 0.25, Counts(4, 0, 2048), Counts(1, 1, 64))
    if not decodes:
        return Measurement(0.5, 0.4, 0.0, math.nan, 1 / per_token, split, None)
    return Measurement(per_token / 2, 0.4, 3 * per_token, per_token, 1 / per_token, split, split)


def result(
    name: str, per_token: list[float], batch: int = 1, waiting: float = 0.75, decodes: bool = True
) -> Result:
    program = "A0 F0 [A1 F1]" if name == "fused" else PLAN.program
    plan, rounds = replace(PLAN, program=program), [measured(one, waiting, decodes) for one in per_token]
    return Result(name, plan, Workload(batch, 5, 4), name != "upper-bound", rounds)


def found(table: pd.DataFrame) -> Benchmark:
    return Benchmark(table, record={"heading": "a title"})


def test_medians_over_rounds_and_of_each_rounds_ratio() -> None:
    # The machine is slow in the second round: the ratio of the medians would be 1.
    results = [result("dense", [2.0, 12.0, 4.0]), result("fused", [1.0, 6.0, 4.0])]
    results += [
        result(name, [one], batch=8)
        for name, one in (("dense", 1.0), ("fused", 4.0), ("upper-bound", 0.5))
    ]
    rows = {(row["program"], row["batch"]): row for _, row in bench_table(results).iterrows()}
    fused = rows["fused", 1]
    assert fused["per_token_ms"] == 4000
    assert fused["first_token_ms"] == 2000
    assert fused["decode_ms"] == 12000
    assert fused["tokens_per_second"] == 0.25
    assert (
        fused["per_token_speedup_low"],
        fused["per_token_speedup"],
        fused["per_token_speedup_high"],
    ) == (1, 2, 2)
    assert (fused["effective_depth"], fused["sync_points"]) == (1.5, 3)
    assert rows["fused", 8]["per_token_speedup"] == rows["fused", 8]["tokens_per_second_speedup"] == 0.25
    assert rows["upper-bound", 8]["sync_points"] == 0
    assert (fused["decode_compute_ms"], fused["decode_waiting_ms"]) == (250, 750)
    assert (
        fused["decode_all_reduces"],
        fused["decode_bytes"],
        fused["decode_vocabulary_collectives"],
    ) == (4, 2048, 2)


def test_tables_fit_a_terminal() -> None:
    names = ["a-name-of-18-chars", "another-of-18-long"]
    results = [
        result(name, times, 128) for name, times in zip(names, ([99.9, 0.0123], [1.0, 9.0]), strict=True)
    ]
    text = str(found(bench_table(results)))
    assert max(map(len, text.splitlines())) <= 80
    assert "Times as fast as a-name-of-18-chars" in text
    assert "75%" in text
    assert "4+2" in text
    assert "2.05 KB" in text


def test_gpus_tell_what_sums_take_beside_computing() -> None:
    table = bench_table([result("a-name-of-18-chars", [99.9], 128)])
    assert "hidden" not in str(found(table))
    seen = str(found(table.assign(prefill_hidden_ms=0.5, decode_hidden_ms=1.25)))
    assert max(map(len, seen.splitlines())) <= 80
    assert all(words in seen for words in ("waiting hidden collectives", " 0.500 ", " 1.25 "))
    assert "75%" not in seen


def test_one_program_is_not_compared() -> None:
    assert "Times as fast" not in str(found(bench_table([result("dense", [1.0])])))


@pytest.mark.parametrize(("waiting", "decodes"), [(0.75, True), (math.nan, True), (0.75, False)])
def test_the_picture_and_the_record_take_what_is_not_there(
    waiting: float, decodes: bool, tmp_path: Path
) -> None:
    results = [result(name, [1.0, 2.0], 1, waiting, decodes) for name in ("dense", "fused")]
    table = bench_table(results)
    assert (NO_VALUE in str(found(table))) == (math.isnan(waiting) or not decodes)
    (path,) = found(table).draw(tmp_path)
    assert imread(path).std() > 0.1
    record = json.loads(json.dumps(bench_record(results), allow_nan=False))
    assert [one["text"] for one in record] == ["A0 F0 A1 F1", "A0 F0 [A1 F1]"]
    first = record[0]["rounds"][0]
    assert first["per_token"] == (1.0 if decodes else None)
    assert first["prefill_pass"]["waiting"] == (None if math.isnan(waiting) else waiting)
    assert (record[0]["batch"], record[0]["prompt"], record[0]["new"]) == (1, 5, 4)


def test_what_compression_changes_is_a_column() -> None:
    results = [result("dense", [1.0]), result("fused", [1.0]), result("upper-bound", [1.0])]
    table = bench_table(results, {"dense": np.array([0.0, 0.02]), "fused": np.array([0.01])})
    low, high = table["divergence_low"], table["divergence_high"]
    assert list(table["divergence"][:2]) == [0.01, 0.01]
    assert (low[0], math.isnan(low[1]), table["divergence"].isna()[2]) == (0.0, True, True)
    lines = str(Benchmark(table, record={"heading": "a title", "compression": "int8"})).splitlines()
    assert lines[-4] == "What int8 changes in predictions, nats per token"
    assert lines[-2].split() == ["dense", "0.01000", "0", "to", f"{high[0]:.4g}"]
    assert lines[-1].split() == ["fused", "0.01000"]
    assert max(map(len, lines)) <= 80
