"""From a checked body to its answer, also where the client hangs up before that.

Behind one HTTP request are several to the service (`Choices`): given to it together, merged as they answer.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from surgeon.checkpoint.texts import UNFINISHED
from surgeon.runtime.batching.request import Event, QueueFull, Sampling, TokenLogprob, UndefinedLogits
from surgeon.runtime.service import Answer
from surgeon.server.bodies import (
    GONE,
    RETRY_SOON,
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    Json,
    Prompt,
    Texts,
    invalid,
    refuse_after_failure,
    refuse_while_draining,
    separate,
)
from surgeon.server.state import OUTCOME, ServerState

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
    """One HTTP request's answer, with log-probabilities or not."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, texts: Texts, wants_logprobs: bool) -> None:
        self.texts = texts
        self.wants_logprobs = wants_logprobs
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: Sequence[Reply], usage: Json) -> Json:
        """Everything at once."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage}

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        """A part of a stream."""
        return {**self._head, "object": self.chunk_object, "choices": choices, **more}

    @abstractmethod
    def _choice(self, index: int, answer: Reply) -> Json: ...

    @abstractmethod
    def pieces(self, index: int, answer: Reply, event: Event) -> list[Json]:
        """Choices of chunks that an event adds; none before the first token.

        A token whose text is kept back, because a character or a stop text may begin with it, has a chunk without text:
        readers of a stream see when tokens come.
        """


class CompletionFormat(Format):
    """The format of /v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, model: str, texts: Texts, wants_logprobs: bool, echo: bool) -> None:
        super().__init__(model, texts, wants_logprobs)
        self.echo = echo

    def _choice(self, index: int, answer: Reply, part: Event | None = None) -> Json:
        begins = not answer.begun
        answer.begun = True
        new = part or answer
        text = new.text
        if begins:
            text = self._echo(answer) + text
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(answer, new.logprobs, new.offsets, self.echo and begins),
            "finish_reason": new.finish_reason,
        }

    def pieces(self, index: int, answer: Reply, event: Event) -> list[Json]:
        if not (event.tokens or event.finish_reason):
            return []  # the prompt is shown as a whole, once all of it has been scored
        return [self._choice(index, answer, event)]

    def _echo(self, answer: Reply) -> str:
        prompt = answer.prompt
        if not self.echo:
            return ""
        text = prompt.text
        if text is None:
            text = self.texts.tokenizer.decode(
                prompt.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text

    def _logprobs(
        self, answer: Reply, found: Sequence[TokenLogprob], offsets: Sequence[int], with_prompt: bool
    ) -> Json | None:
        if not self.wants_logprobs:
            return None
        tokens = [one.token for one in found]
        scored: list[TokenLogprob | None] = [*found]
        places = list(offsets)
        if with_prompt:
            # The prompt's tokens come first; nothing predicts the first of them.
            prompt = answer.prompt
            answer.shift = len(self._echo(answer))
            tokens = [*prompt.tokens, *tokens]
            scored = [None, *answer.prompt_logprobs, *scored]
            places = [*(place - answer.shift for place in prompt.offsets), *places]
        return {
            "tokens": [self.texts.piece(token) for token in tokens],
            "token_logprobs": [one and _finite(one.logprob) for one in scored],
            "top_logprobs": [one and self._top(one) for one in scored],
            "text_offset": [answer.shift + place for place in places],
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """By text, the chosen token among them; of tokens with the same text (parts of characters) the likeliest."""
        top: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            top.setdefault(self.texts.piece(token), _finite(logprob))
        return top


class ChatFormat(Format):
    """The format of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _choice(self, index: int, answer: Reply) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }

    def pieces(self, index: int, answer: Reply, event: Event) -> list[Json]:
        found = []
        if not answer.begun:
            found.append(self._delta(index, {"role": "assistant", "content": ""}))
            answer.begun = True
        if event.text or event.tokens:
            found.append(self._delta(index, {"content": event.text}, self._logprobs(event.logprobs)))
        if event.finish_reason:
            found.append(self._delta(index, {}) | {"finish_reason": event.finish_reason})
        return found

    def _delta(self, index: int, delta: dict[str, str], logprobs: Any = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, found: Sequence[TokenLogprob]) -> Json | None:
        if not self.wants_logprobs:
            return None
        content = [
            self._token(one.token, one.logprob)
            | {"top_logprobs": [self._token(*top) for top in one.top]}
            for one in found
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        text = self.texts.piece(token)
        part = UNFINISHED in text  # of a character, whose bytes a tokenizer does not tell
        return {
            "token": text,
            "logprob": _finite(logprob),
            "bytes": None if part else list(text.encode()),
        }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def usage_of(answers: Sequence[Reply], each: int) -> Json:
    """OpenAI's count of tokens: every prompt once, every answer; `each` answers of a prompt lie side by side."""
    prompt = sum(len(answer.prompt.tokens) for answer in answers[::each])
    cached = sum(answer.usage.cached for answer in answers[::each])
    new = sum(answer.usage.new for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


Result = TypeVar("Result")


Ask = tuple[list[int], Sampling]  # a prompt and how to go on from it


class Choices:
    """Open requests, numbered in the order in which they were asked for.

    Attributes:
        answers: what has come of each.
        open: requests by their choices, until they have ended.
        prompt_field: of the body, for errors about prompts.
    """

    def __init__(self, state: ServerState, answers: Sequence[Reply], prompt_field: str) -> None:
        self.state = state
        self.answers = answers
        self.prompt_field = prompt_field
        self._begun = time.monotonic()
        self._first: dict[int, float] = {}
        self.open: dict[int, int] = {}
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()

    async def submit(self, asks: Sequence[Ask]) -> None:
        def submit_all() -> None:
            for choice, (tokens, sampling) in enumerate(asks):
                stream = self.state.service.submit(tokens, sampling)
                self.open[choice] = stream.id
                stream.listen(partial(self._put, choice))

        try:
            # Sending a long prompt to a rank that computes may take a while.
            await asyncio.to_thread(submit_all)
        except (ValueError, OSError) as error:
            self.close()
            if isinstance(error, QueueFull):
                raise ApiError(429, str(error), code="queue_full", headers=RETRY_SOON) from error
            if isinstance(error, OSError) or self.state.service.failure is not None:
                raise refuse_after_failure(error) from error
            raise (
                refuse_while_draining()
                if self.state.draining
                else invalid(str(error), self.prompt_field)
            ) from error

    def _put(self, choice: int, event: Event | Exception) -> None:
        with suppress(RuntimeError):  # the loop has closed: the process is ending
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, (choice, event))

    async def next(self) -> list[tuple[int, Event]]:
        """Wait for events and add them; returns all that have come, each with the number of its choice."""
        found = [self._note(*await self._arrived.get())]
        while not self._arrived.empty():
            found.append(self._note(*self._arrived.get_nowait()))
        return found

    async def finish(self) -> None:
        while self.open:
            await self.next()

    def _note(self, choice: int, event: Event | Exception) -> tuple[int, Event]:
        if isinstance(event, Exception):
            self.open.pop(choice, None)
            if isinstance(event, UndefinedLogits):  # of this request; others may get their answers
                raise ApiError(500, str(event), code="undefined_logits")
            raise refuse_after_failure(event)
        now = time.monotonic()
        meters = self.state.meters
        if choice not in self._first and event.tokens:
            self._first[choice] = now
            meters.queue.observe(event.queue_seconds)
            meters.first.observe(now - self._begun)
        if event.finish_reason is not None:
            self.open.pop(choice, None)
            if event.finish_reason == "cancelled":
                raise refuse_while_draining()
            if event.usage.new > 1:
                meters.each.observe((now - self._first.get(choice, now)) / (event.usage.new - 1))
        self.answers[choice].add(event)
        return choice, event

    def close(self) -> None:
        """Cancel what is still open."""
        while self.open:
            self.state.service.cancel(self.open.popitem()[1])


async def respond(request: Request, state: ServerState, body: CompletionBody | ChatBody) -> Response:
    """Answer /v1/completions or /v1/chat/completions."""
    state.check_model(body.model)
    body.check()
    room = state.service.max_tokens
    style: Format
    if isinstance(body, CompletionBody):
        several = separate(body.prompt)
        read = partial(state.texts.prompt, most=room)
        style = CompletionFormat(state.model, state.texts, body.logprobs is not None, bool(body.echo))
    else:
        several = [body.messages]
        read = partial(state.texts.chat, most=room, variables=body.chat_template_kwargs)
        style = ChatFormat(state.model, state.texts, bool(body.logprobs))
    wanted = len(several) * body.choices
    if wanted > state.capacity:
        reason = (
            f"prompts times n are {wanted} answers; this server takes {state.capacity} at a time at most"
        )
        raise invalid(reason, "n" if body.choices > 1 else body.prompt_field)
    prompts: list[Prompt] = await asyncio.to_thread(lambda: [*map(read, several)])
    answers = []
    asks = []
    for place, prompt in enumerate(prompts):
        sampling = body.sampling(len(prompt.tokens), room, state.defaults)
        for number in range(body.choices):
            answers.append(Reply(prompt=prompt))
            asks.append((prompt.tokens, replace(sampling, place=(place, number))))
    choices = Choices(state, answers, body.prompt_field)
    await choices.submit(asks)
    try:
        # Until here the model might have refused the prompts.
        if body.wanted_logprobs()[1] is not None:
            located = await asyncio.to_thread(lambda: [*map(state.texts.locate, prompts)])
            for number, answer in enumerate(answers):
                answer.prompt = located[number // body.choices]
        # Only now is it known whether there will be an answer, so only now can a stream have its status.
        first = await _unless_gone(request, choices.next())
        if body.stream:
            return _EventStream(_chunks(request.scope, choices, style, body, first), choices)
        await _unless_gone(request, choices.finish())
    except ClientDisconnect:
        choices.close()
        return Response(status_code=GONE)
    except BaseException:
        choices.close()
        raise
    return JSONResponse(style.whole(answers, usage_of(answers, body.choices)))


async def _chunks(
    scope: Scope, choices: Choices, style: Format, body: Body, arrived: list[tuple[int, Event]]
) -> AsyncIterator[bytes]:
    """The events of a stream; those that arrived together are sent together."""
    more = {"usage": None} if body.wants_usage else {}
    try:
        while True:
            found: list[bytes] = []
            for choice, event in arrived:
                pieces = style.pieces(choice, choices.answers[choice], event)
                found.extend(_line(style.chunk([piece], **more)) for piece in pieces)
            if found:
                yield b"".join(found)
            if not choices.open:
                break
            arrived = await choices.next()
    except ApiError as error:  # too late for its status
        choices.close()
        scope[OUTCOME] = error.status
        yield _line(error.body())
        return
    if body.wants_usage:
        yield _line(style.chunk([], usage=usage_of(choices.answers, body.choices)))
    yield b"data: [DONE]\n\n"


def _line(data: Json) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class _EventStream(StreamingResponse):
    """A stream that cancels its requests if it ends before them."""

    def __init__(self, chunks: AsyncIterator[bytes], choices: Choices) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self.choices.open:
                scope[OUTCOME] = GONE
                self.choices.close()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_hang_up(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await each


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
