"""The client's side of one request: its events for whoever waits for them, and the text of its tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from surgeon.checkpoint.texts import Continuation, StopTexts
from surgeon.runtime.batching.request import (
    Event,
    FinishReason,
    Request,
    TokenLogprob,
    UndefinedLogits,
    Usage,
)
from surgeon.runtime.batching.scheduler import Output

_LOG = logging.getLogger(__name__)

Listener = Callable[[Event | Exception], None]


class Stream:
    """The events of one request, as they come; for one consumer, of one of these kinds.

    - `for event in stream` waits for each event. It ends after the one with a finish reason. -
    `stream.listen(function)` has every event given to a function, on the service's own thread.

    An error of the request is raised to the first and given to the second: `RankFailed` if a rank fails,
    `UndefinedLogits` if the model's logits are not finite.
    """

    def __init__(self, request: int) -> None:
        self.id = request
        self._lock = threading.Lock()
        self._events: SimpleQueue[Event | Exception] = SimpleQueue()
        self._listener: Listener | None = None
        self._over = False

    def __iter__(self) -> Iterator[Event]:
        while not self._over:
            event = self._events.get()
            if isinstance(event, Exception):
                self._over = True
                raise event
            self._over = event.finish_reason is not None
            yield event

    def listen(self, listener: Listener) -> None:
        """Give the events, from the first one on, to a function; the last is an error or has a finish reason."""
        with self._lock:
            self._listener = listener
            while not self._events.empty():
                self._give(listener, self._events.get())

    def put(self, event: Event | Exception) -> None:
        """Add an event; for the service."""
        with self._lock:
            if self._listener is None:
                self._events.put(event)
            else:
                self._give(self._listener, event)

    def _give(self, listener: Listener, event: Event | Exception) -> None:
        try:
            listener(event)
        except Exception:  # noqa: BLE001 - of one client; the thread works for all
            _LOG.exception("what listens to request %d has failed", self.id)


@dataclass(kw_only=True)
class Answer:
    """The sum of a request's events so far; attributes as of `Event`."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)

    def add(self, event: Event) -> None:
        """Take in what is new."""
        self.text += event.text
        self.tokens.extend(event.tokens)
        self.logprobs.extend(event.logprobs)
        self.prompt_logprobs.extend(event.prompt_logprobs)
        self.offsets.extend(event.offsets)
        self.finish_reason = event.finish_reason
        self.usage = event.usage


class OpenRequest:
    """The service's state of a request until it has ended.

    Attributes:
        stream: where its events go.
    """

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.stream = Stream(request.id)
        self._request = request
        self._submitted = time.monotonic()
        self._text = None
        if tokenizer is not None:
            self._text = Continuation(tokenizer, request.prompt)
        self._stops = StopTexts(request.sampling.stop)
        self._new = 0
        self._first = self._newest = 0.0  # when tokens came
        self._latest: Output | None = None

    def event(self, output: Output) -> Event | UndefinedLogits:
        """Make an event for the client of the ranks' output."""
        token = output.token
        reason = output.finish_reason
        if reason == "undefined":
            so_far = f"{len(self._request.prompt)} tokens of the prompt, {self._new} new ones"
            return UndefinedLogits(
                f"the model's logits are not finite (NaN or infinity), so that nothing follows ({so_far}); are its "
                "weights damaged, or too large for the dtype?"
            )
        self._latest = output
        if token is not None:
            self._new += 1
            self._newest = time.monotonic()
            self._first = self._first or self._newest
        text = self._show(token, reason is not None)
        return Event(
            request=self._request.id,
            tokens=() if token is None else (token,),
            text=text,
            logprobs=() if output.logprob is None else (output.logprob,),
            finish_reason="stop" if self._stops.found else reason,
            usage=self._usage(),
            queue_seconds=0.0
            if output.admitted is None
            else max(0.0, output.admitted - self._submitted),
            prompt_logprobs=output.prompt_logprobs,
            offsets=() if token is None or self._text is None else (self._text.begins,),
        )

    def cancelled(self) -> Event:
        """The last event of a request that nothing more will come for."""
        return Event(self._request.id, (), self._show(None, True), (), "cancelled", self._usage())

    def _show(self, token: int | None, last: bool) -> str:
        if self._text is None:
            return ""
        text = ""
        if token is not None:
            text = self._text.add(token)
        shown = self._stops.add(text + self._text.rest() if last else text)
        if last:
            return shown + self._stops.rest()
        return shown

    def _usage(self) -> Usage:
        prompt = len(self._request.prompt)
        latest = self._latest
        seconds = self._newest - self._first
        if latest is None:
            return Usage(prompt, 0, self._new)
        return Usage(prompt, latest.cached, self._new, latest.drafted, latest.accepted, seconds)
