"""Training text and held-out text, and the order of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surgeon.quality.data import Windows, digest_of
from surgeon.training.texts import RunOrder, TrainingText, TrainingWindows, load_train_texts
from tests.tiny_models import tiny_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(str(number) for number in range(400)))
    return str(path)


def test_the_end_is_held_out(text: str) -> None:
    found = load_train_texts(tiny_tokenizer(), text, 8, 1 << 20, held_out_tokens=30)
    whole = load_train_texts(tiny_tokenizer(), text, 8, 1 << 20, held_out_tokens=8)
    assert len(found.held_out.ids) == 3
    joined = torch.cat([found.training.ids, found.held_out.ids])
    assert torch.equal(joined, torch.cat([whole.training.ids, whole.held_out.ids]))
    assert found.training.digest != whole.training.digest
    assert found.notes == ()
    few = load_train_texts(tiny_tokenizer(), text, 8, 40, held_out_tokens=30)
    assert torch.equal(few.training.ids, found.training.ids[:5])
    assert torch.equal(few.held_out.ids, found.training.ids[5:8])


def test_too_little_text(text: str) -> None:
    with pytest.raises(ValueError, match="nothing is left to train on; give more text"):
        load_train_texts(tiny_tokenizer(), text, 8, 1 << 20, held_out_tokens=1 << 20)


def test_nobody_is_judged_by_what_was_trained_on(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in the training text .*, too"):
        load_train_texts(tiny_tokenizer(), text, 8, 1 << 20, text, 16)
    other = tmp_path / "other.txt"
    other.write_text(" ".join(str(number) for number in range(5000, 5100)))
    found = load_train_texts(tiny_tokenizer(), text, 8, 1 << 20, str(other), 16)
    assert found.held_out.ids.shape == (2, 8)


def test_every_epoch_has_an_order_of_its_own() -> None:
    order = list(RunOrder(10, 6, 4, seed=3))
    assert len(order) == 24
    first, second = order[:10], order[10:20]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert order == list(RunOrder(10, 6, 4, seed=3)) != list(RunOrder(10, 6, 4, seed=4))
    assert list(RunOrder(10, 3, 4, seed=3)) == order[:12]


def test_windows_say_which_they_are() -> None:
    ids = torch.arange(12).view(3, 4)
    order = RunOrder(3, 2, 3, seed=0)
    text = TrainingText.of(Windows(ids, "numbers", digest_of(ids)))
    items = list(map(TrainingWindows(text, order).__getitem__, range(6)))
    assert [int(item["place"]) for item in items] == list(range(6))
    assert [int(item["index"]) for item in items] == list(order)
    for item in items:
        assert torch.equal(item["input_ids"], ids[item["index"]])
        assert torch.equal(item["labels"], item["input_ids"])
