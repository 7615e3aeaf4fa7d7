"""Text that comes in pieces: characters whole, stop texts never shown in part, the same for any length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from surgeon.checkpoint.texts import MOST_CONTEXT, Continuation, StopTexts, open_tokenizer, read_tokenizer
from tests.tiny_models import save_checkpoint, tiny_tokenizer

PROMPT = "The quick"
TEXT = "The fox — naïve, 狐狸 🦊🦊 — sees the dog, and the dog (who had seen it) sleeps. " * 6


class Counted:
    """A tokenizer that notes how many tokens it was given at most."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.most = 0

    def decode(self, tokens: list[int], **options: Any) -> str:
        self.most = max(self.most, len(tokens))
        text: str = self.tokenizer.decode(tokens, **options)
        return text


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: words begin with a mark that is a space inside a text, other characters come as bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁The", "▁fox", "▁sees", "▁", "fox", ","]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def pieces_of(tokenizer: Any, prompt: list[int], tokens: list[int]) -> list[str]:
    continuation = Continuation(tokenizer, prompt)
    return [*(continuation.add(token) for token in tokens), continuation.rest()]


def test_long_texts_are_those_of_decoding_at_once_and_take_no_longer() -> None:
    tokenizer = tiny_tokenizer()
    prompt, tokens = tokenizer(PROMPT).input_ids, tokenizer(" " + TEXT, add_special_tokens=False).input_ids
    assert len(tokens) > 4 * MOST_CONTEXT
    counted = Counted(tokenizer)
    pieces = pieces_of(counted, prompt, tokens)
    assert "".join(pieces) == " " + TEXT
    assert all("\ufffd" not in piece for piece in pieces)
    assert counted.most <= MOST_CONTEXT + 8  # a few more while a character is unfinished
    assert pieces[-1] == ""


def test_words_with_their_spaces_and_characters_as_bytes() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    fox = ids([f"<0x{byte:02X}>" for byte in "🦊".encode()])
    tokens = [ids("▁fox"), ids(","), *fox, *fox, ids("▁sees"), ids("▁"), *fox * 60, ids("▁fox"), ids("fox")] * 2
    text = "".join(pieces_of(tokenizer, [ids("▁The")], tokens))
    assert text == (" fox,🦊🦊 sees " + "🦊" * 60 + " foxfox") * 2


def test_a_character_that_is_never_finished() -> None:
    tokenizer = tiny_tokenizer()
    prompt = tokenizer(PROMPT).input_ids
    fox = tokenizer("🦊", add_special_tokens=False).input_ids
    assert len(fox) > 2
    assert pieces_of(tokenizer, prompt, fox) == [""] * (len(fox) - 1) + ["🦊", ""]
    assert pieces_of(tokenizer, prompt, fox[:2]) == ["", "", "\ufffd"]


def test_stop_texts() -> None:
    stops = StopTexts(["\n\n", "User:", "Us:"])
    shown = [stops.add(piece) for piece in ["one\n", "two", " Use", "d Us", "er", ": x", "y"]]
    assert shown == ["one", "\ntwo", " ", "Used ", "", "", ""]
    assert stops.found
    assert stops.rest() == ""
    kept = StopTexts(["\n\n"])
    assert [kept.add("a\n"), kept.rest(), kept.found] == ["a", "\n", False]


def test_of_two_stop_texts_the_first_one_counts() -> None:
    assert StopTexts(["cd", "bcde"]).add("abcdef") == "a"
    later = StopTexts(["cd", "bcde"])
    # Nobody can know before the "d" that "bcde" will not come; "cd" has come then.
    assert [later.add(piece) for piece in "abcd"] == ["a", "", "", "b"]
    assert StopTexts([]).add("abc") == "abc"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.data())
def test_stop_texts_in_whatever_pieces(text: str, found: list[str], data: st.DataObject) -> None:
    """No stop text is ever shown, in whole or in part, and nothing else is lost."""
    stops, shown = StopTexts(found), ""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    for first, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += stops.add(text[first:end])
        assert not any(stop in shown for stop in found)
        before = [text.find(stop) for stop in found if stop in text]
        assert text[: min(before, default=len(text))].startswith(shown) or stops.found
    if not stops.found:
        assert not any(stop in text for stop in found)
        assert shown + stops.rest() == text
    else:
        assert any(text[len(shown) :].startswith(stop) for stop in found)
        assert text.startswith(shown)


@pytest.mark.parametrize("stop", ["aab", "aaab", "abab"])
def test_a_start_within_a_start(stop: str) -> None:
    stops = StopTexts([stop])
    shown = "".join(stops.add(letter) for letter in "aa" + stop)
    assert stops.found
    assert shown == ("aa" + stop).partition(stop)[0]


def test_a_token_that_only_a_class_adds_is_text(tmp_path: Path) -> None:
    """Transformers' class for Qwen2 adds one beyond the embedding, which is refused where a file names it."""
    folder = save_checkpoint(tmp_path, "qwen2")
    added, rows = "<|endoftext|>", len(tiny_tokenizer())
    stock = read_tokenizer(folder)
    assert stock(added).input_ids[-1] == rows
    found = open_tokenizer(folder)
    text = f"The quick {added} fox"
    ids = found(text).input_ids
    assert max(ids) < rows
    assert found.decode(ids, skip_special_tokens=True) == text
    assert (found.pad_token, found.unk_token, found.eos_token) == (None, None, "</s>")
    assert found("The quick fox </s>").input_ids == stock("The quick fox </s>").input_ids
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}" + added)
    with pytest.raises(ValueError, match=r"embedding has 300 rows, none for '<\|endoftext\|>' \(300\)"):
        open_tokenizer(folder)
