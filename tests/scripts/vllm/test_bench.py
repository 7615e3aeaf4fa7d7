"""scripts/vllm/bench.py: the programs it compares, and its ratios, from rates made by hand."""

from __future__ import annotations

from pathlib import Path

from scripts.vllm import bench


def test_the_programs_compared() -> None:
    found = [(name, form, program.sync_points(2)) for name, form, program in bench.programs(8)]
    assert found == [
        ("dense", "plugin", 16),
        ("LP to 6 layers", "fused", 12),
        ("LP to 6 layers", "plugin", 12),
        ("attention \\|\\| MLP", "plugin", 8),
        ("ladder", "plugin", 16),
        ("ladder over LP", "plugin", 12),
        ("tracks, D = 4", "plugin", 2),
    ]


def test_ratios_are_medians_of_the_rounds_ratios() -> None:
    rows = [
        bench.Row("dense", "native", Path()),
        bench.Row("dense", "plugin", Path()),
        bench.Row("ladder", "plugin", Path()),
    ]
    rates = [(10.0, 5.0, 10.0), (20.0, 20.0, 60.0), (40.0, 10.0, 30.0)]  # by round
    lines = bench.table(rows, [[{1: rate, 8: 8 * rate} for rate in found] for found in rates], [1, 8])
    assert lines[2:5] == [
        "| 1 | dense | native | 20.0 | 1.00 | 2.00 |",
        "| 1 | dense | plugin | 10.0 | 0.50 | 1.00 |",
        "| 1 | ladder | plugin | 30.0 | 1.00 | 3.00 |",
    ]
    assert lines[7] == "| 8 | ladder | plugin | 240.0 | 1.00 | 3.00 |"
