"""Text that comes in pieces: characters whole, stop texts never shown in part, the same for any length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from surgeon.checkpoint.texts import (
    MOST_CONTEXT,
    Continuation,
    Defaults,
    StopTexts,
    open_tokenizer,
    read_defaults,
    read_tokenizer,
)
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
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁The",
        "▁fox",
        "▁sees",
        "▁",
        "fox",
        ",",
    ]
    tokenizer = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def pieces_of(tokenizer: Any, prompt: list[int], tokens: list[int]) -> list[str]:
    continuation = Continuation(tokenizer, prompt)
    return [*(continuation.add(token) for token in tokens), continuation.rest()]


def test_long_texts_are_those_of_decoding_at_once_and_take_no_longer() -> None:
    tokenizer = tiny_tokenizer()
    prompt, tokens = (
        tokenizer(PROMPT).input_ids,
        tokenizer(" " + TEXT, add_special_tokens=False).input_ids,
    )
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
    tokens = [
        ids("▁fox"),
        ids(","),
        *fox,
        *fox,
        ids("▁sees"),
        ids("▁"),
        *fox * 60,
        ids("▁fox"),
        ids("fox"),
    ] * 2
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


@given(
    st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.data()
)
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


def write(folder: Path, **settings: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_what_applies(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == Defaults()
    assert (
        read_defaults(write(tmp_path, eos_token_id=1, temperature=0.6, top_k=50, num_beams=1))
        == Defaults()
    )
    found = read_defaults(
        write(tmp_path, repetition_penalty=1.2, suppress_tokens=[3, 4], begin_suppress_tokens=[5])
    )
    assert found == Defaults(1.2, (3, 4), (5,))
    assert found.complaint() is None


def test_checkpoints_from_before_there_was_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"repetition_penalty": 1.5, "num_beams": 4}))
    found = read_defaults(tmp_path)
    assert found.repetition_penalty == 1.5
    assert found.complaint() == "config.json sets num_beams (4), which is not applied"
    assert read_defaults(write(tmp_path)) == Defaults()


def test_what_does_not_apply_is_named_with_its_value(tmp_path: Path) -> None:
    settings = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "no_repeat_ngram_size": 3,
        "max_length": 20,
    }
    found = read_defaults(write(tmp_path, **settings))
    words = "generation_config.json sets no_repeat_ngram_size (3), do_sample (true), temperature (0.6), top_p (0.9)"
    assert found.complaint() == f"{words}, which is not applied"
    assert found.complaint({"do_sample", "temperature", "top_p"}) == (
        "generation_config.json sets no_repeat_ngram_size (3), which is not applied"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"repetition_penalty": 0},
            "repetition_penalty must be a number above 0, not 0; correct it there",
        ),
        ({"repetition_penalty": "1.1"}, "repetition_penalty must be a number above 0, not '1.1'"),
        ({"suppress_tokens": 5}, "suppress_tokens must be a list of token ids, not 5"),
        ({"begin_suppress_tokens": ["a"]}, "begin_suppress_tokens must be a list of token ids"),
    ],
    ids=str,
)
def test_what_cannot_be_followed(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_defaults(write(tmp_path, **settings))
