"""What the table of a search's trials says, against sums by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.image import imread

from surgeon.findings.search import SearchResult
from surgeon.findings.trials import TrialTable

NAN = math.nan


def trials(rows: list[tuple[float, str, float, bool, bool]], by: str = "divergence") -> TrialTable:
    """Of level, edits, measure, and whether whole and within."""
    table = pd.DataFrame(
        [
            {"trial": number, "source": "window", "level": level, "edits": edits, "depth": 5.0, by: value,
             "whole": whole, "within": within, "program": "A0 F0"}
            for number, (level, edits, value, whole, within) in enumerate(rows)
        ]
    )  # fmt: skip
    return TrialTable(table, by)


BUDGET = trials(
    [
        (NAN, "pair 0:2", 0.4, True, True),
        (NAN, "pair 1:3; drop 3:4 mlp", 0.2, True, True),
        (NAN, "pair 1:3", 0.1, True, False),  # breaks the budget
        (NAN, "pair 2:4", 0.15, False, False),  # stopped: an estimate
        (NAN, "pair 1:3; drop 2:3 mlp", 0.3, True, True),
    ]
)
LEVELS = trials(
    [
        (5.0, "pair 0:2", 0.4, True, True),
        (4.0, "pair 0:2; pair 2:4", 8.0, True, True),
        (5.0, "pair 1:3", 0.1, True, True),
        (4.0, "pair 1:3; pair 3:5", 2.0, True, True),
    ]
)


def test_the_best_so_far_is_whole_and_within_the_budget() -> None:
    assert BUDGET.best_so_far.tolist() == [0.4, 0.2, 0.2, 0.2, 0.2]
    assert BUDGET.by_rank == [1, 4, 0]
    assert BUDGET.good == [1]
    assert not BUDGET.has_levels
    assert BUDGET.tip(3) == "trial 3, depth 5, divergence 0.15 (estimate, stopped early): pair 2:4"


def test_levels_are_compared_with_themselves_only() -> None:
    assert LEVELS.relative.tolist() == pytest.approx([4, 4, 1, 1])
    # Unknown until both levels have a trial; then the geometric mean of both.
    assert math.isnan(LEVELS.best_so_far[0])
    assert LEVELS.best_so_far[1:].tolist() == pytest.approx([4, 2, 1])
    assert LEVELS.best_of_levels == [2, 3]
    assert LEVELS.good == [2, 3]


def test_layers_that_good_trials_change() -> None:
    assert BUDGET.spaces() == ["pair", "drop"]
    assert BUDGET.count_touched("drop", 5, BUDGET.good).tolist() == [0, 0, 0, 1, 0]
    assert BUDGET.count_touched("pair", 5, range(5)).tolist() == pytest.approx([0.2, 0.8, 0.8, 0.2, 0])


def test_edits_in_few_words() -> None:
    many = "; ".join(f"drop {k}:{k + 1} mlp" for k in range(8))
    table = trials([(NAN, many, 1.0, True, True), (NAN, "", 2.0, True, True)])
    assert table.short_edits(0) == f"{many.replace('; ', ', ').partition(', drop 6')[0]} and 2 more"
    assert table.short_edits(1) == "no edits"


def test_odd_numbers_are_no_trouble(tmp_path: Path) -> None:
    """Programs that predict nothing, a search in which nothing is within the budget, one trial."""
    for rows in (
        [(NAN, "pair 0:2", math.inf, True, True), (NAN, "pair 1:3", 0.5, True, True)],
        [(NAN, "pair 0:2", 0.5, True, False), (NAN, "", 0.0, True, False)],
        [(NAN, "", 0.5, True, True)],
        [(4.0, "pair 0:2", math.inf, True, True), (5.0, "pair 1:3", 0.5, False, False)],
    ):
        table = trials(rows)
        SearchResult(table.table.assign(depth=5.0, perplexity=9.0), record={"num_layers": 6}).draw(
            tmp_path
        )
        height, width = imread(tmp_path / "search.png").shape[:2]
        assert width > height > 500
        assert len(table.best_so_far) == len(rows)


def test_what_trials_are_ranked_by() -> None:
    def by(record: dict[str, str]) -> str:
        return SearchResult(BUDGET.table, record=record).trial_table.by

    assert by({}) == "divergence"
    assert by({"objective": "latency@cpu-2,perplexity"}) == "perplexity"
    assert by({"objective": "accuracy:piqa"}) == "divergence"
    assert trials([(NAN, "", 3.0, True, True)], "perplexity").values.tolist() == [3.0]
