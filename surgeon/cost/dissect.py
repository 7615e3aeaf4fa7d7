"""The runtime's own passes, taken apart: what each kind of work in them took on one rank.

A `DissectedEngine` computes what a `RankEngine` does, and adds up the seconds of matrix products, of attention, of
everything else in a sublayer, of collectives and of the vocabulary's ends. On a CPU these are seconds of the process;
on a GPU they are those between two events of its stream.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surgeon.cost.workload import Workload
from surgeon.language.execute import Partial, Pending
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.batching.sequence import Row
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.comm.collectives import Collectives
from surgeon.runtime.kernels.recording import spanned
from surgeon.runtime.model.attending import Pass
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.layers import Attention, FeedForward
from surgeon.runtime.model.mixture import MixtureOfExperts
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.program import RankMachine, RankProgram, WorkAhead
from surgeon.runtime.model.rank_model import Results
from surgeon.runtime.plan.placement import Group, Part
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.worker import complete

# What is timed: sublayers, and inside them norms, the maps that read the stream, those that write to it, and attention.
SUBLAYER = "sublayer"
NORM = "norm"
READING = "reading"
WRITING = "writing"
ATTENDING = "attending"
STARTING, WAITING = "starting", "waiting"  # of the collectives of steps
EMBEDDING = "embedding"
HEAD = "head"
BEST = "best"
PRODUCTS: dict[type, dict[str, str]] = {  # what these are called
    Attention: {READING: "qkv", WRITING: "o"},
    FeedForward: {READING: "up", WRITING: "down"},
    MixtureOfExperts: {READING: "router", WRITING: "experts"},  # which read, too
}
EMPTY_CALLS, TURNS = 100, 20  # to find out what timing itself takes: the least of some turns
LEFT = 0.02  # of a time, at least, when those that timing took are taken off it


@dataclass(frozen=True)
class PassParts:
    """One pass on one rank.

    Attributes:
        decode: whether it added one token to each text.
        cached: tokens of each text before them, the mean.
        seconds: from the end of the pass before to its own end.
        parts: seconds by what took them, and for sublayers by kind ("sublayer A"); how often it happened with it.
    """

    decode: bool
    cached: float
    seconds: float
    parts: dict[str, tuple[float, int]]


class Stopwatch:
    """Adds up seconds, and how often, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._events: list[tuple[str, Any, Any]] = []
        self.own = 0.0
        nothing = self.wrap("nothing", lambda: None)
        found = []
        for _ in range(TURNS):  # other work interrupts some of them, each by more than many calls take
            for _ in range(EMPTY_CALLS):
                nothing()
            seconds, times = self.take().pop("nothing")
            found.append(seconds / times)
        self.own = min(found)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, every call of which is timed."""
        if self.device.type == "cuda":
            return self._with_events(name, function)
        now = time.perf_counter

        def timed(*arguments: Any) -> Any:
            began = now()
            with spanned(name):
                result = function(*arguments)
            self.add(name, now() - began)
            return result

        return timed

    def add(self, name: str, seconds: float) -> None:
        """Count something once."""
        total = self.totals[name]
        total[0] += seconds
        total[1] += 1

    def _with_events(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            result = function(*arguments)
            last.record()
            self._events.append((name, first, last))
            return result

        return timed

    def take(self) -> dict[str, tuple[float, int]]:
        """Seconds without those that timing takes, and how often, since the last time this was asked.

        A little of each is left, though a short time that is often measured may be less than timing usually takes.
        """
        if self._events:
            torch.cuda.synchronize(self.device)
            for name, first, last in self._events:
                total = self.totals[name]
                total[0] += first.elapsed_time(last) / 1e3
                total[1] += 1
            self._events.clear()
        found = {
            name: (max(seconds - times * self.own, LEFT * seconds), int(times))
            for name, (seconds, times) in self.totals.items()
        }
        self.totals.clear()
        return found


class DissectedEngine(RankEngine):
    """A rank's engine that notes what kinds of work its passes' time goes to."""

    def __init__(self, plan: Plan, collectives: Collectives, device: torch.device) -> None:
        super().__init__(plan, collectives, device)
        self.watch = watch = Stopwatch(device)
        self.passes_seen: list[PassParts] = []
        model = self.model
        model.machine = partial(_dissected, watch)
        model.watcher = self._replayed
        # All tokens go through all nodes, so that sublayers of a kind take the same time.
        model.attended = len(model.program.nodes), len(model.work)
        for sublayer in model.sublayers.values():
            kind = "A" if isinstance(sublayer, Attention) else "F"
            for what, attribute in ((NORM, "norm"), *PRODUCTS[type(sublayer)].items()):
                setattr(sublayer, attribute, watch.wrap(f"{what} {kind}", getattr(sublayer, attribute)))
        vocabulary: Any = model.vocabulary
        for name, method in ((EMBEDDING, "embed"), (HEAD, "logits"), (BEST, "best")):
            setattr(vocabulary, method, watch.wrap(name, getattr(vocabulary, method)))
        model.ends.final_norm = watch.wrap(NORM, model.ends.final_norm)  # type: ignore[assignment]

    def step(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        """One forward pass, which extends the cache."""
        began = self._since or time.perf_counter()
        results = super().step(rows, cache)
        ended = self._since or time.perf_counter()
        cached = sum(row.start for row in rows) / len(rows)
        decode = self.model.counts is self.figures.decode
        self.passes_seen.append(PassParts(decode, cached, ended - began, self.watch.take()))
        return results

    def _replayed(self, spans: Sequence[tuple[Any, float, float]]) -> None:
        """Count what a recorded pass has computed; it takes no time to time it."""
        for name, began, ended in spans:
            self.watch.add(name, ended - began + self.watch.own)


def _dissected(
    watch: Stopwatch, program: RankProgram, shared: Pass, group: Group, work: WorkAhead
) -> _DissectedMachine:
    """What runs steps on a group of ranks."""
    attend = watch.wrap(ATTENDING, shared.attend)
    raw = shared.attend_raw
    timed = replace(shared, attend=attend, attend_raw=raw and watch.wrap(ATTENDING, raw))
    return _DissectedMachine(program, timed, group, work, watch)


class _DissectedMachine(RankMachine):
    """One pass on one rank, whose sublayers and collectives are timed."""

    def __init__(self, program: RankProgram, shared: Pass, group: Group, work: WorkAhead, watch: Stopwatch) -> None:
        super().__init__(program, shared, group, work)
        output = super()._output
        self._by_kind = {kind: watch.wrap(f"{SUBLAYER} {kind}", output) for kind in "AF"}
        self._start = watch.wrap(STARTING, super().reduce)
        self._watch = watch

    def _output(self, part: Part, stream: Tensor) -> tuple[Part, Tensor]:
        found: tuple[Part, Tensor] = self._by_kind[part.sublayer.kind](part, stream)
        return found

    def add(self, stream: Tensor, output: Tensor) -> Tensor:
        """The sum, and nothing normed with it: norms are timed."""
        return stream + output

    def reduce(self, partial: Partial) -> Pending:
        pending: Pending = self._watch.wrap(WAITING, self._start(partial))
        return pending


def load_dissected(rank: Rank, plan: Plan, name: str) -> None:
    """Runs on a rank: load its slices of a model, and keep the engine under a name."""
    rank.engines[name] = DissectedEngine(plan, rank.collectives, rank.device)


def run_dissected(rank: Rank, name: str, load: Workload) -> list[PassParts]:
    """Runs on a rank: compute some texts, and say where the time of each pass went."""
    engine: DissectedEngine = rank.engines[name]
    engine.passes_seen = []
    engine.watch.take()
    longest = engine.plan.max_tokens
    long_texts = engine.plan.long_texts
    limits = Limits(load.batch, longest, pass_tokens=load.batch * load.prompt, long_texts=long_texts)
    requests = load.requests(engine.plan.vocabulary)
    complete(rank, requests, load.batch * blocks_for(load.length), limits, name)
    return engine.passes_seen
