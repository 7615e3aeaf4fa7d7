"""Timelines of what ranks do, as files."""

from __future__ import annotations

import json
from pathlib import Path

from surgeon.benchmarks.measure import RankBench
from surgeon.benchmarks.trace import Wires, chrome_trace
from surgeon.cost.workload import Workload
from surgeon.processes.files import write_text
from surgeon.processes.torchrun import read_environment


def write_trace(measured: RankBench, load: Workload, path: Path) -> tuple[Path, ...]:
    """A timeline of what processes do, which on GPUs are those of a profiler; its files."""
    options = measured.ranks.options
    if options.device == "cuda":
        return measured.profile(load, path)
    timeline = chrome_trace(measured.trace(load), Wires(options.collectives == "shm", options.link))
    write_text(path, json.dumps(timeline) + "\n")
    return (path,)


def check_trace(path: Path) -> None:
    """Say what is wrong with a trace before anything is measured.

    Raises:
        ValueError: if there can be none, or not there.
    """
    if read_environment() is not None:
        raise ValueError("a trace puts all ranks on one clock, and machines have one each; take none under torchrun")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"the trace {path} must be a file in a folder that exists")
