"""How long texts are expected to become: an average over those that have ended, and never more than they may."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgeon.runtime.batching.request import Expectation, Request, Sampling, Sequence


def text(prompt: int, limit: int, added: int = 0) -> Sequence:
    """One whose prompt has so many tokens, to which so many of those that it may add have been added."""
    sequence = Sequence.of(Request(0, (7,) * prompt, Sampling(max_new_tokens=limit)))
    sequence.tokens += [5] * added
    return sequence


@given(
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40), st.floats(0, 1)), max_size=30),
)
def test_the_newest_text_counts_an_eighth(share: float, texts: list[tuple[int, int, float]]) -> None:
    expected = Expectation(share)
    weighted = share * (7 / 8) ** len(texts)
    for age, (_, limit, part) in enumerate(reversed(texts)):
        weighted += round(part * limit) / limit * (7 / 8) ** age / 8
    for prompt, limit, part in texts:
        expected.note_end(text(prompt, limit, round(part * limit)))
    assert expected.share == pytest.approx(weighted, abs=1e-12)


def test_texts_that_add_nothing_tell_nothing() -> None:
    expected = Expectation(0.25)
    expected.note_end(text(3, 0))
    assert expected.share == 0.25


def test_after_a_failure_half_of_what_was_left_out_is_expected_again() -> None:
    expected = Expectation(0.5)
    shares = []
    for _ in range(3):
        expected.note_failure()
        shares.append(expected.share)
    assert shares == [0.75, 0.875, 0.9375]


@pytest.mark.parametrize(
    ("share", "limit", "length"),
    [(0.0, 10, 4), (0.5, 10, 9), (0.41, 10, 9), (0.95, 10, 13), (1.0, 10, 13), (0.5, 1, 4)],
)
def test_the_last_token_of_a_text_is_never_in_the_cache(share: float, limit: int, length: int) -> None:
    """Parts of a token count as one."""
    assert Expectation(share).length(text(4, limit)) == length


@given(st.floats(0, 1), st.integers(1, 9), st.integers(0, 40), st.integers(0, 40))
def test_what_a_text_has_added_changes_nothing(
    share: float, prompt: int, limit: int, added: int
) -> None:
    expected = Expectation(share)
    assert expected.length(text(prompt, limit, min(added, limit))) == expected.length(
        text(prompt, limit)
    )
