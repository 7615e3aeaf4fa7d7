"""The map of winners: its lines, its table and its picture."""

from __future__ import annotations

from typing import Any

from surgeon.cost.best import Choice, Extent, choice_table, describe_reaches
from surgeon.findings.prediction import BestPrograms

DENSE: Any = object()  # only whether it is there is asked
FOUND = [
    Choice(2, 1, "fast", DENSE, {"lp": 1.5, "ladder": 1.2}),
    Choice(2, 8, "fast", DENSE, {"lp": 1.0, "ladder": 1.01}),
    Choice(2, 1, "slow", DENSE, {"lp": 1.5, "ladder": 1.9}),
    Choice(2, 8, "slow", None, {}),
]


def test_lines_name_the_winner_and_what_it_wins() -> None:
    text = str(BestPrograms(choice_table(FOUND), record={"heading": "winners"}))
    assert text.splitlines()[4:] == [
        "fast",
        "batch  2 ranks",
        "1      lp 1.50",
        "8        dense",
        "",
        "slow",
        "batch      2 ranks",
        "1      ladder 1.90",
        "8                -",
    ]


def test_ranks_that_a_terminal_has_no_room_for_stand_below() -> None:
    found = [Choice(ranks, 1, "fast", DENSE, {"ladder-over-lp": 1.5}) for ranks in (1, 2, 4, 8, 16)]
    text = str(BestPrograms(choice_table(found), record={"heading": "winners"}))
    cell = "ladder-over-lp 1.50"
    assert text.splitlines()[4:] == [
        "fast",
        f"batch  {'1 rank':>19}  {'2 ranks':>19}",
        f"1      {cell}  {cell}",
        "",
        f"batch  {'4 ranks':>19}  {'8 ranks':>19}  {'16 ranks':>19}",
        f"1      {cell}  {cell}  {cell}",
    ]


def test_lines_say_from_where_on_a_program_stops_paying() -> None:
    found = [Extent("lp", "fast", 2, None, 8, False, 1.5), Extent("ladder", "fast", 2, None, None, False, 1.2)]
    found += [Extent("lp", "fast", 4, None, None, True, 1.0), Extent("ladder", "fast", 4, 2, 8, False, 1.1)]
    assert describe_reaches(found).splitlines() == [
        "fast",
        "batches  2 ranks          4 ranks",
        "lp       below 8            never",
        "ladder    always  from 2, below 8",
    ]


def test_the_table_has_every_programs_speedup() -> None:
    table = choice_table(FOUND)
    assert list(table["winner"]) == ["lp", "dense", "ladder", ""]
    assert list(table["ladder_speedup"][:3]) == [1.2, 1.01, 1.9]
    assert table["speedup"].isna().to_list() == [False, False, False, True]
