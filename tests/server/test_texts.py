"""Token ids of prompts and chats, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from surgeon.server.errors import ApiError
from surgeon.server.texts import Prompt, Texts, separate
from tests.tiny_models import tiny_tokenizer


def test_a_model_without_a_chat_template_refuses_chats() -> None:
    with pytest.raises(ApiError, match="this model has no chat template .* use /v1/completions") as error:
        Texts(tiny_tokenizer()).chat([{"role": "user", "content": "Hello"}], 99)
    assert error.value.status == 400


def test_pieces_of_tokens_join_to_the_text() -> None:
    tokenizer = tiny_tokenizer()
    texts = Texts(tokenizer)
    tokens = tokenizer("the dog went on: naïve", add_special_tokens=False).input_ids
    pieces = [texts.piece(token) for token in tokens]
    # The two bytes of ï are no characters by themselves.
    assert "".join(pieces) == "the dog went on: na\ufffd\ufffdve"
    assert texts.piece(tokenizer.eos_token_id) == "</s>"


def test_prompts_keep_their_text() -> None:
    tokenizer = tiny_tokenizer()
    texts = Texts(tokenizer)
    assert texts.prompt([5, 6], 9) == Prompt([5, 6])
    assert texts.prompt("dog", 9) == Prompt(tokenizer("dog").input_ids, "dog")


@pytest.mark.parametrize(
    ("given", "several"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([5, 6], [[5, 6]]), ([[5], [6]], [[5], [6]]), ([], [[]])],
)
def test_one_prompt_or_several(given: Any, several: list[Any]) -> None:
    assert separate(given) == several
