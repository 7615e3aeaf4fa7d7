"""What `torch.profiler` sees of passes on a rank, as a Chrome trace: kernels, their launches, collectives on streams.

Timelines of `trace.py` are made of what a rank's process does, which on GPUs says little. Here every rank has a file of
its own, with each program's texts under the program's name; Perfetto opens it. Steps have their names where Python
computes them, which is not in passes that are replayed from a recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from surgeon.benchmarks.timing import TimedEngine
from surgeon.processes.files import whole_file
from surgeon.runtime.batching.request import Request
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.worker import complete


class Profiled(NamedTuple):
    """Texts that one program continues: the name of its engine, and what `complete` takes."""

    name: str
    requests: list[Request]
    blocks: int
    limits: Limits


def trace_files(path: Path, ranks: int) -> tuple[Path, ...]:
    """A file for each rank, named after one for all."""
    return tuple(path.with_name(f"{path.stem}.rank{rank}{path.suffix}") for rank in range(ranks))


def write_profile(rank: Rank, runs: Sequence[Profiled], file: str) -> None:
    """Runs on a rank: continue every program's texts, and write what the profiler has seen.

    They have been continued once before, when kernels are chosen and passes are recorded.

    Args:
        file: for all ranks; each writes the one of its own (`trace_files`).

    Raises:
        OSError: if the file cannot be written.
    """
    on_gpu = rank.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for run in runs:
        engine: TimedEngine = rank.engines[run.name]
        engine.mark(False)
        complete(rank, run.requests, run.blocks, run.limits, run.name)
    with profile(activities=activities) as profiler:
        for run in runs:
            engine = rank.engines[run.name]
            engine.recorder.profiled = True
            with record_function(run.name):
                complete(rank, run.requests, run.blocks, run.limits, run.name)
            engine.recorder.profiled = False
    own = trace_files(Path(file), rank.settings.options.ranks)[rank.rank]
    with whole_file(own) as beside:
        profiler.export_chrome_trace(str(beside))
