"""From the body of a request to token ids: its fields, its errors, its texts.

Types are strict ("1" is no number). A field that does not change the answer is ignored; an unsupported one that would
change it is refused, and so is an unknown one, which is mostly misspelt.

Errors are as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and a status.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import accumulate
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse

from surgeon.checkpoint.texts import Continuation, Defaults, Encoder, Message, chat_text, plain_message
from surgeon.runtime.batching.request import Sampling
from surgeon.words import did_you_mean

RETRY_SOON = {"Retry-After": "1"}
Json = dict[str, Any]  # an object
MOST_SHOWN = 60  # characters of a client's value in a message
GONE = 499  # the client hung up; nobody reads this status, it is only counted

_SHORT = reprlib.Repr()  # writes only the first items of a list
_SHORT.maxstring = _SHORT.maxother = MOST_SHOWN

_MESSAGE = '{"role": "user", "content": "Hello"}'
# What pydantic says of a field that takes several types is a list of what each of them lacks.
_KINDS = {
    "chat_template_kwargs": 'an object such as {"enable_thinking": false}',
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text or a list of texts",
    "stream_options": 'an object such as {"include_usage": true}',
    "messages": f"a list of messages such as {_MESSAGE}",
}


class ApiError(Exception):
    """An answer that is an error; its type, in OpenAI's words, follows from the HTTP status.

    Attributes:
        param: the field at fault.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> Json:
        kind = "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def invalid(message: str, param: str | None = None) -> ApiError:
    """400: the client can mend it."""
    return ApiError(400, message, param)


def refuse_while_draining() -> ApiError:
    """503 while the last requests are finished."""
    return ApiError(503, "the server is ending and takes no more requests", code="draining")


def refuse_after_failure(reason: Exception) -> ApiError:
    """503 after a rank has failed."""
    return ApiError(503, f"the server has failed: {reason}", code="rank_failed")


def short(value: Any) -> str:
    """A client's value, short enough for a message."""
    text = _SHORT.repr(value)
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[: MOST_SHOWN - 3]}..."


def explain(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints about a body, in a sentence that names field and value."""
    error = errors[0]
    kind = error["type"]
    path = error["loc"][1:]
    value = error.get("input")
    if kind == "json_invalid":
        return invalid(f"the body is not valid JSON: {error['ctx']['error']} (at character {path[0]})")
    if not path:
        return invalid("the body must be a JSON object, sent with Content-Type: application/json")
    field = str(path[0])
    name = ".".join(map(str, path))
    if kind == "missing":
        return invalid(f"{name} is missing", field)
    if field == "messages" and len(path) > 1:
        return invalid(f"{name} must be a message such as {_MESSAGE}, not {short(value)}", field)
    if field in _KINDS:
        return invalid(f"{field} must be {_KINDS[field]}, not {short(value)}", field)
    wanted = str(error["msg"]).removeprefix("Input should be ").removeprefix("a valid ")
    return invalid(f"{name} must be a valid {wanted}, not {short(value)}", field)


MOST_CHOICES = 128

# Of OpenAI's API and vLLM's server, what changes nothing about the answer.
IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# Fields that are not supported, and the values with which they ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json": (),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


Item = TypeVar("Item")
# A list that is left at its first wrong item: a complaint about each of millions would fill the memory.
Several = Annotated[list[Item], Field(fail_fast=True)]


class Body(BaseModel):
    """The fields that both kinds of requests have; null is the same as nothing.

    Attributes:
        prompt_field, logprobs_field: that errors about these name.
        default_new_tokens: None for as many as there is room for.
        fewest_hint: of an error: when fewer than 1 new token may be asked for.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    prompt_field: ClassVar[str] = "prompt"
    logprobs_field: ClassVar[str] = "logprobs"
    default_new_tokens: ClassVar[int | None] = None
    fewest_hint: ClassVar[str] = ""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | Several[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse fields that would matter and are not followed."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED:
                continue
            if name not in UNSUPPORTED:
                raise invalid(
                    f"there is no field {short(name)}; {did_you_mean(name, type(self).model_fields)}",
                    name,
                )
            if value not in UNSUPPORTED[name]:
                raise invalid(f"{name} is not supported; leave it out (it is {short(value)})", name)
        usage = (self.stream_options or {}).get("include_usage")
        if not isinstance(usage, bool | None):
            raise invalid(
                f"stream_options.include_usage must be true or false, not {short(usage)}",
                "stream_options",
            )
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream to be true", "stream_options")
        if not 1 <= self.choices <= MOST_CHOICES:
            raise invalid(f"n must be in 1..{MOST_CHOICES}, not {self.n}", "n")

    @property
    def choices(self) -> int:
        if self.n is None:
            return 1
        return self.n

    @property
    def wants_usage(self) -> bool:
        """True if the last chunk of a stream counts the tokens."""
        return bool((self.stream_options or {}).get("include_usage"))

    def wanted_logprobs(self) -> tuple[int | None, int | None]:
        """Numbers of log-probabilities for the answer's and for the prompt's tokens, as in `Sampling`."""
        return None, None

    def sampling(self, prompt: int, room: int, defaults: Defaults) -> Sampling:
        """Sampling for a prompt of so many tokens, with room for more, and the model's own defaults."""
        own = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "seed")
        }
        own |= {
            "top_k": 0 if self.top_k == -1 else self.top_k,  # other servers take -1 for all of them
            "stop": (self.stop,)
            if isinstance(self.stop, str)
            else None
            if self.stop is None
            else tuple(self.stop),
            "ignore_end": self.ignore_eos,
            "max_new_tokens": self._new_tokens(prompt, room),
        }
        own["logprobs"], own["prompt_logprobs"] = self.wanted_logprobs()
        given = {"temperature": 1.0} | defaults.sampling_fields()
        given |= {name: value for name, value in own.items() if value is not None}
        try:
            return Sampling(**given)
        except ValueError as error:
            name, _, rest = str(error).partition(" ")
            name = self.logprobs_field if name.endswith("logprobs") else name
            raise invalid(f"{name} {rest}", name) from None

    def _new_tokens(self, prompt: int, room: int) -> int:
        name = "max_tokens"
        asked = self.max_tokens
        if self.max_completion_tokens is not None:
            name = "max_completion_tokens"
            asked = self.max_completion_tokens
        most = room - 1
        purpose = "leave room for an answer"
        if asked == 0:
            most = room
            purpose = "fit"
        if prompt > most:
            raise invalid(f"the prompt has {prompt} tokens; at most {most} {purpose}", self.prompt_field)
        if asked is None:
            if self.default_new_tokens is None:
                return room - prompt
            return min(self.default_new_tokens, room - prompt)
        if self.max_tokens not in (None, asked):
            raise invalid(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {asked}; give one of them",
                name,
            )
        fewest = 1
        if getattr(self, "echo", None):
            fewest = 0
        if asked < fewest:
            raise invalid(f"{name} must be at least {fewest}, not {asked}{self.fewest_hint}", name)
        if prompt + asked > room:
            raise invalid(
                f"{name} is {asked} and the prompt has {prompt} tokens; together they may be {room} at most",
                name,
            )
        return asked


class CompletionBody(Body):
    """The body of /v1/completions."""

    default_new_tokens: ClassVar[int | None] = 16  # as OpenAI has it
    fewest_hint: ClassVar[str] = " (with echo it may be 0)"

    prompt: str | Several[str] | Several[int] | Several[Several[int]]
    echo: bool | None = None
    logprobs: int | None = None

    def wanted_logprobs(self) -> tuple[int | None, int | None]:
        if self.echo:
            return self.logprobs, self.logprobs
        return self.logprobs, None


class ChatBody(Body):
    """The body of /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"
    logprobs_field: ClassVar[str] = "top_logprobs"

    messages: Several[Json]
    chat_template_kwargs: Json | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def wanted_logprobs(self) -> tuple[int | None, int | None]:
        if self.logprobs:
            return self.top_logprobs or 0, None
        return None, None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")


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

    def locate(self, prompt: Prompt) -> Prompt:
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

    def chat(self, messages: list[Json], most: int, variables: Json | None = None) -> Prompt:
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
        plain = list[Message]()
        try:
            for number, message in enumerate(messages):
                plain.append(plain_message(message, f"messages.{number}"))
                _check_text(plain[-1]["content"], "messages")
            text = chat_text(self.tokenizer, plain, variables=variables)
        except ValueError as error:
            raise invalid(str(error), "messages") from error
        return Prompt(self._encode(text, "messages", most, special=False))

    def piece(self, token: int) -> str:
        """The text of one token inside a text; a part of a character is a replacement character."""
        if token not in self._pieces:
            before, after = (
                self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
                for tokens in (self._anchor, [*self._anchor, token])
            )
            self._pieces[token] = after[len(before) :]
        return self._pieces[token]


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(
            f"{name} is not text in UTF-8 (a lone surrogate at character {error.start})", name
        ) from None
