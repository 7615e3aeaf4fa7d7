"""A model that answers requests on several ranks, for a server or a command in its own process.

    with Service("demo", ServiceOptions(RankOptions(2)), tokenizer) as service:
        stream = service.submit(prompt_ids, Sampling(max_new_tokens=20))
        for event in stream:
            print(event.text, end="")

Requests go to rank 0, a process of its own, whose scheduler decides what every forward pass computes (scheduler.py,
worker.py). Text and stop texts are made here, so that the ranks need not wait for them; by the time a stop text is
found they may be a pass ahead, whose tokens are dropped. One thread receives from the ranks, notices when one of them
ends, and passes everything on; another one notices when they are stuck (`Watchdog`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from surgeon.checkpoint.texts import Continuation, StopTexts
from surgeon.language.program import Program
from surgeon.machine import free_bytes
from surgeon.opened import Model
from surgeon.processes.children import PATIENCE_SECONDS, Pulse, Watchdog
from surgeon.processes.torchrun import ranks_of_this_machine
from surgeon.runtime.batching.ahead import MOST_AHEAD
from surgeon.runtime.batching.blocks import PASS_TOKENS
from surgeon.runtime.batching.request import (
    Event,
    FinishReason,
    QueueFull,
    Request,
    Sampling,
    Stats,
    TokenLogprob,
    UndefinedLogits,
    Usage,
    check_length,
)
from surgeon.runtime.batching.scheduler import Limits, Output
from surgeon.runtime.kernels.build import kernels_used, warn_without_kernels
from surgeon.runtime.model.engine import Figures
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import named_draft, with_coda, with_draft, with_stretches
from surgeon.runtime.plan.memory import Capacity, choose_cache
from surgeon.runtime.worker.rank import RankOptions, gpu_room
from surgeon.runtime.worker.ranks import RankFailed, Ranks
from surgeon.runtime.worker.worker import Account, Cancel, Progress, Report, connect, load, serve

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

    def cancelled_event(self) -> Event:
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


# Passes. On CPUs several at once won nothing: tokens become text on the cores that compute.
MOST_AT_ONCE = {"cpu": 1, "cuda": 8}

CODA = "coda"
LOOKUP = "lookup"


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service; what needs no model to check it is checked as it is made.

    Attributes:
        program: in place of the checkpoint's own.
        max_batch: requests that are computed together.
        max_tokens: of prompt and output of a request together; by default the model's positions.
        blocks: of the cache; by default enough for `max_batch` of the longest requests, as far as they fit.
        memory: bytes of weights and cache, of all ranks together (of each on GPUs); by default most of the free.
        max_waiting: requests that may be open beyond `max_batch`.
        patience: seconds without any progress after which busy ranks are given up.
        dtype, decoding, low_rank, kv: as of `Ways`.
        halves: whether passes are computed in two halves, one while the other's reductions are on their way: "on" or
            "off".
        draft: a program over the same weights, or a variant by name ("lp"), that drafts tokens, which the model
            verifies; "coda" for the checkpoint's first rack and its coda; "lookup" for a text's own tokens behind its
            last few ones. Greedy tokens and those of a seed stay the same (up to rounding), and others keep their
            distribution.
        draft_tokens: at a time; by default as many as pay (runtime/batching/ahead.py).
        pipeline: each rank holds a stretch of the program, and works while the others go on with other texts, or with
            drafts of the coda of the checkpoint's first rack. Texts are the same.

    Raises:
        ValueError: if the ranks are not connected, a number is too small, there are no such drafts or not of another
            program, or a pipeline cannot do what is asked of it besides.
    """

    ranks: RankOptions = field(default_factory=RankOptions)
    program: Program | str | None = None
    max_batch: int = 8
    max_tokens: int | None = None
    blocks: int | None = None
    memory: int | None = None
    max_waiting: int = 64
    patience: float = PATIENCE_SECONDS
    dtype: str = "auto"
    decoding: str = "auto"
    low_rank: str = "auto"
    kv: str = "auto"
    halves: str = "off"
    draft: Program | str | None = None
    draft_tokens: int | None = None
    pipeline: bool = False

    def __post_init__(self) -> None:
        self._check_pipeline()
        if self.draft == CODA:
            if self.program is not None:
                raise ValueError(
                    "codas draft for the checkpoint's own program; leave the other program or the drafts out"
                )
        elif isinstance(self.draft, str) and self.draft != LOOKUP:
            named_draft(self.draft)
        elif self.draft is None and self.draft_tokens is not None:
            raise ValueError(
                "draft_tokens says how many tokens to draft; say with what, too: a program, or coda"
            )
        if self.draft_tokens and self.max_tokens and self.draft_tokens >= self.max_tokens:
            raise ValueError(
                f"draft_tokens {self.draft_tokens} are more than any text has room for behind its first token, of "
                f"{self.max_tokens} tokens at most; draft fewer"
            )
        if self.ranks.collectives == "none":
            raise ValueError(
                "collectives none leave the ranks unconnected, and their text would be wrong; use auto (surgeon bench "
                "measures with none)"
            )
        least_of = {"max_batch": 1, "max_waiting": 0, "max_tokens": 2, "blocks": 1, "draft_tokens": 1}
        for name, least in least_of.items():
            number = getattr(self, name)
            if number is not None and number < least:
                raise ValueError(f"{name} must be at least {least}, not {number}")
        if not self.patience > 0:
            raise ValueError(f"patience must be above 0 seconds, not {self.patience:g}")

    def _check_pipeline(self) -> None:
        if not self.pipeline:
            return
        if self.draft is not None:
            raise ValueError(
                "a pipeline drafts with the coda of the checkpoint's first rack, and with nothing else; leave the "
                "draft out"
            )
        if self.ranks.device != "cpu":
            raise ValueError("pipelines run on CPU ranks only, so far; use the device cpu")
        if self.ranks.compression is not None:
            raise ValueError(
                "a pipeline sends streams as they are, and sums nothing; leave the compression out"
            )
        if self.halves == "on":
            raise ValueError("halves hide reductions, and a pipeline has none; use halves off")

    @property
    def most_open(self) -> int:
        return self.max_batch + self.max_waiting


class Service(AbstractContextManager["Service"]):
    """Ranks that run one model, and the requests they work on. All methods may be called from any thread.

    Attributes:
        plan: the model and its program.
        blocks: of the cache, each for 16 tokens of one group of attentions (`cache_groups`).
        capacity: of texts in the cache.
        kernels: that compute beside matrix products, "Triton", "C++" or "none" and why.
        max_tokens: of prompt and output of a request together: the room of the model and the whole cache.
        failure: the end of the ranks (`RankFailed`), noticed within seconds also while no request is open; None while
            they run. Ranks that are stuck are noticed, and ended, while requests are open.
    """

    def __init__(
        self,
        model: str | Path | Model,
        options: ServiceOptions | None = None,
        tokenizer: Any = None,
        started: Ranks | None = None,
    ) -> None:
        """Check everything that can be checked, then start ranks and load the model.

        Args:
            model: a checkpoint folder (edited by surgeon or not), a hub name, or a model that is open.
            options: those of one rank on a CPU by default.
            tokenizer: of `transformers`; without one events have no text.
            started: the options' ranks, if there are any already (`early_ranks`); they end with the service.

        Raises:
            FileNotFoundError: if there is no such model.
            ValueError: if it cannot run so, or not within the memory; nothing is left running then.
            RankFailed: if a rank fails.
        """
        self.options = options = options or ServiceOptions()
        ranks = options.ranks.ranks
        device = options.ranks.device
        program = options.program
        shared = 1 if options.pipeline else ranks
        plan = make_plan(
            model,
            shared,
            options.max_tokens,
            program,
            device,
            halves=options.halves,
            dtype=options.dtype,
            decoding=options.decoding,
            low_rank=options.low_rank,
            kv=options.kv,
        )
        if options.pipeline:
            # Texts that fill all ranks gain nothing by drafts, and codas are for the checkpoint's own program.
            plan = with_stretches(plan, ranks, drafts=options.max_batch < ranks and program is None)
        elif options.draft == CODA:
            plan = with_coda(plan)
        elif options.draft is not None and options.draft != LOOKUP:
            plan = with_draft(plan, model, options.draft)
        drafts = 0
        if options.draft is not None:
            drafts = options.draft_tokens or MOST_AHEAD
        sizes = (options.max_batch, options.blocks, options.memory)
        here = ranks_of_this_machine(ranks)
        free: Callable[[], int] = free_bytes
        with ExitStack() as undone:
            # Asking opens a context on a GPU: only its rank does.
            if device == "cuda" and options.memory is None:
                started = started or undone.enter_context(Ranks(options.ranks))
                room: list[int] = started.call(gpu_room)
                free = partial(min, room)
            self.plan, self.blocks = choose_cache(plan, device, *sizes, here, free, drafts)
            undone.pop_all()
        warn_without_kernels(device, self.plan.dtype)
        self.kernels = kernels_used(device, self.plan.dtype)
        self.capacity = Capacity.of(self.plan, self.blocks, options.max_batch, device)
        self.max_tokens = self.capacity.longest
        as_pays = options.draft is not None and options.draft_tokens is None
        stretches = max(1, len(self.plan.stretches))
        pass_tokens = max(PASS_TOKENS[device] // stretches, options.max_batch * (1 + drafts))
        long_texts = self.plan.long_texts
        limits = Limits(
            *(options.max_batch, self.max_tokens, pass_tokens, self.plan.ends, drafts),
            long_texts=long_texts,
            as_pays=as_pays,
            looked_up=options.draft == LOOKUP,
            stretches=stretches,
            at_once=MOST_AT_ONCE[device],
        )
        self.failure: Exception | None = None
        self._tokenizer = tokenizer
        self._open: dict[int, OpenRequest] = {}
        self._numbers = count()
        self._stats = Stats(blocks=self.blocks, free_blocks=self.blocks)
        self._accounts: dict[int, dict[int, Figures]] = {}
        self._ready = self._draining = self._closed = False
        self._changed = threading.Condition(threading.RLock())
        self._ended = threading.Event()
        self._ranks = started or Ranks(options.ranks)
        self._watchdog = Watchdog(self._ranks.names, options.patience)
        self._thread = threading.Thread(
            target=self._receive, args=(limits,), name="surgeon-service", daemon=True
        )
        try:
            self._start()
        except BaseException:  # an interruption, too
            self.close()
            raise

    def _start(self) -> None:
        if self.plan.stretches:
            connect(self._ranks)
        self._ranks.call(load, self.plan)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self.failure)
        if self.failure is not None:
            raise self.failure
        threading.Thread(target=self._watch, name="surgeon-watchdog", daemon=True).start()

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
        sampling = sampling or Sampling()
        request = Request(next(self._numbers), tuple(map(int, prompt)), sampling)
        check_length(request, self.max_tokens)
        if any(not 0 <= token < self.plan.vocabulary for token in request.prompt):
            raise ValueError(
                f"token ids must lie in 0..{self.plan.vocabulary - 1}, the model's vocabulary"
            )
        if sampling.stop and self._tokenizer is None:
            raise ValueError("stop texts cannot be found without a tokenizer; give the service one")
        if sampling.prompt_logprobs is not None and self.plan.stretches:
            raise ValueError(
                "a pipeline does not say how likely prompts are; use ranks that share every layer"
            )
        opened = OpenRequest(request, self._tokenizer)
        with self._changed:
            if self.failure is not None:
                raise self.failure
            if self._closed or self._draining:
                raise ValueError("the service is ending and takes no more requests")
            if len(self._open) >= self.options.most_open:
                raise QueueFull(f"{self.options.most_open} requests are open already; try again later")
            self._open[request.id] = opened
            self._post(request)
        return opened.stream

    def cancel(self, request: int) -> bool:
        """End a request; its stream ends with "cancelled". False if it has ended already."""
        with self._changed:
            if request not in self._open:
                return False
            self._post(Cancel(request))
            return True

    def stats(self) -> Stats:
        """Stats as of the last pass or cancellation; answers at once, also after a failure."""
        return self._stats

    def figures(self) -> list[Figures]:
        """Figures of all passes so far, by rank; asks the ranks, which takes up to the duration of a pass.

        Raises:
            RankFailed: if a rank has failed.
            ValueError: if the service is closed.
        """
        ticket = next(self._numbers)
        ranks = self.plan.ranks
        with self._changed:
            accounts: dict[int, Figures] = {}
            self._accounts[ticket] = accounts
            self._post(Report(ticket))
            self._changed.wait_for(lambda: len(accounts) == ranks or self._closed or self.failure)
            del self._accounts[ticket]
            if len(accounts) < ranks:
                raise self.failure or ValueError("the service is closed")
        return [accounts[rank] for rank in range(ranks)]

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until those open have ended; False if they have not within the seconds."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._open, timeout)

    def close(self) -> None:
        """Cancel what is open and end the ranks."""
        with self._changed:
            self._closed = True
        self._ended.set()
        self._ranks.kill()
        if self._thread.ident is not None:  # it has been started
            self._thread.join()
        self._ranks.close()

    def _post(self, message: Request | Cancel | Report) -> None:
        """Send to rank 0. If it is gone, the other thread finds out why, and tells all who wait."""
        with suppress(OSError):
            self._ranks.post(0, message)

    def _receive(self, limits: Limits) -> None:
        """Pass on the ranks' messages in a thread, until they end."""
        failure: Exception | None = None
        try:
            self._ranks.call(serve, self.blocks, limits, self._watchdog.interval, notify=self._hear)
        except Exception as error:  # noqa: BLE001 - everybody who waits is told
            failure = error
        with self._changed:
            if not self._closed:
                self.failure = self.failure or failure
            left = list(self._open.values())
            self._open = {}
            self._changed.notify_all()
        self._ended.set()
        for opened in left:
            opened.stream.put(self.failure or opened.cancelled_event())

    def _watch(self) -> None:
        """End ranks that are stuck, in a thread; without the lock, which a sender may hold."""
        last = time.monotonic()
        while not self._ended.wait(self._watchdog.interval):
            now = time.monotonic()
            reason = self._watchdog.check(now - last, busy=bool(self._open or self._accounts))
            last = now
            if reason is not None:
                self.failure = RankFailed(reason)
                self._ranks.kill(reason)
                return

    def _hear(self, message: Progress | Account | Pulse) -> None:
        if isinstance(message, Pulse):
            self._watchdog.hear(message)
            return
        if isinstance(message, Account):
            with self._changed:
                if message.ticket in self._accounts:
                    self._accounts[message.ticket][message.rank] = message.figures
                self._changed.notify_all()
            return
        self._stats = Stats(*message.stats)
        if not self._ready:
            with self._changed:
                self._ready = True
                self._changed.notify_all()
        for output in message.outputs:
            opened = self._open.get(output.request)
            if opened is None:  # a stop text has ended it already
                continue
            event = opened.event(output)
            if isinstance(event, Exception) or event.finish_reason is not None:
                with self._changed:
                    del self._open[output.request]
                    if output.finish_reason is None:
                        self._post(Cancel(output.request))
                    self._changed.notify_all()
            opened.stream.put(event)

    def __exit__(self, *_: object) -> None:
        self.close()
