"""A model that answers requests on several ranks: what a server or a command uses in its own process.

    with Service("demo", ranks=2, tokenizer=tokenizer) as service:
        stream = service.submit(prompt_ids, Sampling(max_new_tokens=20))
        for event in stream:
            print(event.text, end="")

The ranks are processes of their own. Requests go to rank 0, whose scheduler decides what every forward pass computes;
events come back and are turned into text here, away from the ranks. A thread of this process passes them on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType

from surgeon.runtime.request import Event, Sampling, Stats

Listener = Callable[[Event | Exception], None]


class Stream(ABC):
    """The events of one request, as they come; for one consumer, of one of these kinds.

    - `for event in stream` waits for each event. It ends after the one with a finish reason.
    - `async for event in stream` does the same in an event loop, without blocking it.
    - `stream.listen(function)` has every event given to a function, on the service's own thread.

    Whatever makes the request fail (`RankFailed` if a rank does) is raised to the first two and given to the third.

    Attributes:
        id: the request's.
    """

    id: int

    @abstractmethod
    def __iter__(self) -> Iterator[Event]: ...

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[Event]: ...

    @abstractmethod
    def listen(self, listener: Listener) -> None:
        """Give the events, from the first one on, to a function; the last is an error or has a finish reason."""


class Service(ABC):
    """Ranks that run one model, and the requests they work on. All methods may be called from any thread.

    The constructor will be
        Service(model: str | Path, *, ranks: int = 1, device: str = "auto", collectives: str = "auto",
                program: str | None = None, tokenizer: Any = None, max_batch: int = 8, max_tokens: int | None = None,
                blocks: int | None = None, memory: int | None = None, max_waiting: int = 64)

    Attributes:
        max_tokens: the most that prompt and output of a request may have together: what the model and the whole
            cache have room for.
        failure: why the ranks have ended (`RankFailed`), noticed within seconds also while no request is open; None
            while they run.
    """

    max_tokens: int
    failure: Exception | None

    @abstractmethod
    def submit(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Stream:
        """Ask for a continuation; it starts as soon as there is room for it.

        Args:
            prompt: token ids.
            sampling: greedy if not given.

        Raises:
            QueueFull: if `max_batch + max_waiting` requests are open.
            ValueError: if the prompt is empty, not of the model's vocabulary or too long, if stop texts are given and
                the service has no tokenizer, or if the service does not take requests any more.
            RankFailed: if a rank has failed.
        """

    @abstractmethod
    def cancel(self, request: int) -> bool:
        """End a request; its stream ends with "cancelled". False if it has ended already."""

    @abstractmethod
    def stats(self) -> Stats:
        """What the service is doing, as of the last pass or cancellation; answers at once, also after a failure."""

    @abstractmethod
    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until those open have ended; False if they have not within the seconds."""

    @abstractmethod
    def close(self) -> None:
        """Cancel what is open and end the ranks."""

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
