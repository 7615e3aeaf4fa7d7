"""Conversations that are trained on and measured on, against plain computations of each by itself."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.nn import functional

from surgeon.models.edit import edit
from surgeon.quality.conversations import ConversationTokenizer, ConversationTokens
from surgeon.training.conversations import in_template, load_texts
from surgeon.training.packing import IGNORED
from surgeon.training.racks.run_files import read_texts, write_texts
from surgeon.training.run import train
from surgeon.training.settings import TrainSettings
from tests.quality.test_conversations import CHATML, tokenizer, written
from tests.tiny_models import TEXT, tiny_model

WINDOW = 90
WORDS = TEXT.split()


def said(number: int) -> list[dict[str, str]]:
    """A conversation of one or two turns, another for each number."""
    turns = [("user", WORDS[number % 5 :][:3]), ("assistant", WORDS[number:][:4])] * (1 + number % 2)
    return [{"role": role, "content": " ".join([*words, str(number)])} for role, words in turns]


ROWS = [{"messages": said(number)} for number in range(9)] + [{"messages": said(0)[:1]}]


def tokens(rows: list[dict[str, Any]], window: int = WINDOW) -> list[ConversationTokens]:
    convert = ConversationTokenizer(tokenizer(), ("messages",), window)
    return [convert(row, "") for row in rows]


def nll(model: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    """Of each token of the answers of rows, of which each is read by itself."""
    each = []
    for found in tokens(rows):
        ids = torch.tensor([found.ids])
        with torch.no_grad():
            values = functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        each.append(values[torch.tensor(found.answers[1:]).bool()])
    return torch.cat(each)


def test_conversations_stand_whole_in_windows_and_the_last_are_held_out(tmp_path: Path) -> None:
    data = written(tmp_path, ROWS)
    found = load_texts(tokenizer(), data, WINDOW, 1 << 20, held_out_tokens=100)
    expected = tokens(ROWS[:9])
    measured = len(found.held_out.ids)
    assert sum(len(each.ids) for each in expected[-measured:]) >= 100
    assert sum(len(each.ids) for each in expected[1 - measured :]) < 100
    for ids, answers, wanted in zip(found.held_out.ids, found.held_out.answers, expected[-measured:], strict=True):
        length = len(wanted.ids)
        assert (ids[:length].tolist(), answers[:length].int().tolist()) == (wanted.ids, wanted.answers)
        assert not answers[length:].any()
    rows = found.training.rows.with_format("torch")
    there = []
    for row in rows:
        places = row["position_ids"].tolist()
        starts = [place for place, position in enumerate(places) if position == 0] + [WINDOW]
        for start, end in pairwise(starts):
            ids, labels = row["input_ids"][start:end].tolist(), row["labels"][start:end]
            there.append((ids, (labels != IGNORED).int().tolist()))
    trained = [(each.ids, each.answers) for each in expected[:-measured]]
    assert all(each in there for each in trained)
    assert sum(sum(marks) for _, marks in there) == sum(sum(marks) for _, marks in trained)  # the rest is padding
    assert len(rows) < len(trained)
    assert found.notes == (f"{data}: left out 1 row without an answer (of 10 rows read)",)
    assert found.record()["data_left_out"] == {"rows_without_answer": 1}
    answers = found.held_out.predicted
    assert f"measured on {answers} tokens of answers of {data}, in windows of {WINDOW}" in found.line()
    few = load_texts(tokenizer(), data, WINDOW, 60, held_out_tokens=10)
    assert few.training.digest != found.training.digest
    assert len(few.training) == 1


def test_a_run_trains_on_answers_and_is_judged_by_answers(tmp_path: Path) -> None:
    texts = load_texts(tokenizer(), written(tmp_path, ROWS), WINDOW, 1 << 20, held_out_tokens=100)
    measured = len(texts.held_out.ids)
    model, original = (
        tiny_model("llama", 2, vocab_size=len(tokenizer()), attention_dropout=0.0).eval() for _ in range(2)
    )
    settings = TrainSettings(
        scope="all",
        steps=1,
        batch=len(texts.training),
        micro_batch=1,
        learning_rate=1e-9,
        arguments={"logging_steps": 1},
    )
    found = train(edit(model, "A0 F0 A1 F1"), texts, settings, tmp_path / "run")
    assert found is not None
    trained, held_out = nll(original, ROWS[: 9 - measured]), nll(original, ROWS[9 - measured : 9])
    table = pd.read_csv(tmp_path / "run" / "training.csv")
    assert table["loss"].tolist() == pytest.approx([float(trained.mean())], rel=1e-4)
    assert found.before.perplexity == pytest.approx(float(held_out.mean().exp()), rel=1e-5)
    assert found.before.tokens == len(held_out)


def test_held_out_conversations_are_others_and_go_with_racks(tmp_path: Path) -> None:
    data, other = written(tmp_path, ROWS[:5]), written(tmp_path, ROWS[5:8], "other.jsonl")
    found = load_texts(tokenizer(), data, WINDOW, 1 << 20, other, 1 << 20)
    assert len(found.held_out.ids) == 3
    write_texts(tmp_path, found)
    again = read_texts(tmp_path)
    assert torch.equal(again.held_out.answers, found.held_out.answers)
    assert again.training.rows[:] == found.training.rows[:]
    with pytest.raises(ValueError, match=r"1 of the conversations of the held-out text .* in the training text"):
        load_texts(tokenizer(), data, WINDOW, 1 << 20, written(tmp_path, ROWS[4:6], "shared.jsonl"), 1 << 20)


def test_what_does_not_go_with_conversations_is_refused(tmp_path: Path) -> None:
    data, text = written(tmp_path, ROWS), tmp_path / "text.txt"
    text.write_text(TEXT * 30)
    with pytest.raises(ValueError, match="holds conversations, which are apart as they are; leave the separator out"):
        load_texts(tokenizer(), data, WINDOW, 100, separator="\n")
    with pytest.raises(ValueError, match=r"holds conversations, and .*text.txt does not"):
        load_texts(tokenizer(), data, WINDOW, 100, str(text), 100)
    with pytest.raises(ValueError, match="9 conversations, and the last .* nothing is left to train on"):
        load_texts(tokenizer(), data, WINDOW, 1 << 20, held_out_tokens=1 << 20)
    assert load_texts(tokenizer(), str(text), 16, 100, held_out_tokens=32).training.rows.column_names == ["input_ids"]


def test_a_template_of_a_file_takes_the_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    own = tokenizer(None)
    (tmp_path / "chat.jinja").write_text(CHATML)
    assert in_template(own, tmp_path / "chat.jinja").chat_template == CHATML
    assert own.chat_template is None
    assert in_template(own, None) is own
    with pytest.raises(FileNotFoundError):
        in_template(own, tmp_path / "none.jinja")
