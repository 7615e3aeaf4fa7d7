"""Token ids of prompts and chats, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from surgeon.server.bodies import ApiError, Prompt, Texts, separate
from tests.tiny_models import tiny_tokenizer


def test_a_model_without_a_chat_template_refuses_chats() -> None:
    with pytest.raises(
        ApiError, match="this model has no chat template .* use /v1/completions"
    ) as error:
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


def test_a_history_with_calls_of_tools_is_written() -> None:
    """As OpenAI's API has it: no content, and arguments as JSON, of which templates take an object."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.at }})"
        "{% endfor %}{{ m.content }}\n{% endfor %}"
    )
    texts = Texts(tokenizer)
    called = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "dog"}'}}],
    }
    chat = [
        {"role": "user", "content": "the"},
        called,
        {"role": "tool", "tool_call_id": "1", "content": "fox"},
    ]
    expected = tokenizer("the\nlook(dog)\nfox\n", add_special_tokens=False).input_ids
    assert texts.chat(chat, 99).tokens == expected
    assert (
        texts.chat([chat[0], called | {"content": None, "refusal": None}, chat[2]], 99).tokens
        == expected
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(
        ApiError, match="template does not take these messages: it leaves out tool_calls"
    ):
        texts.chat(chat, 99)


@pytest.mark.parametrize(
    ("given", "several"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([5, 6], [[5, 6]]), ([[5], [6]], [[5], [6]]), ([], [[]])],
)
def test_one_prompt_or_several(given: Any, several: list[Any]) -> None:
    assert separate(given) == several
