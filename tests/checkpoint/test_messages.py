"""Messages in the forms in which chat templates take them."""

from __future__ import annotations

from typing import Any

import pytest

from surgeon.checkpoint.texts import Message, chat_text, plain_message, with_calls_written
from tests.tiny_models import TEMPLATE, tiny_tokenizer

USER = {"role": "user", "content": "the fox?"}


def calling(arguments: Any, content: Any = "") -> Message:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"function": {"name": "look", "arguments": arguments}}],
    }


def test_content_is_one_text_and_keys_that_say_nothing_are_gone() -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    assert plain_message({"role": "user", "content": parts, "name": None, "tool_calls": []}, "m") == {
        "role": "user",
        "content": "the fox",
    }
    called = {name: each for name, each in calling({}).items() if name != "content"}
    for message in (called, called | {"content": None}, called | {"content": ""}):
        assert plain_message(message, "m") == calling({})


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"content": "a"}, r'm.role must be a text such as "user", not None'),
        ({"role": "assistant"}, "m.content must be a text or a list of parts, not None"),
        ({"role": "user", "tool_calls": [{}]}, "m.content must be a text or a list of parts, not None"),
        ({"role": "user", "content": [{"type": "image"}]}, r"m.content.0 must be {\"type\": \"text\""),
        (
            {"role": "assistant", "tool_calls": "look"},
            "m.tool_calls must be a list of objects, not 'look'",
        ),
    ],
)
def test_messages_that_are_none_are_refused(message: Message, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        plain_message(message, "m")


@pytest.mark.parametrize(
    ("given", "content", "arguments"),
    [
        ({"at": 1}, "", {"at": 1}),
        ('{"at": 1}', "", {"at": 1}),
        ("", "", {}),
        ({"at": "é"}, "", '{"at": "é"}'),
        ({"at": 1}, None, {"at": 1}),
        ('{"at": 1}', None, '{"at": 1}'),
        ("{no JSON", "", "{no JSON"),
    ],
)
def test_calls_come_in_the_form_that_is_written(given: Any, content: Any, arguments: Any) -> None:
    def write(messages: list[Message]) -> str:
        """Takes one form of arguments, and writes calls behind one form of content."""
        text = ""
        for message in messages:
            calls = message.get("tool_calls", [])
            if any(type(call["function"]["arguments"]) is not type(arguments) for call in calls):
                raise TypeError("of another type")
            text += f"{message['content']}{calls if message['content'] == content else ''}"
        return text

    assert with_calls_written(write, [USER, calling(given)]) == [USER, calling(arguments, content)]
    assert with_calls_written(write, [USER]) == [USER]


def test_calls_that_are_not_written_and_messages_that_are_not_taken() -> None:
    with pytest.raises(ValueError, match="it leaves out tool_calls"):
        with_calls_written(lambda messages: messages[0]["content"], [USER, calling({})])

    def refuse(messages: list[Message]) -> str:
        raise TypeError(type(messages[1]["tool_calls"][0]["function"]["arguments"]).__name__)

    with pytest.raises(TypeError, match="dict"):
        with_calls_written(refuse, [USER, calling("{}")])


SYSTEM = {"role": "system", "content": "be brief"}
# As Gemma's: what the system says is refused.
WITHOUT_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
)


def test_a_chat_begins_once_and_ends_where_the_answer_begins() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert chat_text(tokenizer, [SYSTEM, USER]) == "<s>[system] be brief [user] the fox? [assistant] "
    quiet = chat_text(tokenizer, [USER], variables={"enable_thinking": False})
    assert quiet == "<s>[user] the fox? [quiet] [assistant] "


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (None, r"^tiny has no chat template, .* put a chat_template.jinja beside its tokenizer"),
        (
            WITHOUT_SYSTEM + "{{ messages[0].content }}",
            "^tiny's chat template does not take a system message, which has to be left out: System role not",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "writes nothing of a system mess",
        ),
        ("{{ raise_exception('no') }}", "does not take these messages: no$"),
    ],
)
def test_templates_that_take_no_system_message(template: str | None, error: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=error):
        chat_text(tokenizer, [SYSTEM, USER], "tiny")
