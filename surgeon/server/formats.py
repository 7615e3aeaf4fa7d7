"""Answers in OpenAI's words: completions and chats, whole or in the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from surgeon.runtime.batching.request import Event, TokenLogprob
from surgeon.runtime.stream import Answer
from surgeon.server.texts import UNFINISHED, Prompt, Texts

LEAST_LOGPROB = -9999.0


@dataclass(kw_only=True)
class Reply(Answer):
    """One answer to a prompt.

    Attributes:
        shift: characters of the prompt that come before `text`, once log-probabilities have been reported.
        begun: whether a stream has sent anything of it.
    """

    prompt: Prompt
    shift: int = 0
    begun: bool = False


class Format(ABC):
    """One HTTP request's answer.

    Attributes:
        wants_logprobs: whether log-probabilities are part of it.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, texts: Texts, wants_logprobs: bool) -> None:
        self.texts = texts
        self.wants_logprobs = wants_logprobs
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, answers: Sequence[Reply], usage: dict[str, Any]) -> dict[str, Any]:
        """Everything at once."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A part of a stream."""
        return {**self._head, "object": self.chunk_object, "choices": choices, **more}

    @abstractmethod
    def _choice(self, index: int, answer: Reply) -> dict[str, Any]: ...

    @abstractmethod
    def pieces(self, index: int, answer: Reply, event: Event) -> list[dict[str, Any]]:
        """What an event adds to a choice, as the choices of chunks; none before the first token.

        A token whose text is kept back, because a character or a stop text may begin with it, has a chunk without text:
        who reads a stream sees when tokens come.
        """


class CompletionFormat(Format):
    """Of /v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, model: str, texts: Texts, wants_logprobs: bool, echo: bool) -> None:
        super().__init__(model, texts, wants_logprobs)
        self.echo = echo

    def _choice(self, index: int, answer: Reply) -> dict[str, Any]:
        text = self._echoed(answer) + answer.text
        logprobs = self._logprobs(answer, answer.logprobs, answer.offsets, self.echo)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def pieces(self, index: int, answer: Reply, event: Event) -> list[dict[str, Any]]:
        if not (event.tokens or event.finish_reason):
            return []  # the prompt is shown as a whole, once all of it has been scored
        begins = not answer.begun
        answer.begun = True
        text = self._echoed(answer) + event.text if begins else event.text
        logprobs = self._logprobs(answer, event.logprobs, event.offsets, self.echo and begins)
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": event.finish_reason}]

    def _echoed(self, answer: Reply) -> str:
        prompt = answer.prompt
        if not self.echo:
            return ""
        if prompt.text is None:
            return self.texts.decode(prompt.tokens)
        return prompt.text

    def _logprobs(
        self, answer: Reply, found: Sequence[TokenLogprob], offsets: Sequence[int], with_prompt: bool
    ) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        logprobs: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if with_prompt:
            self._add_prompt(logprobs, answer)
        for one, offset in zip(found, offsets, strict=False):  # a last event without a token has neither
            logprobs["tokens"].append(self.texts.piece(one.token))
            logprobs["token_logprobs"].append(_finite(one.logprob))
            logprobs["top_logprobs"].append(self._top(one))
            logprobs["text_offset"].append(answer.shift + offset)
        return logprobs

    def _add_prompt(self, logprobs: dict[str, Any], answer: Reply) -> None:
        """Put the prompt's tokens first; nothing predicts the first of them."""
        logprobs["tokens"] += [self.texts.piece(token) for token in answer.prompt.tokens]
        logprobs["token_logprobs"] += [None, *(_finite(one.logprob) for one in answer.prompt_logprobs)]
        logprobs["top_logprobs"] += [None, *map(self._top, answer.prompt_logprobs)]
        logprobs["text_offset"] += answer.prompt.offsets
        answer.shift = len(self._echoed(answer))

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """By text, the chosen token among them; of tokens with the same text (parts of characters) the likeliest."""
        top: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            top.setdefault(self.texts.piece(token), _finite(logprob))
        return top


class ChatFormat(Format):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _choice(self, index: int, answer: Reply) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }

    def pieces(self, index: int, answer: Reply, event: Event) -> list[dict[str, Any]]:
        found = []
        if not answer.begun:
            found.append(self._delta(index, {"role": "assistant", "content": ""}))
            answer.begun = True
        if event.text or event.tokens:
            found.append(self._delta(index, {"content": event.text}, self._logprobs(event.logprobs)))
        if event.finish_reason:
            found.append(self._delta(index, {}) | {"finish_reason": event.finish_reason})
        return found

    def _delta(self, index: int, delta: dict[str, str], logprobs: Any = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        content = [
            self._token(one.token, one.logprob) | {"top_logprobs": [self._token(*top) for top in one.top]}
            for one in found
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.texts.piece(token)
        part = UNFINISHED in text  # of a character, whose bytes a tokenizer does not tell
        return {"token": text, "logprob": _finite(logprob), "bytes": None if part else list(text.encode())}


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, LEAST_LOGPROB)


def usage_of(answers: Sequence[Reply], each: int) -> dict[str, Any]:
    """OpenAI's count of tokens: every prompt once, every answer.

    Args:
        each: how many answers a prompt has; they lie side by side.
    """
    prompt = sum(len(answer.prompt.tokens) for answer in answers[::each])
    cached = sum(answer.usage.cached for answer in answers[::each])
    new = sum(answer.usage.new for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
