"""A timeline of forward passes as Chrome and Perfetto show it: what each rank computes, waits for and has in flight.

Every rank is a process with rows of its own, so that one sees whether a reduction hides behind the next step's
computation (Ladder Residual, figure 5). A name begins as the program writes the step and goes on in words, because a
narrow box shows the beginning only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.benchmarks.measure import RankBench
from surgeon.benchmarks.passes import Exchange, PassTiming, RankRun
from surgeon.cost.workload import Workload
from surgeon.language.program import Step
from surgeon.language.sublayer import ATTENTION
from surgeon.processes.files import write_text
from surgeon.processes.torchrun import read_environment
from surgeon.runtime.comm.link import Link

# Rows; what is in flight at the same time takes further rows.
PASSES = 0
COMPUTE = 1
WAITING = 2
COMMUNICATION = 3
CATEGORIES = {PASSES: "pass", COMPUTE: "compute", WAITING: "waiting"}
ROW_NAMES = {PASSES: "forward passes", COMPUTE: "compute", WAITING: "waiting for other ranks"}
MICROSECONDS = 1e6

TraceEvent = dict[str, Any]


@dataclass(frozen=True)
class Wires:
    """How ranks are connected.

    Attributes:
        shared: whether what all have written is there at once (shared memory), so that one knows when that was; of
            other collectives one only knows when a rank came back for the result and had it.
        link: that is emulated.
    """

    shared: bool
    link: Link | None = None


def chrome_trace(runs: dict[str, list[RankRun]], wires: Wires) -> dict[str, Any]:
    """The content of a trace file.

    Args:
        runs: by program and rank, with computations and exchanges kept.
    """
    events: list[TraceEvent] = []
    process = 0
    for name, by_rank in runs.items():
        start = min(run.passes[0].began for run in by_rank)
        for rank, run in enumerate(by_rank):
            for what, labels in (("name", {"name": f"{name}, rank {rank}"}), ("sort_index", {"sort_index": process})):
                events.append({"ph": "M", "name": f"process_{what}", "pid": process, "tid": 0, "args": labels})
            for number, one in enumerate(run.passes):
                everybody = [each.passes[number] for each in by_rank]
                events += _pass_events(one, rank, everybody, wires, process, start)
            process += 1
    for process, row in sorted({(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}):
        name = ROW_NAMES.get(row, f"in flight {row - COMMUNICATION + 1}")
        for what, labels in (("name", {"name": name}), ("sort_index", {"sort_index": row})):
            events.append({"ph": "M", "name": f"thread_{what}", "pid": process, "tid": row, "args": labels})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _pass_events(
    one: PassTiming, rank: int, everybody: Sequence[PassTiming], wires: Wires, process: int, start: float
) -> Iterator[TraceEvent]:
    def event(row: int, name: str, began: float, ended: float, **more: Any) -> TraceEvent:
        times = {"ts": (began - start) * MICROSECONDS, "dur": max(0.0, ended - began) * MICROSECONDS}
        return {
            "ph": "X",
            "name": name,
            "cat": CATEGORIES.get(row, "communication"),
            "pid": process,
            "tid": row,
            **times,
            "args": more,
        }

    kind = "prefill"
    if one.decode:
        kind = "decode"
    tokens = f"{one.tokens} {'token' if one.tokens == 1 else 'tokens'}"
    yield event(PASSES, f"{kind} ({tokens})", one.began, one.ended, tokens=one.tokens)
    for step in one.computations:
        yield event(COMPUTE, explain(step.step), step.began, step.ended)
    busy_until: list[float] = []
    for exchange, arrival in zip(one.exchanges, arrivals(rank, everybody, wires), strict=True):
        name = f"{'all-gather' if exchange.gather else 'all-reduce'} {explain(exchange.what)}"
        lane = next((lane for lane, until in enumerate(busy_until) if until <= exchange.began), len(busy_until))
        busy_until[lane : lane + 1] = [arrival]
        yield event(COMMUNICATION + lane, name, exchange.began, arrival, bytes=exchange.bytes)
        yield event(WAITING, f"wait for {name}", exchange.waited, exchange.ended)


def explain(what: Step | str) -> str:
    """A step as the program writes it, and in words; anything else is a word already."""
    if isinstance(what, str):
        return what
    inside = []
    for sublayer in what.sublayers:
        kind = "feed-forward"
        if sublayer.kind == ATTENTION:
            kind = "attention"
        piece = ""
        if sublayer.piece is not None:
            piece = f" slice {sublayer.piece[0]} of {sublayer.piece[1]}"
        inside.append(f"{kind} {'~'.join(map(str, sublayer.layers))}{piece}")
    return f"{what} ({'late: ' if what.late else ''}{', '.join(inside)})"


def arrivals(rank: int, everybody: Sequence[PassTiming], wires: Wires) -> list[float]:
    """Seconds at which each exchange's result was there, perhaps long before the rank came back for it."""
    own = everybody[rank].exchanges
    places = _places(own)
    by_place = [dict(zip(_places(one.exchanges), one.exchanges, strict=True)) for one in everybody]
    found = []
    free_from = 0.0
    for exchange, place in zip(own, places, strict=True):
        there = max(by_place[member][place].started for member in exchange.group)
        if wires.link is not None:
            others = len(exchange.group) - 1
            size = exchange.bytes * (others if exchange.gather else 2 * others / len(exchange.group))
            free_from = max(exchange.began, free_from) + size / wires.link.bandwidth
            there = max(there, free_from + wires.link.delay)
        found.append(min(there, exchange.ended) if wires.shared else exchange.ended)
    return found


def _places(exchanges: Sequence[Exchange]) -> list[tuple[tuple[int, ...], int]]:
    """Of each exchange, its group and how many the group had before it: the same for all ranks of the group."""
    seen: dict[tuple[int, ...], int] = {}
    places = []
    for exchange in exchanges:
        number = seen[exchange.group] = seen.get(exchange.group, -1) + 1
        places.append((exchange.group, number))
    return places


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
