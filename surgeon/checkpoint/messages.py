"""Messages of chats as chat templates take them.

One message can be written in several ways, of which a template reads one: contents are texts or lists of parts; an
answer that calls tools has no content, an empty one, or null; the arguments of a call are an object (in transformers'
own templates) or its JSON (in OpenAI's API, and DeepSeek's templates).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import product
from typing import Any

from jinja2 import TemplateError

from surgeon.errors import first_line, show_value

# What chat templates raise about messages that they do not take.
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

Message = dict[str, Any]


def plain_message(message: Message, name: str) -> Message:
    """Return a message whose content is one text, without empty entries.

    Args:
        name: of the message, for errors.
    """
    if not isinstance(message.get("role"), str):
        raise ValueError(
            f'{name}.role must be a text such as "user", not {show_value(message.get("role"))}'
        )
    calls = message.get("tool_calls")
    content = message.get("content")
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ValueError(f"{name}.tool_calls must be a list of objects, not {show_value(calls)}")
    if isinstance(content, list):
        content = "".join(_part(part, f"{name}.content.{number}") for number, part in enumerate(content))
    elif content is None and calls and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"{name}.content must be a text or a list of parts, not {show_value(content)}")
    plain = {
        key: value
        for key, value in message.items()
        if value is not None and (key != "tool_calls" or value)
    }
    return plain | {"content": content}


def _part(part: Any, name: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError(f'{name} must be {{"type": "text", "text": ...}}, not {show_value(part)}')


def begin_conversation(system: str | None) -> list[Message]:
    """Return the beginning of a conversation: a system message, or nothing."""
    if system is None:
        return []
    return [{"role": "system", "content": system}]


def chat_text(
    tokenizer: Any,
    messages: list[Message],
    name: str = "the model",
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Write plain messages in a tokenizer's chat template, up to where the next answer begins.

    The template writes special tokens, the BOS among them; the text is to be tokenized without any more.

    Args:
        name: of the model, for errors.
        variables: of the template, such as enable_thinking.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"{name} has no chat template, which says how its chats are written; put a chat_template.jinja beside its "
            "tokenizer, that of its chat version, say, or have it go on from text (surgeon generate without --chat)"
        )

    def write(form: list[Message]) -> str:
        options = {"add_generation_prompt": True, "tokenize": False, **(variables or {})}
        return str(tokenizer.apply_chat_template(form, **options))

    has_system = messages[0]["role"] == "system" and bool(messages[0]["content"])
    try:
        text = write(with_calls_written(write, messages))
    except REFUSALS as error:
        what = " with ".join(["these messages", *(variables or ())])
        if has_system:
            with suppress(*REFUSALS):
                write(messages[1:])
                what = "a system message, which has to be left out"
        raise ValueError(f"{name}'s chat template does not take {what}: {first_line(error)}") from error
    if has_system and len(messages) > 1 and not differs(write, messages[1:], text):
        raise ValueError(f"{name}'s chat template writes nothing of a system message; leave it out")
    return text


def with_calls_written(write: Callable[[list[Message]], str], messages: list[Message]) -> list[Message]:
    """Return plain messages in the first form whose calls of tools a template takes and writes.

    Args:
        write: puts messages into the template.
    """
    if not any("tool_calls" in message for message in messages):
        return messages
    refusal: Exception | None = None
    is_taken = False
    for empty, as_text in product(("", None), (False, True)):
        form = [
            message
            if "tool_calls" not in message
            else message
            | {"content": message["content"] or empty}
            | {"tool_calls": [_read_call(call, as_text) for call in message["tool_calls"]]}
            for message in messages
        ]
        try:
            text = write(form)
        except REFUSALS as error:
            refusal = refusal or error
            continue
        is_taken = True
        if differs(write, without_keys(form, "tool_calls"), text):
            return form
    if refusal is not None and not is_taken:
        raise refusal
    raise ValueError("it leaves out tool_calls; take another template, or leave out such messages")


def differs(write: Callable[[list[Message]], str], messages: list[Message], text: str) -> bool:
    """Tell whether a template writes another text for some messages, or does not take them."""
    try:
        return write(messages) != text
    except REFUSALS:
        return True


def without_keys(messages: list[Message], *keys: str) -> list[Message]:
    """Remove some keys of messages."""
    return [{key: value for key, value in message.items() if key not in keys} for message in messages]


def _read_call(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """Write a call of a tool, whose function stands in it, or is it; its arguments as JSON, or as an object."""
    if isinstance(function := call.get("function"), dict):
        return call | {"function": _read_call(function, as_text)}
    arguments = call.get("arguments")
    if arguments is None:
        return call
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        with suppress(ValueError):  # a template may write it as it is
            arguments = json.loads(arguments or "{}")
    return call | {"arguments": arguments}
