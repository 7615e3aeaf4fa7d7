"""What is said of what is learned of a text."""

from __future__ import annotations

from pathlib import Path

from surgeon.training.model import learned_lines
from surgeon.training.texts import load_texts
from surgeon.training.token_store import IGNORED
from tests.quality.test_conversations import tokenizer, written
from tests.tiny_models import TEXT
from tests.training.test_conversations import ROWS, WINDOW, tokens


def test_a_row_is_shown_with_what_is_learned_of_it(tmp_path: Path) -> None:
    found = load_texts(tokenizer(), written(tmp_path, ROWS), WINDOW, 1 << 20, held_out_tokens=100)
    learned = sum(label != IGNORED for row in found.training.rows for label in row["labels"])
    count = len(found.training) * WINDOW
    said = f"of the {count} tokens to train on, padding among them, {learned} are learned"
    assert learned_lines(found.training, tokenizer()) == [said]
    ids = found.training.rows[0]["input_ids"]
    row = next(
        row["messages"]
        for row, each in zip(ROWS, tokens(ROWS), strict=True)
        if each.ids == ids[: len(each.ids)]
    )
    turns = [message["content"] for message in row]
    expected = [
        f"<|im_start|>user\n{turns[place]}<|im_end|>\n<|im_start|>assistant\n\u27e6{turns[place + 1]}<|im_end|>\n\u27e7"
        for place in range(0, len(turns), 2)
    ]
    brackets = "one row, what is learned of it between \u27e6 \u27e7:"
    assert learned_lines(found.training, tokenizer(), True) == [said, brackets, "".join(expected)]
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 30)
    joined = load_texts(tokenizer(), str(text), 16, 100, held_out_tokens=32)
    assert learned_lines(joined.training, tokenizer()) == []
    shown = f"\u27e6{tokenizer().decode(joined.training.ids[0])}\u27e7"
    assert learned_lines(joined.training, tokenizer(), True) == [brackets, shown]
