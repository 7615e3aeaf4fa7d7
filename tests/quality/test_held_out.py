"""Held-out text: what follows the searched tokens, and what is no held-out text."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from surgeon.quality.data import held_out, load_windows, tokens_before_rest
from surgeon.quality.sources import DEMO
from tests.tiny_models import TEXT, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.txt"
    path.write_text(TEXT * 20, encoding="utf-8")
    return str(path)


def test_it_is_what_follows(tokenizer: Any, data: str) -> None:
    searched = load_windows(tokenizer, data, window=16, tokens=64)
    every = tokenizer(TEXT * 20)["input_ids"]
    assert held_out(tokenizer, searched).ids.flatten().tolist() == every[64:128]
    assert held_out(tokenizer, searched, 32).ids.flatten().tolist() == every[64:96]
    assert held_out(tokenizer, searched).digest != searched.digest


def test_documents_follow_as_they_would_have(tokenizer: Any) -> None:
    searched = load_windows(tokenizer, DEMO, window=8, tokens=64)
    longer = load_windows(tokenizer, DEMO, window=8, tokens=128)
    assert held_out(tokenizer, searched).ids.tolist() == longer.ids[8:].tolist()


def test_fewer_are_used_and_told(tokenizer: Any, data: str) -> None:
    every = len(tokenizer(TEXT * 20)["input_ids"])
    searched = load_windows(tokenizer, data, window=16, tokens=every - 50)
    found = held_out(tokenizer, searched)
    assert len(found.ids) == (every - searched.ids.numel()) // 16
    assert "tokens in whole windows behind the first" in found.notes[0]


def test_other_text(tokenizer: Any, data: str, tmp_path: Path) -> None:
    searched = load_windows(tokenizer, data, window=16, tokens=64)
    other = tmp_path / "other.txt"
    other.write_text("lazy " + TEXT * 20, encoding="utf-8")
    found = held_out(tokenizer, searched, other=str(other))
    assert found.ids.tolist() == load_windows(tokenizer, str(other), window=16, tokens=64).ids.tolist()


def test_what_is_no_held_out_text(tokenizer: Any, data: str) -> None:
    searched = load_windows(tokenizer, data, window=16, tokens=64)
    with pytest.raises(ValueError, match="4 of the 4 windows of .* are among those that the search saw"):
        held_out(tokenizer, searched, other=data)
    with pytest.raises(
        ValueError, match=r"16 tokens is less than 2 windows of 16.* hold out 32 or more"
    ):
        held_out(tokenizer, searched, 16)
    everything = load_windows(tokenizer, data, window=16, tokens=1 << 16)
    with pytest.raises(ValueError, match=r"nothing is left to hold out: .* search on fewer tokens"):
        held_out(tokenizer, everything)
    nearly = load_windows(tokenizer, data, window=16, tokens=everything.ids.numel() - 16)
    with pytest.raises(
        ValueError, match="only 1 window of 16 tokens to hold out, and an interval needs 2"
    ):
        held_out(tokenizer, nearly)


def test_by_default_a_tenth_of_a_short_text_is_left(tokenizer: Any, data: str) -> None:
    every = len(tokenizer(TEXT * 20)["input_ids"]) // 16
    with pytest.warns(
        UserWarning, match=rf"first {(every - every // 10) * 16:,} are used of the 65,536 asked for, and"
    ):
        used = tokens_before_rest(tokenizer, data, 16, 1 << 16)
    assert used == (every - every // 10) * 16
    searched = load_windows(tokenizer, data, 16, used)
    assert len(held_out(tokenizer, searched).ids) == every // 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens_before_rest(tokenizer, data, 16, used) == used  # as workers of a search ask again
        assert tokens_before_rest(tokenizer, data, 16, 64 + 5) == 64 + 5
        # Nothing is left, which is refused.
        assert tokens_before_rest(tokenizer, data, every * 16, 1 << 16) == 1 << 16
    with pytest.warns(UserWarning, match="held out"):
        assert tokens_before_rest(tokenizer, data, every * 16 // 4, 1 << 16, least=2) == 2 * (
            every * 16 // 4
        )
