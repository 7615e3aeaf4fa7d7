"""The requests to the service behind one HTTP request: given to it together, merged as they answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from surgeon.runtime.batching.request import Event, QueueFull, Sampling, UndefinedLogits
from surgeon.server.errors import ApiError, draining, failed, full, invalid, undefined
from surgeon.server.state import ServerState

Ask = tuple[list[int], Sampling]  # a prompt and how to go on from it


class Choices:
    """Open requests, numbered in the order in which they were asked for.

    Attributes:
        prompt_field: what errors about the prompts name.
    """

    def __init__(self, state: ServerState, prompt_field: str) -> None:
        self.state = state
        self.prompt_field = prompt_field
        self._begun = time.monotonic()
        self._first: dict[int, float] = {}
        self._open: dict[int, int] = {}  # choice to request
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()

    async def submit(self, asks: Sequence[Ask]) -> None:
        """Ask for all of them, or for none.

        Raises:
            ApiError: if the service takes them not now, or not at all.
        """
        # Sending a long prompt to a rank that computes may take a while.
        await asyncio.to_thread(self._submit, asks)

    def _submit(self, asks: Sequence[Ask]) -> None:
        try:
            for choice, (tokens, sampling) in enumerate(asks):
                stream = self.state.service.submit(tokens, sampling)
                self._open[choice] = stream.id
                stream.listen(partial(self._put, choice))
        except (ValueError, OSError) as error:
            self.close()
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> ApiError:
        if isinstance(error, QueueFull):
            return full(str(error))
        if isinstance(error, OSError) or self.state.service.failure is not None:
            return failed(error)
        if self.state.draining:
            return draining()
        return invalid(str(error), self.prompt_field)

    def _put(self, choice: int, event: Event | Exception) -> None:
        with suppress(RuntimeError):  # the loop has closed: the process is ending
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, (choice, event))

    @property
    def open(self) -> bool:
        """Whether there is more to come."""
        return bool(self._open)

    async def next(self) -> list[tuple[int, Event]]:
        """Wait for events; all that have come, each with the number of its choice.

        Raises:
            ApiError: if a rank has failed, the model predicts nothing, or the service has ended the request.
        """
        found = [self._note(*await self._arrived.get())]
        while not self._arrived.empty():
            found.append(self._note(*self._arrived.get_nowait()))
        return found

    def _note(self, choice: int, event: Event | Exception) -> tuple[int, Event]:
        if isinstance(event, Exception):
            self._open.pop(choice, None)
            raise undefined(event) if isinstance(event, UndefinedLogits) else failed(event)
        now = time.monotonic()
        if choice not in self._first and event.tokens:
            self._first[choice] = now
            self.state.meters.began(event.queue_seconds, now - self._begun)
        if event.finish_reason is not None:
            self._open.pop(choice, None)
            if event.finish_reason == "cancelled":
                raise draining()
            self.state.meters.ended(now - self._first.get(choice, now), event.usage.new)
        return choice, event

    def close(self) -> None:
        """Cancel what is still open."""
        while self._open:
            self.state.service.cancel(self._open.popitem()[1])
