"""Budgets: what is refused, and with which words."""

from __future__ import annotations

import pytest

from surgeon.search.budget import parse_budget


def price(pairs: int) -> float:
    """Seconds per token: each pair saves one of twenty milliseconds, up to the sixth; more of them cost."""
    return (20 - pairs if pairs <= 6 else 8 + pairs) / 1e3


@pytest.mark.parametrize(("depth", "pairs"), [(16, 0), (15, 1), (12, 4), (8, 8)])
def test_every_pair_saves_one_layer(depth: int, pairs: int) -> None:
    assert parse_budget(f"depth={depth}").pairs_needed(16, price) == pairs


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("latency=17ms@h100-sxm", 3),
        ("latency<=16.5ms@some file.yaml", 4),
        ("speedup=1.25@l4", 4),
        ("speedup>=1.26x @ l4", 5),
    ],
)
def test_the_fewest_pairs_that_are_fast_enough(text: str, pairs: int) -> None:
    assert parse_budget(text).pairs_needed(16, price) == pairs


def test_where_time_is_predicted() -> None:
    assert parse_budget("depth=3").hardware is None
    assert parse_budget("latency<=16.5ms@some file.yaml").hardware == "some file.yaml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dpeth=12", "did you mean 'depth'?"),
        ("depth=0", "at least 1"),
        ("depth=-3", "whole number"),
        ("depth=1.5", "whole number"),
        ("depth", "as in depth=12"),
        ("depth=40", "more than the model's 16 layers"),
        ("depth=7", "16 layers to 8 at the least"),
        ("depth=8@l4", "depth is the same on any hardware; leave @l4 out"),
        ("depth>=8", "no limit to what a search may spend; write depth=8"),
        ("speedup<=2@l4", "write speedup=2"),
        ("latency=12ms", "say on which, as in latency=12ms@h100-sxm"),
        ("latency=12@l4", "'12' is no delay; write e.g. 1ms"),
        ("speedup=fast@l4", "a number above 1"),
        ("speedup=0.9@l4", "a number above 1"),
        ("latency=30ms@l4", "the unedited model is predicted to take 20 ms already"),
        ("latency=10ms@l4", "out of reach: 6 pairs come to 14 ms per token, 1.43 times as fast as the unedited model"),
        ("speedup=1.5@l4", "out of reach: 6 pairs come to 14 ms per token, 1.43 times"),
    ],
)
def test_refusals_say_the_value_and_what_would_do(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        parse_budget(text).pairs_needed(16, price)
    assert said in str(caught.value)
