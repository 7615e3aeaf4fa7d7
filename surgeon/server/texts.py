"""Token ids of prompts and chats, and the text of single tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import accumulate
from typing import Any

from surgeon.checkpoint.texts import Continuation, Encoder, Message, chat_text, plain_message
from surgeon.server.errors import invalid

FIELD = "chat_template_kwargs"
MOST_VARIABLES = 1 << 16  # bytes of them
# Tokens are decoded behind this one, because tokenizers write a text's first token differently.
ANCHOR = "a"


@dataclass(frozen=True)
class Prompt:
    """A text to go on from, None if it was given as token ids or messages, with offsets where they were asked for."""

    tokens: list[int]
    text: str | None = None
    offsets: list[int] = field(default_factory=list)


def separate(given: str | list[str] | list[int] | list[list[int]]) -> list[Any]:
    """The prompts of a completion, which may have one or several."""
    if isinstance(given, list) and given and not isinstance(given[0], int):
        return given
    return [given]


class Texts:
    """A tokenizer that several threads may use."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        # What the template is given besides, or how it is applied, is not for clients to say.
        self._reserved = {
            *signature(tokenizer.apply_chat_template).parameters,
            *tokenizer.special_tokens_map,
        }
        self._reserved.add("messages")
        self._anchor: list[int] = self._encoder(ANCHOR, special=False)
        self._pieces: dict[int, str] = {}

    def prompt(self, given: str | list[int], most: int) -> Prompt:
        """The prompt of a completion; of a text far longer than `most` tokens no more is looked at."""
        if isinstance(given, str):
            tokens = self._encode(given, "prompt", most)
            text = given
        else:
            tokens = given
            text = None
        if not tokens:
            raise invalid("prompt is empty: it has no tokens; give at least one", "prompt")
        return Prompt(tokens, text)

    def _encode(self, text: str, name: str, most: int, special: bool = True) -> list[int]:
        if len(text) > (characters := self._encoder.most_characters(most)):
            reason = (
                f"{name} has {len(text)} characters; at most {characters} are read, as {most} tokens fit"
            )
            raise invalid(reason, name)
        _check_text(text, name)
        return self._encoder(text, special)

    def located(self, prompt: Prompt) -> Prompt:
        """The prompt with its offsets in the given text, or else in that of the tokens.

        Where the tokenizer does not write the given text again (special tokens, normalisation), its own offsets count.
        """
        tokens = prompt.tokens
        text = prompt.text
        continuation = Continuation(self.tokenizer, ())
        pieces = []
        offsets = []
        for token in tokens:
            pieces.append(continuation.add(token))
            offsets.append(continuation.begins)
        written = "".join([*pieces, continuation.rest()])
        if text in (None, written) or not self.tokenizer.is_fast:
            return replace(prompt, offsets=offsets)
        places = self.tokenizer.backend_tokenizer.encode(text).offsets
        # Tokens that the tokenizer has added lie nowhere, (0, 0): they stand behind the one before.
        ends = accumulate((end for _, end in places), max, initial=0)
        offsets = [
            start if start < end else before for (start, end), before in zip(places, ends, strict=False)
        ]
        return replace(prompt, offsets=offsets)

    def chat(
        self, messages: list[dict[str, Any]], most: int, variables: dict[str, Any] | None = None
    ) -> Prompt:
        """The messages in the model's chat template, up to where its answer begins; variables are the template's."""
        if not self.tokenizer.chat_template:
            raise invalid(
                "this model has no chat template (it is no chat model); use /v1/completions", "messages"
            )
        if not messages:
            raise invalid("messages is empty; give at least one message", "messages")
        variables = variables or {}
        for name in variables:
            if name in self._reserved:
                raise invalid(
                    f"{FIELD} must not have {name}, which the server sets; leave it out", FIELD
                )
        try:
            size = len(json.dumps(variables, ensure_ascii=False, allow_nan=False).encode())
        except (ValueError, RecursionError) as error:
            raise invalid(f"{FIELD} is no JSON: {error}", FIELD) from error
        if size > MOST_VARIABLES:
            raise invalid(f"{FIELD} has {size} bytes of JSON; at most {MOST_VARIABLES} are taken", FIELD)
        plain = [_plain(message, f"messages.{number}") for number, message in enumerate(messages)]
        try:
            text = chat_text(self.tokenizer, plain, variables=variables)
        except ValueError as error:
            raise invalid(str(error), "messages") from error
        return Prompt(self._encode(text, "messages", most, special=False))

    def decode(self, tokens: list[int]) -> str:
        """The text of some tokens from the beginning of a text on."""
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def piece(self, token: int) -> str:
        """The text of one token inside a text; a part of a character is a replacement character."""
        if token not in self._pieces:
            before, after = (
                self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
                for tokens in (self._anchor, [*self._anchor, token])
            )
            self._pieces[token] = after[len(before) :]
        return self._pieces[token]


def _plain(message: dict[str, Any], name: str) -> Message:
    try:
        found = plain_message(message, name)
    except ValueError as error:
        raise invalid(str(error), "messages") from None
    _check_text(found["content"], "messages")
    return found


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(
            f"{name} is not text in UTF-8 (a lone surrogate at character {error.start})", name
        ) from None
