"""Measuring programs in several processes, one for each GPU (or for a share of a machine's cores).

Each worker loads the model and measures a part of the programs: neighbours in the order of the shared plan, which have
most in common, so that little of the sharing is lost. Measurements come back through a queue.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.analysis.engine.machine import windows_at_once
from surgeon.analysis.engine.measure import MeasuredWindows, MeasureOptions, ProgramJournal, measure
from surgeon.analysis.engine.sharing import SharedPlan, share
from surgeon.analysis.subject import Subject, load_for_analysis
from surgeon.language.program import Program
from surgeon.machine import stay_below
from surgeon.models.edit import restore
from surgeon.models.weights import FactorSource
from surgeon.opened import open_model
from surgeon.processes.children import when_parent_ends
from surgeon.progress import progress

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
        known = next((kind for kind in _ERRORS if isinstance(error, _ERRORS[kind])), "")
        messages.put(("failed", known, str(error) if known else traceback.format_exc()))
