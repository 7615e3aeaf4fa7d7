"""What was measured of programs on ranks, as one table for a file, and as JSON holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median

import pandas as pd

from surgeon.benchmarks.measure import Measurement, Result, Split
from surgeon.findings.bench import COLUMNS, RATIOS
from surgeon.language.program import Program
from surgeon.processes.files import finite
from surgeon.quality.summary import Values, known_interval, mean_divergence

MS = 1e3
_TIMES = (
    lambda one: one.first_token * MS,
    lambda one: one.prefill * MS,
    lambda one: one.decode * MS,
    lambda one: one.per_token * MS,
    lambda one: one.rate,
)
_RATIOS: tuple[Callable[[Measurement, Measurement], float], ...] = (
    lambda base, own: base.first_token / own.first_token,
    lambda base, own: base.per_token / own.per_token,
    lambda base, own: own.rate / base.rate,
)


def bench_table(results: Sequence[Result], divergence: Mapping[str, Values] | None = None) -> pd.DataFrame:
    """One row per program and batch: medians over the rounds, of ratios too (each against the first, of its round).

    Args:
        divergence: of compressed reductions by window, of the programs that send some.
    """
    first = {result.load: result for result in reversed(results)}
    rows = [_row(result, first[result.load]) for result in results]
    for row in rows if divergence else ():
        if (values := (divergence or {}).get(str(row["program"]))) is not None:
            low, high = known_interval(values, 0.0)
            row |= {"divergence": mean_divergence(values), "divergence_low": low, "divergence_high": high}
    return pd.DataFrame(rows)


def _row(result: Result, first: Result) -> dict[str, object]:
    plan = result.plan
    program = Program.parse(plan.program)
    row: dict[str, object] = {
        "program": result.name,
        "batch": result.load.batch,
        "effective_depth": program.effective_depth(plan.family.steps_per_layer),
        "sync_points": program.sync_points(plan.ranks) if result.connected else 0,
    }
    row |= {name: median(map(value, result.rounds)) for name, value in zip(COLUMNS, _TIMES, strict=True)}
    row |= _split_columns("prefill", [one.prefill_pass for one in result.rounds])
    row |= _split_columns("decode", [one.decode_pass for one in result.rounds if one.decode_pass is not None])
    pairs = list(zip(first.rounds, result.rounds, strict=True))
    for name, ratio in zip(RATIOS, _RATIOS, strict=True):
        ratios = [ratio(*pair) for pair in pairs]
        row |= {name: median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
    return row


def _split_columns(phase: str, splits: Sequence[Split]) -> dict[str, object]:
    """Medians of one pass of a phase; what it sends is the same in every round."""
    if not splits:
        return {}
    last = splits[-1]
    return {
        f"{phase}_compute_ms": median(split.compute for split in splits) * MS,
        f"{phase}_waiting_ms": median(split.waiting for split in splits) * MS,
        f"{phase}_all_reduces": last.layers.all_reduces,
        f"{phase}_all_gathers": last.layers.all_gathers,
        f"{phase}_bytes": last.layers.bytes,
        f"{phase}_vocabulary_collectives": last.vocabulary.all_reduces + last.vocabulary.all_gathers,
        f"{phase}_vocabulary_bytes": last.vocabulary.bytes,
    }


def bench_record(results: Sequence[Result]) -> list[dict[str, object]]:
    """Every round of every program and batch, as JSON holds it: seconds, tokens per second, counts."""
    return [
        {
            "program": result.name,
            "text": result.plan.program,
            "checkpoint": str(result.plan.folder),
            "dtype": result.plan.dtype,
            "connected": result.connected,
            **asdict(result.load),
            "rounds": [finite(asdict(one)) for one in result.rounds],
        }
        for result in results
    ]
