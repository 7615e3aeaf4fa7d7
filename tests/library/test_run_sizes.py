"""How much is explored in which time: the arithmetic, without a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from surgeon.analysis.engine.sharing import share
from surgeon.analysis.pace import RunPace
from surgeon.language.program import Program
from surgeon.library.run_sizes import (
    SEARCH,
    SEARCH_LAYER,
    SIMILARITY,
    TOKENS,
    RunSizes,
    cells,
    choose_sizes,
    coarse,
    finer,
    require_text,
)

DENSE = Program.dense(8)
PLAN = share([DENSE, Program(DENSE.nodes[:-2]), Program(DENSE.nodes[2:])])  # 16 sublayers, none more, 14 more
FEW = share([DENSE])
PACE = RunPace(sublayer=1e-3, program=2e-3, own=18e-3)  # of one token


def chosen(seconds: float, **other: Any) -> RunSizes:
    given: dict[str, Any] = {"window": 512, "text": 1 << 20, "beside": 20.0, "name": "tiny", "layers": 8} | other
    return choose_sizes(given.pop("pace", PACE), {2: PLAN, 4: FEW}, seconds=seconds, **given)


def needed(tokens: int, sublayers: int = 16 + 0 + 14, programs: int = 3) -> float:
    scan = tokens * (sublayers * 1e-3 + programs * 2e-3)
    runs = tokens * 18e-3 * (SIMILARITY + SEARCH + SEARCH_LAYER * 8)
    return (scan + runs + 20.0) / 0.85


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_most_text_that_fits_into_the_time(tokens: int) -> None:
    assert chosen(needed(tokens) + 1).tokens == tokens
    if tokens != TOKENS[-1]:
        assert chosen(needed(tokens) - 1).tokens == tokens // 2


def test_windows_are_many_and_no_longer_than_the_model_takes() -> None:
    assert chosen(1e9) == RunSizes(8192, 512, 2)
    assert chosen(1e9, window=128) == RunSizes(8192, 128, 2)
    assert chosen(needed(1024) + 1) == RunSizes(1024, 64, 2)


def test_where_time_is_short_stretches_are_fewer() -> None:
    least = needed(1024, 16, 1)
    assert least < needed(1024)
    assert chosen(needed(1024) - 1) == chosen(least + 1) == RunSizes(1024, 64, 4)
    with pytest.raises(ValueError, match="too few"):
        chosen(least - 1)


def test_as_much_text_is_left_to_be_held_out() -> None:
    assert chosen(1e9, text=2 * 4096 + 1).tokens == 4096
    require_text("a.txt", 2048)
    with pytest.raises(ValueError, match=r"a.txt has 2,047 tokens, and exploring takes 2,048 at least"):
        require_text("a.txt", 2047)


def test_too_little_time_is_said_with_what_would_do() -> None:
    least = needed(1024, 16, 1) / 60
    with pytest.raises(
        ValueError, match=r"10 minutes are too few here: one run of tiny over 1,024 tokens takes 18.4 s"
    ) as told:
        chosen(600)
    minutes = float(str(told.value).partition("; give ")[2].partition(" ")[0])
    assert least <= minutes <= least + 0.1
    assert chosen(60 * minutes).tokens == 1024
    assert chosen(600, pace=replace(PACE, sublayer=1e-4, program=2e-4, own=18e-4)).tokens > 1024


@pytest.mark.parametrize(
    ("layers", "grids"), [(1, [1, 1]), (5, [1, 1]), (11, [1, 2]), (12, [2, 4]), (32, [4, 8]), (80, [8, 16])]
)
def test_the_first_grid(layers: int, grids: list[int]) -> None:
    assert coarse(layers) == grids


def test_finer_grids_hold_the_stretches_of_coarse_ones() -> None:
    maps = ("prune", "lp")
    assert [cells(maps, 16, every) for every in (1, 2, 4)] == [2 * 136, 2 * 36, 2 * 10]
    more = 2 * (136 - 36)
    assert finer(maps, 16, 2, 0.5, more * 0.5) == 1
    assert finer(maps, 16, 2, 0.5, more * 0.5 - 0.1) == 2
    assert finer(maps, 16, 4, 0.5, 2 * (36 - 10) * 0.5) == 2
    assert finer(maps, 16, 4, 0.5, -3.0) == 4
