"""The pair space: the dynamic programme against trying everything."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgeon.program import Program
from surgeon.recipe import parse_recipe
from surgeon.search.space import as_operation, as_scores, best_pairs, contiguous_windows, pairs_program


def all_choices(num_layers: int, count: int) -> list[tuple[int, ...]]:
    every = combinations(range(num_layers - 1), count)
    return [choice for choice in every if all(b - a >= 2 for a, b in pairwise(choice))]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9), st.integers(0, 5))
def test_best_pairs_equal_an_exhaustive_search(scores: list[float], count: int) -> None:
    choices = all_choices(len(scores) + 1, count)
    if not choices:
        with pytest.raises(ValueError, match="do not fit"):
            best_pairs(scores, count)
        return
    found = best_pairs(scores, count)
    assert found in choices
    best = max(sum(scores[k] for k in choice) for choice in choices)
    assert sum(scores[k] for k in found) == pytest.approx(best, abs=1e-9)


@given(st.integers(2, 14), st.data())
def test_a_choice_of_pairs_is_a_point_of_the_space(num_layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, num_layers // 2))
    pairs = data.draw(st.sampled_from(all_choices(num_layers, count)))
    assert best_pairs(as_scores(pairs, num_layers), count) == pairs


@given(st.integers(2, 14), st.data())
def test_the_recipe_of_a_choice_gives_its_program(num_layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, num_layers // 2))
    pairs = data.draw(st.sampled_from(all_choices(num_layers, count)))
    text = f"surgeon: 1\nmodel: demo\noperations:\n  - {as_operation(pairs).to_yaml()}\n"
    program = parse_recipe(text).program(num_layers)
    assert program == pairs_program(pairs, num_layers)
    assert program.effective_depth() == num_layers - count


def test_windows_are_contiguous_and_start_near_the_end() -> None:
    windows = contiguous_windows(32, 7)
    assert len(set(windows)) == 32 - 14 + 1
    assert windows[0][-1] + 1 == 28  # the paper's best end index for Llama 2 7B
    assert as_operation(windows[0]).to_yaml() == 'pair: {layers: "15:29"}'
    assert pairs_program((), 3) == Program.dense(3)
