"""Numbers, changes and layers in words."""

from __future__ import annotations

import math

import pytest

from surgeon.words import (
    TIMES,
    WIDTH,
    align_columns,
    change,
    interval,
    join_words,
    layer_list,
    number,
    plural,
    stretch,
    tick,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (6.330089, "6.330"),
        (0.00468912, "0.004689"),
        (9.99996, "10.00"),
        (12345.6, "12,350"),
        (1234567.0, "1,235,000"),
        (-0.25, "\N{MINUS SIGN}0.2500"),
        (0.0, "0"),
        (math.inf, "∞"),
        (math.nan, "\N{EN DASH}"),
        (3.14159e9, "3.14 \N{MULTIPLICATION SIGN} 10⁹"),
        (2.5e-7, "2.50 \N{MULTIPLICATION SIGN} 10⁻⁷"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.0, "±0%"),
        (1.00001, "±0%"),
        (1.0033, "+0.33%"),
        (1.0239, "+2.4%"),
        (1.0996, "+10%"),
        (1.25, "+25%"),
        (0.995, "\N{MINUS SIGN}0.50%"),
        (1.996, "+100%"),
        (2.0, "2.0 times"),
        (607.8, "610 times"),
        (math.inf, "∞ times"),
        (math.nan, "\N{EN DASH}"),
    ],
)
def test_changes(ratio: float, text: str) -> None:
    assert change(ratio) == text


def test_layers() -> None:
    assert layer_list([5, 0, 1, 7, 6, 5]) == "0, 1 and 5 to 7"
    assert layer_list([3]) == "3"
    assert layer_list([]) == ""
    assert stretch(4, 4) == "layer 4"
    assert stretch(4, 9) == "layers 4 to 9"


def test_lists_counts_and_intervals() -> None:
    assert join_words(["a", "b", "c"], "or") == "a, b or c"
    assert (plural(1, "token"), plural(2048, "token")) == ("1 token", "2,048 tokens")
    assert interval(1.0, 2.5) == "1.000 to 2.500"
    assert interval(None, 2.5) == interval(1.0, math.nan) == ""
    assert (tick(0.5), tick(20.0), tick(1000.0)) == ("0.5", "20", "1,000")
    assert [tick(value, 4) for value in (8.02e-5, 8.025e-5, 5e-5)] == [
        f"{mantissa} {TIMES} 10⁻⁵" for mantissa in ("8.02", "8.025", "5")
    ]


def test_columns_move_together_where_two_spaces_are_too_many() -> None:
    """Rows of 79 columns with two spaces between cells, of 87, which one space makes 79 again."""
    for width, gap in ((79, "  "), (87, " ")):
        lines = [["program", *["1"] * 8], ["x" * (width - 8 - 2 * 8), *["2"] * 8]]
        first, second = align_columns(lines).splitlines()
        assert len(first) == len(second) == 79 < WIDTH
        assert second.endswith(gap.join(["x", *["2"] * 8]))
