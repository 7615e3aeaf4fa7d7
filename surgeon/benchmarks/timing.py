"""Timing of forward passes on every rank: computing, and waiting for other ranks.

A `TimedEngine` is a `RankEngine` that adds up how long its process waited in collectives, by the machine's monotonic
clock in seconds, so that ranks can be compared. A GPU goes on while its process waits or launches more: there
`torch.profiler` tells when nothing but collectives ran, where that is asked for.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from surgeon.language.program import Node
from surgeon.processes.files import whole_file
from surgeon.runtime.batching.request import Request, Rows, UndefinedLogits
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.comm.collectives import (
    Around,
    Collectives,
    Counts,
    EmulatedLink,
    Link,
    Phase,
    Unconnected,
    Wait,
)
from surgeon.runtime.kernels.recording import mark_calls
from surgeon.runtime.model.engine import RankEngine, ways_through
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.rank_model import Results
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.worker import complete, keep

PASS = "pass"  # what a profile calls one
COLLECTIVE = re.compile("nccl|all_reduce|barrier", re.IGNORECASE)  # in the names of their kernels
ACTIVITIES = [ProfilerActivity.CPU, ProfilerActivity.CUDA]

now = time.perf_counter  # one clock for all processes of a machine on Linux
# Texts, the blocks of a cache for them, and how they are computed together.
Load = tuple[list[Request], int, Limits]


@dataclass(slots=True)
class PassTiming:
    """One forward pass on one rank.

    Attributes:
        decode: whether it added one token to each text.
        began: when the rank turned to it; on rank 0 the end of the pass before.
        waiting: seconds in collectives, starting them included; None where that cannot be told.
        layers, vocabulary: collectives of steps and forks, and of the embedding and the output head.
        hidden: seconds of collectives beside computing; of profiled passes on GPUs.
    """

    decode: bool
    tokens: int
    began: float
    ended: float
    waiting: float | None
    layers: Counts
    vocabulary: Counts
    hidden: float | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class RankRun:
    """The passes of one rank while some texts were continued, from when it was asked to."""

    began: float
    passes: list[PassTiming]


@dataclass
class PassRecorder:
    """Adds up a pass's waiting, and holds the passes before it.

    Attributes:
        phase: of the pass, which tells collectives of the vocabulary from others.
        marking: whether exchanges are timed, as the process comes to them.
        what: being computed.
        profiled: whether steps have names in a profile.
    """

    phase: Phase = field(default_factory=Phase)
    marking: bool = True
    what: str = ""
    profiled: bool = False
    passes: list[PassTiming] = field(default_factory=list)
    waiting: float = 0.0

    @contextmanager
    def during(self, node: Node) -> Iterator[None]:
        """Name a step, and what is sent of it."""
        self.what = str(node)
        with in_profile(node, self.profiled):
            yield

    def add_replay(self, spans: Sequence[tuple[Any, float, float]]) -> None:
        """Add the spans of a pass that is computed from a recording."""
        for sent, began, ended in spans:
            if sent:
                self.waiting += ended - began


class TimedCollectives(Around):
    """Other collectives, whose every call is timed."""

    def __init__(self, inner: Collectives, recorder: PassRecorder) -> None:
        super().__init__(inner)
        self.recorder = recorder

    def all_reduce(self, tensor: Tensor, counts: Counts, at_once: bool = False) -> Wait:
        """Start summing a tensor over the group; waiting on the result gives the sum."""
        return self._time("all-reduce", self.inner.all_reduce, tensor, counts, at_once)

    def start_all_gather(self, tensor: Tensor, counts: Counts, at_once: bool = False) -> Wait:
        """Start gathering the group's tensors; waiting on the result gives them joined."""
        return self._time("all-gather", self.inner.start_all_gather, tensor, counts, at_once)

    def _time(
        self,
        kind: str,
        start: Callable[[Tensor, Counts, bool], Wait],
        tensor: Tensor,
        counts: Counts,
        at_once: bool,
    ) -> Wait:
        recorder = self.recorder
        if not recorder.marking:  # a GPU's streams are those that it has without being timed
            return start(tensor, counts, at_once)
        profiled = recorder.profiled
        what = recorder.what
        if counts is recorder.phase.vocabulary:
            what = "of the vocabulary"
        before = counts.bytes
        sent: list[int] = []
        began = now()
        with mark_calls(sent), in_profile(f"start {kind} {what}", profiled):
            wait = start(tensor, counts, False)  # waiting is apart
        started = now()
        if counts.bytes == before:
            return wait
        sent.append(counts.bytes - before)
        recorder.waiting += started - began

        def timed_wait() -> Tensor:
            waited = now()
            with mark_calls(sent), in_profile(f"wait for {kind} {what}", profiled):
                result = wait()
            recorder.waiting += now() - waited
            return result

        return timed_wait


class TimedEngine(RankEngine):
    """A rank's engine that times its passes."""

    def __init__(self, plan: Plan, rank: Rank, collectives: Collectives) -> None:
        self.recorder = PassRecorder(marking=rank.device.type == "cpu")
        timed = TimedCollectives(collectives, self.recorder)
        super().__init__(plan, timed, rank.device, rank.engines.values())
        model = self.model
        model.program.watched = self.recorder.during
        model.watcher = self.recorder.add_replay

    def step(self, rows: Rows, cache: PagedCache) -> Results:
        began = self._since or now()
        recorder = self.recorder
        recorder.phase = phase = self._phase(rows)
        with phase.apart(), in_profile(PASS, recorder.profiled):
            results = super().step(rows, cache)
            sent = phase.layers, phase.vocabulary
        phase.add(sent)
        waiting = None
        if recorder.marking:
            waiting = recorder.waiting
        tokens = sum(len(row.tokens) for row in rows)
        ended = self._since or now()
        recorder.passes.append(
            PassTiming(phase is self.figures.decode, tokens, began, ended, waiting, *sent)
        )
        recorder.waiting = 0.0
        return results


def load_timed(
    rank: Rank, plan: Plan, name: str, connected: bool = True, link: Link | None = None
) -> None:
    """Load a rank's slices of a model, and keep the timed engine under a name.

    Args:
        connected: whether ranks wait for each other and add up; without, their results are wrong.
        link: emulated for this engine only.
    """
    collectives = rank.collectives
    if rank.settings.options.ranks > 1:
        if not connected:
            collectives = Unconnected(rank.rank, tuple(range(rank.settings.options.ranks)))
        elif link is not None:
            collectives = EmulatedLink(collectives, link)
    keep(rank, name, TimedEngine(plan, rank, collectives))


def run_timed(
    rank: Rank,
    requests: list[Request],
    blocks: int,
    limits: Limits,
    name: str,
    profiled: bool = False,
) -> RankRun:
    """Continue texts on a rank until all have ended; profiled, passes on GPUs have what they wait, too."""
    engine: TimedEngine = rank.engines[name]
    recorder = engine.recorder
    recorder.passes = []
    recorder.waiting = 0.0
    began = now()
    with profile(activities=ACTIVITIES) if profiled else nullcontext() as profiler:
        recorder.profiled = profiled
        outputs, _ = complete(rank, requests, blocks, limits, name)
        recorder.profiled = False
    if profiler is not None:
        collectives = collectives_of_passes(profiler.events() or ())
        for one, (waiting, hidden) in zip(recorder.passes, collectives, strict=True):
            one.waiting = waiting
            one.hidden = hidden
    if any(output.finish_reason == "undefined" for output in outputs):
        raise UndefinedLogits(
            f"the logits of {name} are not finite (NaN or infinity); are the weights damaged?"
        )
    return RankRun(began, recorder.passes)


def collectives_of_passes(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Seconds of each pass of a profile in which a GPU did collectives and nothing else, and those beside computing."""
    seen = list(events)
    passes = [one.time_range for one in seen if one.name == PASS and one.device_type.name == "CPU"]
    kernels = [one for one in seen if one.device_type.name == "CUDA" and not one.is_user_annotation]
    sending = [one for one in kernels if COLLECTIVE.search(one.name)]
    computing = [one for one in kernels if not COLLECTIVE.search(one.name)]
    passes.sort(key=lambda span: float(span.start))
    busy, sent, computed = (
        _covered_times([one.time_range for one in some], passes)
        for some in (kernels, sending, computing)
    )
    return [
        ((all_ - own) / 1e6, (others + own - all_) / 1e6)
        for all_, others, own in zip(busy, sent, computed, strict=True)
    ]


def _covered_times(spans: Sequence[Any], passes: Iterable[Any]) -> list[float]:
    """Sum up for each pass the time in which there was any of some spans, of which a profile may have 100,000."""
    apart: list[tuple[float, float]] = []  # in their order, joined where they overlap
    for one in sorted(spans, key=lambda span: float(span.start)):
        begin = one.start
        end = one.end
        if apart and begin <= apart[-1][1]:
            begin, before = apart.pop()
            end = max(before, end)
        apart.append((begin, end))
    found = []
    for within in passes:
        first = bisect_left(apart, within.start, key=itemgetter(1))
        last = bisect_left(apart, within.end, key=itemgetter(0))
        inside = apart[first:last]
        found.append(sum(min(end, within.end) - max(begin, within.start) for begin, end in inside))
    return found


def in_profile(what: object, wanted: bool) -> AbstractContextManager[object]:
    """Name a block in a profile of `torch.profiler`."""
    if wanted:
        return record_function(str(what))
    return nullcontext()


def trace_files(path: Path, ranks: int) -> tuple[Path, ...]:
    """A file for each rank, named after one for all."""
    return tuple(path.with_name(f"{path.stem}.rank{rank}{path.suffix}") for rank in range(ranks))


def write_profile(rank: Rank, loads: Mapping[str, Load], file: str) -> None:
    """Continue every program's texts on a rank, and write a Chrome trace by `torch.profiler`.

    They are continued once before, when kernels are chosen and, on GPUs, passes are recorded. On CPUs none are replayed
    from recordings, so that steps and collectives have names.
    """
    on_gpu = rank.device.type == "cuda"
    for name, load in loads.items():
        engine: TimedEngine = rank.engines[name]
        if not on_gpu:
            engine.ways = tuple(way for way in engine.ways if not way.holds_caches)
        complete(rank, *load, name)
    with profile(activities=ACTIVITIES[: 1 + on_gpu]) as profiler:
        for name, load in loads.items():
            engine = rank.engines[name]
            engine.recorder.profiled = True
            with record_function(name):
                complete(rank, *load, name)
            engine.recorder.profiled = False
            if not on_gpu:
                engine.ways = ways_through(engine.model)
    own = trace_files(Path(file), rank.settings.options.ranks)[rank.rank]
    with whole_file(own) as beside:
        profiler.export_chrome_trace(str(beside))
