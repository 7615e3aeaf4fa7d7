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
from surgeon.training.racks.run import read_texts, write_texts
from surgeon.training.run import train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts, load_texts, with_chat_template
from surgeon.training.token_store import IGNORED, TextSource
from tests.quality.test_conversations import CHATML, MARKED, Found, reader, tokenizer, written
from tests.tiny_models import TEXT, tiny_model

WINDOW = 90
WORDS = TEXT.split()


def said(number: int) -> list[dict[str, str]]:
    """A conversation of one or two turns, another for each number."""
    turns = [("user", WORDS[number % 5 :][:3]), ("assistant", WORDS[number:][:4])] * (1 + number % 2)
    return [{"role": role, "content": " ".join([*words, str(number)])} for role, words in turns]


ROWS = [{"messages": said(number)} for number in range(9)] + [{"messages": said(0)[:1]}]


def tokens(rows: list[dict[str, Any]], window: int = WINDOW) -> list[Found]:
    return [reader(longest=window)(row, "") for row in rows]


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
    found = load_texts(tokenizer(), data, WINDOW, 1 << 20, held_out_tokens=2 * WINDOW)
    expected = [(each.ids, each.answers) for each in tokens(ROWS[:9])]
    held_out = []
    for ids, answers in zip(found.held_out.ids, found.held_out.answers, strict=True):
        (same,) = (each for each in expected if each[0] == ids[: len(each[0])].tolist())
        assert answers.int().tolist() == same[1] + [0] * (len(ids) - len(same[1]))
        held_out.append(same)
    assert found.behind == 2
    rows = found.training.rows.with_format("torch")
    there = []
    for row in rows:
        places = row["position_ids"].tolist()
        starts = [place for place, position in enumerate(places) if position == 0] + [WINDOW]
        for start, end in pairwise(starts):
            ids, labels = row["input_ids"][start:end].tolist(), row["labels"][start:end]
            there.append((ids, (labels != IGNORED).int().tolist()))
    trained = [each for each in expected if each not in held_out]
    assert all(each in there for each in trained)
    # The rest is padding.
    assert sum(sum(marks) for _, marks in there) == sum(sum(marks) for _, marks in trained)
    assert len(rows) < len(trained)
    assert found.notes == (f"{data}: left out 1 row without an answer (of 10 rows read)",)
    assert found.record()["data_left_out"] == {"rows_without_answer": 1}
    answers = found.held_out.predicted_tokens
    assert (
        f"measured on {answers} predicted tokens of {data} (held out: 2 windows behind them)"
        in found.line()
    )
    few = load_texts(tokenizer(), data, WINDOW, 60, held_out_tokens=10)
    assert few.training.digest != found.training.digest
    assert len(few.training) == 1


def test_loose_windows_of_conversations_take_nothing_from_training(tmp_path: Path) -> None:
    """Windows that conversations do not fill are held out as windows; by default a tenth of them."""
    rows = [{"messages": said(number % 9)[:2]} for number in range(60)]
    window = max(len(each.ids) for each in tokens(rows)) * 5 // 4  # one conversation in each
    data = written(tmp_path, rows, "loose.jsonl")
    found = load_texts(tokenizer(), data, window, 16 * window, held_out_tokens=24 * window)
    assert (len(found.training), found.behind, len(found.held_out.ids)) == (16, 24, 24)
    assert found.held_out.predicted_tokens == sum(sum(each.answers) for each in tokens(rows)[16:40])
    default = load_texts(tokenizer(), data, window, 1 << 20)
    assert (len(default.training), default.behind) == (54, 6)
    assert default.held_out.predicted_tokens == sum(sum(each.answers) for each in tokens(rows)[54:])


def test_a_run_trains_on_answers_and_is_judged_by_answers(tmp_path: Path) -> None:
    other = written(tmp_path, ROWS[6:9], "other.jsonl")
    texts = load_texts(tokenizer(), written(tmp_path, ROWS[:6]), WINDOW, 1 << 20, other)
    model, original = (
        tiny_model("llama", 2, vocab_size=len(tokenizer()), attention_dropout=0.0).eval()
        for _ in range(2)
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
    trained, held_out = nll(original, ROWS[:6]), nll(original, ROWS[6:9])
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
    with pytest.raises(
        ValueError,
        match=r"1 of the conversations of the held-out text .*shared.jsonl are in the training text .*, too",
    ):
        load_texts(
            tokenizer(), data, WINDOW, 1 << 20, written(tmp_path, ROWS[4:6], "shared.jsonl"), 1 << 20
        )


def test_what_does_not_go_with_conversations_is_refused(tmp_path: Path) -> None:
    data, text = written(tmp_path, ROWS), tmp_path / "text.txt"
    text.write_text(TEXT * 30)
    with pytest.raises(
        ValueError, match="holds conversations, which are apart as they are; leave the separator out"
    ):
        load_texts(tokenizer(), data, WINDOW, 100, separator="\n")
    with pytest.raises(ValueError, match=r"holds conversations, and .*text.txt does not"):
        load_texts(tokenizer(), data, WINDOW, 100, str(text), 100)
    with pytest.raises(ValueError, match=r"chat.jsonl holds conversations, and .*text.txt does not"):
        load_texts(tokenizer(), str(text), WINDOW, 100, data, 100)
    with pytest.raises(
        ValueError,
        match="7 windows of 90 tokens, and 11650 of the last ones are .* nothing is left to train on",
    ):
        load_texts(tokenizer(), data, WINDOW, 1 << 20, held_out_tokens=1 << 20)
    assert load_texts(
        tokenizer(), str(text), 16, 100, held_out_tokens=32
    ).training.rows.column_names == ["input_ids"]


def test_a_template_of_a_file_takes_the_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    own = tokenizer(None)
    (tmp_path / "chat.jinja").write_text(CHATML)
    assert with_chat_template(own, tmp_path / "chat.jinja").chat_template == CHATML
    assert own.chat_template is None
    assert with_chat_template(own, None) is own
    with pytest.raises(FileNotFoundError):
        with_chat_template(own, tmp_path / "none.jinja")


def test_conversations_are_tokenized_once(tmp_path: Path) -> None:
    """As far as they are needed; once all are there nothing is tokenized, unless the template is another one."""
    data = written(tmp_path, ROWS)

    def source(template: str | None = CHATML) -> TextSource:
        found = TextSource(tokenizer(template), data, WINDOW, "whole", chats=True)
        found.folder = tmp_path
        return found

    few, _ = source().windows(2)
    whole, known = source().windows(1 << 20)
    assert (len(few), known["ended"], known["left_out"]) == (2, True, {"rows_without_answer": 1})
    assert whole[:2] == few[:]
    full = source()
    full.tokens = pytest.fail
    assert full.windows(1 << 20)[0][:] == whole[:]
    assert source(MARKED).identity() != full.identity()


def test_several_texts_of_conversations_are_mixed_by_weight(tmp_path: Path) -> None:
    one, two = written(tmp_path, ROWS[:5]), written(tmp_path, ROWS[5:9], "two.jsonl")
    found = load_texts(tokenizer(), {one: 0.5, two: 0.5}, WINDOW, 1 << 20, held_out_tokens=60)
    assert [weight for _, weight in found.training.parts] == [0.5, 0.5]
    assert sum(windows for windows, _ in found.training.parts) == len(found.training)
    held_out = [
        ids[: int(marks.nonzero().max()) + 1].tolist()
        for ids, marks in zip(*_measured(found), strict=True)
    ]
    for rows in (ROWS[:5], ROWS[5:9]):
        assert any(each.ids in held_out for each in tokens(rows))


def _measured(found: TrainTexts) -> tuple[torch.Tensor, torch.Tensor]:
    assert found.held_out.answers is not None
    return found.held_out.ids, found.held_out.answers
