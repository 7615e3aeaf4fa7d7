"""Measuring the programs of a plan on some windows of text.

On a CPU the windows are shared out to threads, lanes, each of which computes on one core. Threads that share a product
wait for each other thousands of times a second, and mostly so where the machine has something else to do. Threads with
windows of their own meet at the end of a pass.

With several processes, one for each GPU (or for a share of a machine's cores), each worker loads the model and measures
a part of the programs: neighbours in the order of the shared plan, which have most in common, so that little of the
sharing is lost. Measurements come back through a queue.
"""

from __future__ import annotations

import heapq
import multiprocessing
import os
import queue
import signal
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.engine.machine import (
    PlanMachine,
    lanes_for,
    raise_not_finite,
    run_plan,
    streaming_room,
    windows_at_once,
)
from surgeon.analysis.engine.prefixes import PlanStates, StateCache, States
from surgeon.analysis.engine.sharing import Extend, Reach, RunStep, SharedPlan, Task, reads, share
from surgeon.analysis.subject import Subject, load_for_analysis
from surgeon.errors import is_out_of_memory
from surgeon.language.program import Program, steps_of
from surgeon.language.sublayer import FEED_FORWARD, Sublayer
from surgeon.machine import Beside, one_at_a_time, stay_below, torch_threads
from surgeon.models.edit import restore
from surgeon.models.weights import FactorSource, TruncatedSVD
from surgeon.opened import open_model, streamed_layers
from surgeon.processes.children import when_parent_ends
from surgeon.processes.journal import Journal, read_journal
from surgeon.progress import progress
from surgeon.quality.head import (
    ByWindow,
    OutputHead,
    ReferencePredictions,
    TextReferences,
    concatenate_windows,
)
from surgeon.quality.summary import ACCEPTANCES, Values

_AT_ONCE = -1  # the turn of a task that needs no weights


def by_layer(plan: SharedPlan, first: Program | None = None) -> SharedPlan:
    """Order the tasks in sweeps over the layers, with one program reached before every other, if it is given."""
    followers: dict[int, list[int]] = defaultdict(list)  # by register, the tasks that read it
    missing = [len(reads(task)) for task in plan.tasks]  # registers that a task still waits for
    for index, task in enumerate(plan.tasks):
        for register in reads(task):
            followers[register].append(index)
    tasks: list[Task] = []
    early: list[Task] = []  # programs that are reached before the first one
    # Tasks that are ready, by their turns in this sweep and in the next one; of equal turns the oldest goes first.
    sweep = list[tuple[int, int, int]]()
    following = list[tuple[int, int, int]]()
    here = 0
    age = count()
    written = [0]
    while written or sweep or following:
        for index in (index for register in written for index in followers[register]):
            missing[index] -= 1
            if not missing[index]:
                turn = turn_of(plan.tasks[index])
                in_this_one = turn == _AT_ONCE or turn >= here
                heapq.heappush(sweep if in_this_one else following, (turn, next(age), index))
        if not sweep:
            sweep = following
            following = []
        turn, _, index = heapq.heappop(sweep)
        here = here if turn == _AT_ONCE else turn
        task = plan.tasks[index]
        written = []
        if not isinstance(task, Reach):
            written = [task.target]
        elif first is not None and task.program != first:
            early.append(task)
            continue
        tasks.append(task)
        if isinstance(task, Reach):
            tasks += early
            early = []
            first = None
    return SharedPlan.of([*tasks, *early])


def turn_of(task: Task) -> int:
    """The first turn of a task's sublayers in a sweep."""
    sublayers: Sequence[Sublayer] = ()
    if isinstance(task, RunStep):
        sublayers = task.step.sublayers
    elif isinstance(task, Extend):
        sublayers = [sublayer for step in steps_of(task.branch) for sublayer in step.sublayers]
    turns = (2 * min(sublayer.layers) + (sublayer.kind == FEED_FORWARD) for sublayer in sublayers)
    return min(turns, default=_AT_ONCE)


T = TypeVar("T")
GoOn = Callable[[], None]
References = dict[range, ReferencePredictions] | TextReferences  # by windows


@dataclass(frozen=True)
class MeasuredWindows:
    """One program's quality on some of the windows.

    Attributes:
        start: the first of these windows.
    """

    program: Program
    start: int
    quality: ByWindow


@dataclass(frozen=True)
class MeasureOptions:
    """Options of measuring programs; checked as they are made.

    Attributes:
        at_once: how many windows are run together; on a CPU they are shared out to torch's threads.
        first: how many of them at first, if fewer; then as many as were run before, so that programs can be found
            done early.
        is_done: tells which programs need no measurement on some windows.
        ran: called with the work done: sublayers times the share of the windows they ran on.
        references: the original's predictions, for later calls on the same windows.
        memory: for a model whose weights are streamed, the limit in bytes on the memory of the whole process.
        folder: for such a model's hidden states that do not fit into it.
        blocks: into how many parts each window is cut for `blocks`.
        sampled: whether programs get their sampled acceptance; known references have to be for it, too.
        cache: states of earlier calls on the same windows of the same model; not where weights are streamed.
        factors: of matrices that programs have ranks for; by default made anew in every call.
    """

    at_once: int
    is_done: Callable[[Program, range], bool] = lambda *_: False
    ran: Callable[[float], Any] = lambda _: None
    references: References = field(default_factory=dict)
    memory: int | None = None
    folder: Path | None = None
    first: int | None = None
    blocks: int = 0
    sampled: bool = False
    cache: StateCache | None = None
    factors: FactorSource | None = None

    def __post_init__(self) -> None:
        for name, number in (("at_once", self.at_once), ("first", self.first), ("memory", self.memory)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, not {number}")


def measure(
    model: PreTrainedModel, ids: Tensor, plan: SharedPlan, options: MeasureOptions
) -> Iterator[MeasuredWindows]:
    """Measure the quality of a plan's programs, some windows at a time.

    Where memory turns out too small for so many windows, half as many are run together from there on. ValueError if the
    original's predictions are not finite.

    Args:
        model: unedited; it is left as it is.
        ids: (windows, tokens).
        plan: whose first program is the original: the others' divergence is from it.
    """
    run = _Run(model, ids, plan, options)
    at_once = options.at_once
    cache = options.cache
    finished: dict[Program, int] = {}  # until which window, where some windows had to be given up
    start = 0
    while start < len(ids):
        size = min(at_once, max(options.first or at_once, start))
        windows = range(start, min(start + size, len(ids)))
        wanted = [
            p
            for p in plan.programs
            if not options.is_done(p, windows) and finished.get(p, 0) < windows.stop
        ]
        try:
            for measured in run.measure(windows, wanted):
                yield measured
                finished[measured.program] = windows.stop
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if cache is not None and cache.bytes:
                warnings.warn("out of memory; dropping states cached for later programs", stacklevel=2)
                cache.shrink(cache.bytes // 2)
                continue
            if len(windows) == 1:
                raise
            at_once = len(windows) // 2
            warnings.warn(
                f"out of memory with {len(windows)} windows together; going on with {at_once}",
                stacklevel=2,
            )
        else:
            start = windows.stop
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def streams_after(
    model: PreTrainedModel, ids: Tensor, windows: range, plan: SharedPlan, options: MeasureOptions
) -> Iterator[tuple[Program, Tensor]]:
    """Yield a plan's programs with the stream after each, (windows, tokens, hidden), before the final norm."""
    run = _Run(model, ids, plan, options)
    run.plan_for(plan.programs)
    yield from run.streams(ids[windows.start : windows.stop].to(model.device), windows)


@dataclass(eq=False)
class _Run:
    model: PreTrainedModel
    ids: Tensor
    whole: SharedPlan
    options: MeasureOptions

    def __post_init__(self) -> None:
        self.original = self.whole.programs[0]
        self.head = OutputHead(self.model)
        self.streamed = streamed_layers(self.model) is not None
        self.cache = None if self.streamed else self.options.cache
        self.factors = self.options.factors or TruncatedSVD(remembers=True)
        self.ran = one_at_a_time(self.options.ran)
        # Threads would read or factorise the same weights.
        self.shares = not self.streamed and not any(
            s.ranks for program in self.whole.programs for s in program.sublayers()
        )
        self.lock = Lock()
        self.planned: Collection[Program] = ()
        self.plan = self.whole  # of these
        self.numbers: dict[int, int] = {}  # of its prefixes, by register, where states are kept

    def measure(self, windows: range, wanted: Collection[Program]) -> Iterator[MeasuredWindows]:
        """Some programs on some windows, the original first; it is run where its predictions are not known."""
        if not wanted:
            return
        if self.shares:
            count = lanes_for(self.model.device, self.ids.shape[1], len(windows))
        else:
            count = 1
        parts = parts_of(windows, count)
        running = [program for program in wanted if program != self.original]
        if not all(part in self.options.references for part in parts):
            running = [self.original, *running]
        elif self.original in wanted:
            qualities = [self._with_blocks(self.options.references[part].quality) for part in parts]
            yield MeasuredWindows(self.original, windows.start, concatenate_windows(qualities))
        if running:
            self.plan_for(running)
            for program, found in side_by_side([partial(self._lane, part) for part in parts]):
                if program in wanted:
                    yield MeasuredWindows(program, windows.start, concatenate_windows(found))

    def plan_for(self, running: Collection[Program]) -> None:
        """Take the part of the plan that reaches these programs, in its order."""
        if running == self.planned:
            return
        self.plan = self.whole.only(frozenset(running))
        if self.streamed:  # all others are compared with the original
            self.plan = by_layer(self.plan, self.original if self.original in running else None)
        if self.cache is not None:
            self.numbers = self.cache.prefixes.registers(self.plan)
        self.planned = running

    def _lane(self, windows: range, go_on: GoOn) -> Iterator[tuple[Program, ByWindow]]:
        chunk = self.ids[windows.start : windows.stop].to(self.model.device)
        references = self.options.references
        for program, stream in self.streams(chunk, windows, go_on):
            if program == self.original:
                reference = self.head.reference(stream, chunk, self.options.sampled)
                with self.lock:
                    references[windows] = reference
                if not reference.quality["nll"].isfinite().all():
                    raise_not_finite(self.model, chunk)
                found = self._with_blocks(reference.quality)
            else:
                found = self.head.compare(stream, references[windows], self.options.blocks)
            yield program, {name: values.cpu() for name, values in found.items()}

    def streams(
        self, chunk: Tensor, windows: range, go_on: GoOn = lambda: None
    ) -> Iterator[tuple[Program, Tensor]]:
        """The planned programs with the stream after each, (windows, tokens, hidden), as they are reached."""
        cache_bytes = 0
        states_bytes = None
        if self.streamed:
            cache_bytes, states_bytes = streaming_room(
                self.model, self.plan, chunk.numel(), self.options.memory
            )
        machine = PlanMachine(self.model, chunk, cache_bytes, self.factors)
        plan = self.plan
        cached = None
        if self.cache is not None:
            cached = PlanStates(self.cache, self.plan, self.numbers, windows)
            plan = cached.plan

        def ran(sublayers: int) -> None:
            go_on()
            self.ran(sublayers * len(windows) / len(self.ids))

        with States(plan, states_bytes, self.options.folder) as states:
            yield from run_plan(plan, machine, ran, states, cached)

    def _with_blocks(self, own: ByWindow) -> ByWindow:
        """The original's quality, which does not diverge from itself in any part of its windows."""
        blocks = self.options.blocks
        found = {name: values.cpu() for name, values in own.items()}
        if blocks:
            found["blocks"] = found["nll"].new_zeros(len(found["nll"]), blocks)
        return found


def parts_of(windows: range, count: int) -> list[range]:
    """Windows one after the other in about equal parts."""
    bounds = [windows.start + len(windows) * part // count for part in range(count + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def side_by_side(
    lanes: Sequence[Callable[[GoOn], Iterator[tuple[Program, T]]]],
) -> Iterator[tuple[Program, list[T]]]:
    """Yield the findings of several lanes on each program, in their order, as soon as all of them have it.

    Every lane runs in a thread of its own, where torch has one thread; a single one runs in this thread. Lanes call
    what they are given between their parts, which ends them where the rest is no longer wanted.
    """
    if len(lanes) == 1:
        yield from ((program, [found]) for program, found in lanes[0](lambda: None))
        return
    found: dict[Program, dict[int, T]] = {}
    news: SimpleQueue[Any] = SimpleQueue()  # what a lane has found of a program; at its end, its number

    def work(number: int, go_on: GoOn) -> None:
        try:
            for program, value in lanes[number](go_on):
                news.put((number, program, value))
        finally:
            news.put(number)

    with torch_threads(1), ExitStack() as running:
        works = [running.enter_context(Beside(partial(work, number))) for number in range(len(lanes))]
        left = len(works)
        while left:
            new = news.get()
            if isinstance(new, int):
                left -= 1
                works[new].result()
                continue
            number, program, value = new
            parts = found.setdefault(program, {})
            parts[number] = value
            if len(parts) == len(lanes):
                yield program, [parts[number] for number in range(len(lanes))]
                del found[program]


# Rows.
_DONE = 2
_ACCEPTED = slice(3, 3 + len(ACCEPTANCES))


@dataclass(eq=False)
class ProgramJournal(Journal):
    """Per-window numbers of programs.

    Attributes:
        windows: how many windows are measured.
        sampled: whether a program without its sampled acceptance is measured again.
    """

    windows: int = field(kw_only=True)
    sampled: bool = field(default=False, kw_only=True)
    _values: dict[str, Values] = field(default_factory=dict, init=False)

    def add_new(self, measured: Iterable[MeasuredWindows], windows: Sequence[int]) -> None:
        """Keep new measurements; `windows` are the numbers of those that were measured."""
        for one in measured:
            part = windows[one.start : one.start + len(one.quality["nll"])]
            if not self.is_done(one.program, part):
                numbers = {name: tensor.tolist() for name, tensor in one.quality.items()}
                self.keep({"program": str(one.program), "windows": list(part)} | numbers)

    def is_done(self, program: Program, windows: Sequence[int]) -> bool:
        values = self._values.get(str(program))
        wanted = [_DONE, -1] if self.sampled else [_DONE]
        return values is not None and not np.isnan(values[wanted][:, list(windows)]).any()

    def acceptances(self, program: Program, windows: Sequence[int]) -> Values:
        return self._values[str(program)][_ACCEPTED, list(windows)]

    def values(self, program: Program, windows: Sequence[int]) -> tuple[Values, Values]:
        """Negative log-likelihood and divergence of a program on windows it was measured on, each (windows,)."""
        nll, divergence, done, *_ = self._values[str(program)][:, list(windows)]
        assert not np.isnan(done).any(), "asked for a program on windows that it was not measured on"
        return nll, divergence

    def take(self, line: Any) -> None:
        take_program(line, self._values, self.windows)


def take_program(line: Any, values: dict[str, Values], windows: int) -> None:
    """Take in a line about a program.

    Rows of its nll, its divergence, 1 where it was measured, else NaN, and its acceptances, NaN where there are none.
    """
    # The third row, so that a NaN that was measured is not taken for a gap.
    found = values.setdefault(line["program"], np.full((_ACCEPTED.stop, windows), np.nan))
    here = line["windows"]
    found[0, here] = line["nll"]
    found[1, here] = line["divergence"]
    found[_DONE, here] = 1.0
    for row, name in enumerate(ACCEPTANCES, start=_ACCEPTED.start):
        found[row, here] = line.get(name, np.nan)


def read_programs(path: Path, work: str) -> tuple[dict[str, Any], dict[str, Values]]:
    """Read a journal's identity, and its numbers by the programs' texts, as `take_program` has them."""
    values: dict[str, Values] = {}

    def take(line: Any, identity: dict[str, Any]) -> None:
        if "program" in line:
            take_program(line, values, identity["tokens"] // identity["window"])

    return read_journal(path, work, take), values


_ERRORS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "OSError": OSError,
    "MemoryError": MemoryError,
}
_PATIENCE = 0.5  # seconds between looks at whether all workers are still alive


@dataclass(frozen=True)
class Job:
    """One worker's job.

    Attributes:
        checkpoint: the model's folder.
        ids: (windows, tokens).
        programs: the one that the others are compared with comes first.
        threads: of PyTorch, on a CPU.
        memory: a limit in bytes for this worker.
        batch: at most this many windows are run together.
        folder: for hidden states that do not fit into the memory.
    """

    checkpoint: Path
    ids: Tensor
    programs: Sequence[Program]
    device: str = "cpu"
    threads: int = 1
    memory: int | None = None
    batch: int | None = None
    folder: Path | None = None
    factors: FactorSource | None = None
    sampled: bool = False


def measure_in_workers(
    job: Job, workers: int, ran: Callable[[float], Any] = lambda _: None
) -> Iterator[MeasuredWindows]:
    """Measure the job's programs by several processes; its device and threads are ignored."""
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    jobs = split(job, workers)
    processes = [context.Process(target=_work, args=(part, messages), daemon=True) for part in jobs]
    try:
        for process in processes:
            process.start()
        yield from _collect(processes, messages, ran)
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()


def measure_missing(
    name: str,
    subject: Subject,
    journal: ProgramJournal,
    plan: SharedPlan,
    windows: Sequence[int],
    options: MeasureOptions,
    workers: int = 1,
    batch: int | None = None,
) -> None:
    """Measure a plan's programs on some windows, as far as a journal lacks them, beside the plan's first one."""
    missing = [program for program in plan.programs if not journal.is_done(program, windows)]
    if not missing:
        return
    left = plan.only({plan.programs[0], *missing})
    ids = subject.windows.ids[list(windows)]
    part = len(windows) / len(subject.windows.ids)
    total = plan.total_sublayers
    with progress(name, total * part, "sublayers", (total - left.total_sublayers) * part) as advance:

        def ran(amount: float) -> None:
            advance(amount * part)
            stay_below(subject.memory)

        if (
            workers > 1 and len(left.programs) > 1
        ):  # workers measure the unedited model beside others only
            job = Job(
                subject.opened.folder,
                ids,
                left.programs,
                memory=options.memory,
                batch=batch,
                folder=options.folder,
                factors=options.factors,
                sampled=options.sampled,
            )
            measured = measure_in_workers(job, workers, ran)
        else:
            here = replace(
                options,
                is_done=lambda one, some: journal.is_done(one, windows[some.start : some.stop]),
                ran=ran,
                references={},
            )
            measured = measure(subject.model, ids, left, here)
        journal.add_new(measured, windows)


def split(job: Job, workers: int) -> list[Job]:
    """A job for each worker, with programs that are neighbours in the shared plan and about as much to run in each."""
    costs = dict(share(job.programs).sublayers)
    dense = job.programs[0]
    del costs[dense]
    wanted = sum(costs.values()) / workers
    parts: list[list[Program]] = [[] for _ in range(workers)]
    done = 0.0
    for program, cost in costs.items():
        parts[min(workers - 1, int((done + cost / 2) / wanted) if wanted else 0)].append(program)
        done += cost
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    filled = [part for part in parts if part]
    return [
        replace(
            job,
            programs=[dense, *part],
            device=devices[index % len(devices)],
            threads=max(1, torch.get_num_threads() // len(filled)),
            memory=None if job.memory is None else job.memory // len(filled),
        )
        for index, part in enumerate(filled)
    ]


def _collect(
    processes: Sequence[BaseProcess], messages: Any, ran: Callable[[float], Any]
) -> Iterator[MeasuredWindows]:
    """Pass on what the workers send, until all of them have ended."""
    running = len(processes)
    while running:
        try:
            message = messages.get(timeout=_PATIENCE)
        except queue.Empty:
            _check_alive(processes)
            continue
        match message:
            case ("measured", program, start, numbers):
                quality = {name: torch.from_numpy(values) for name, values in numbers.items()}
                yield MeasuredWindows(program, start, quality)
            case ("ran", amount):
                ran(amount)
            case ("warning", text):
                warnings.warn(text, stacklevel=2)
            case ("failed", kind, text):
                raise _ERRORS.get(kind, RuntimeError)(text)
            case ("ended",):
                running -= 1


def _check_alive(processes: Sequence[BaseProcess]) -> None:
    for number, process in enumerate(processes):
        if process.exitcode:
            if process.exitcode < 0:
                how = f"killed by signal {-process.exitcode}"
            else:
                how = f"exit code {process.exitcode}"
            raise OSError(
                f"worker {number} of {len(processes)} ended early ({how}); what was measured is kept: run the same "
                "command again to go on, with fewer workers if memory was short"
            )


def _work(job: Job, messages: Any) -> None:
    # Ctrl-C reaches the first process too, which ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    when_parent_ends(lambda: os._exit(1))
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("always", category=UserWarning, module=r"surgeon\b")
    warnings.showwarning = lambda message, *_, **__: messages.put(("warning", str(message)))
    try:
        torch.set_num_threads(job.threads)
        if job.device != "cpu":
            torch.cuda.set_device(job.device)  # what names no GPU would open another one, too
        model = restore(load_for_analysis(open_model(job.checkpoint), job.memory, job.device))
        plan = share(job.programs)
        at_once = windows_at_once(model, plan, job.ids, job.memory, job.batch)
        options = MeasureOptions(
            at_once,
            ran=lambda amount: messages.put(("ran", amount)),
            memory=job.memory,
            folder=job.folder,
            factors=job.factors,
            sampled=job.sampled,
        )
        for measured in measure(model, job.ids, plan, options):
            numbers = {name: tensor.numpy() for name, tensor in measured.quality.items()}
            messages.put(("measured", measured.program, measured.start, numbers))
        messages.put(("ended",))
    except Exception as error:  # noqa: BLE001 - the first process raises it
        error_kind = next((kind for kind in _ERRORS if isinstance(error, _ERRORS[kind])), "")
        messages.put(("failed", error_kind, str(error) if error_kind else traceback.format_exc()))
