"""Stand-ins for streams of a GPU, which do what is sent by them when it is waited for, as late as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Event = tuple["Stream", int]


class Stream:
    """What was sent by a stream, and how much of it is done."""

    current: Stream

    def __init__(self, device: Any = None, priority: int = 0) -> None:  # noqa: ARG002 - as PyTorch's
        self.sent: list[Callable[[], None]] = []
        self.done = 0
        self.events: list[Event] = []
        self.priority = priority

    def record_event(self) -> Event:
        self.events.append((self, len(self.sent)))
        return self.events[-1]

    def wait_event(self, event: Event) -> None:
        """What was sent before the event is done now, and what this one is given from now on, is given after it."""
        other, until = event
        for each in other.sent[other.done : until]:
            each()
        other.done = max(other.done, until)

    def wait_stream(self, other: Stream) -> None:
        assert other.done == len(other.sent), "the stream that computes is behind itself"


def sent(compute: Callable[[Tensor], object], result: Tensor) -> Tensor:
    """Send what makes a result: at once by the stream that computes, else later; nobody may read it before."""
    stream = Stream.current
    if stream.priority == 0:
        compute(result)
    else:
        result.fill_(torch.nan)
        stream.sent.append(lambda: (compute(result), None)[1])
    return result


def install(monkeypatch: Any) -> Stream:
    """Have PyTorch make these; returns the one that computes."""
    Stream.current = main = Stream()

    @contextmanager
    def by(stream: Stream) -> Iterator[None]:
        before, Stream.current = Stream.current, stream
        yield
        Stream.current = before

    fakes = SimpleNamespace(Stream=Stream, stream=by, current_stream=lambda: Stream.current)
    for name, fake in vars(fakes).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return main
