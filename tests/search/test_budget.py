"""Budgets: what is refused, and with which words."""

from __future__ import annotations

import pytest

from surgeon.search.budget import Budget


@pytest.mark.parametrize(("depth", "pairs"), [(16, 0), (15, 1), (12, 4), (8, 8)])
def test_every_pair_saves_one_layer(depth: int, pairs: int) -> None:
    assert Budget.parse(f"depth={depth}").pairs_needed(16) == pairs


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
    ],
)
def test_refusals_say_the_value_and_what_would_do(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        Budget.parse(text).pairs_needed(16)
    assert said in str(caught.value)
