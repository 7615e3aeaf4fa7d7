"""scripts/bench/racks.py: figures of records made by hand."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench import racks
from scripts.bench.pipelined_ranks import SCHEDULES, Job, Trace, record_of
from scripts.bench.rack_model import Optimisation, head_units
from scripts.bench.racks import RACKS, Bench, Cell
from surgeon.processes.files import write_json
from surgeon.runtime.comm.collectives import Link
from surgeon.training.racks.run import PLAN_FILE, RESULT_FILE, rack_folder
from surgeon.training.racks.streams import ItemKey, ItemKind, RackLog

STEPS = Optimisation(3, 8, 1, 1e-3, warmup=1)


def bench(output: Path) -> Bench:
    return Bench(argparse.Namespace(output=output, compute=0.01, layers=4))


def leave(made: Bench, cell: Cell, step_seconds: float, waits: float) -> Job:
    """What a run leaves in which every step takes as long, and every rank waits for so much of it."""
    job, folder = made.job(cell), cell.folder(made.output, 0)
    for rank in range(cell.ranks):
        trace, times = Trace(), []
        for step in range(1, job.optimisation.steps + 1):
            begun = 100.0 + (step - 1) * step_seconds
            trace.step = step
            times.append((begun, begun + step_seconds))
            middle = begun + step_seconds * (1 - waits)
            trace.add(begun, middle, "compute", "forward", 0)
            trace.add(begun, middle, "send", "forward", 0)
            trace.add(middle, begun + step_seconds, "wait_input" if rank else "wait_room", "forward", 0)
        (folder / f"rank-{rank}").mkdir(parents=True)
        trace.write(folder / f"rank-{rank}" / "timeline.csv")
        back = {"backward": 600} if rank else {}
        record = {"times": times, "losses": [1.0], "sent": {"forward": 300} | back, "peak": 1000 + rank}
        write_json(record_of(folder, rank), record)
    return job


def test_figures_are_those_of_the_steps_behind_the_first(tmp_path: Path) -> None:
    made, cell = bench(tmp_path), Cell(2, "none", "1f1b")
    job = leave(made, cell, 0.5, 0.2)
    found = made.figures(cell, cell.folder(tmp_path, 0))
    assert found.speed == pytest.approx(8 * racks.WINDOW / 0.5)
    assert (found.idle, found.most_idle) == (pytest.approx(0.2), pytest.approx(0.2))
    steps = job.optimisation.steps
    assert (found.forward, found.backward, found.resident) == (600 / steps, 600 / steps, 1001)
    units = 4 + head_units(made.config)  # of both ranks together, forward
    assert found.paced == pytest.approx(2 * 0.4 / (8 * 3 * units * 0.01) - 1)


def test_a_coda_and_a_slow_rank_are_to_take_longer() -> None:
    job = Job("1f1b", 2, bench(Path()).config, STEPS, unit=0.01)
    head = head_units(job.config)
    assert racks.paced_seconds(job, 0) == pytest.approx(3 * 2 * 0.01)
    assert racks.paced_seconds(job, 1) == pytest.approx(3 * (2 + head) * 0.01)
    local = replace(job, schedule=RACKS, factors=(2.0, 1.0))
    assert racks.paced_seconds(local, 0) == pytest.approx(2 * 3 * (2 + 1 + head) * 0.01)
    assert racks.paced_seconds(local, 1) == pytest.approx(3 * (2 + head) * 0.01)


def test_every_way_meets_every_link(tmp_path: Path) -> None:
    todo = racks.cells([2], ["none", "slow"])
    assert [cell.way for cell in todo] == [*racks.NAMES, *racks.NAMES]
    assert bench(tmp_path).job(todo[-1]).factors == (1.0, 2.0)
    assert bench(tmp_path).job(Cell(2, "10MB/s", "gpipe")).link == Link(bandwidth=10e6)


def test_runs_are_tabled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, todo = (
        bench(tmp_path),
        [cell for cell in racks.cells([4], ["none"]) if cell.way in SCHEDULES],
    )
    for cell in todo:
        leave(made, cell, *((0.4, 0.01) if cell.way == "interleaved" else (0.6, 0.3)))
    racks.show(made, todo)
    assert "| 4 | none | interleaved 1F1B | 2560 (2560, 2560) | +50% | " in capsys.readouterr().out


def leave_racks(folder: Path) -> None:
    """What two of surgeon's processes leave of three steps, of which each takes 8 s: 6 of computing, 2 of waiting."""
    for rank in range(2):
        own = rack_folder(folder, rank)
        log = RackLog(own)
        for step in range(1, 4):
            for half in (0, 1):
                begun, key = 8.0 * step + 4 * half, ItemKey(step, ItemKind.TRAINING, half)
                log.add(begun, begun + 1, "wait_input", key)
                log.add(begun + 1, begun + 4, "compute", key)
                log.add(begun, begun + 0.5, "send", key, 100)
        log.count("sent", ItemKind.TRAINING, 900)
        log.count("sent", ItemKind.HELD_OUT, 5000)
        log.write()
        write_json(own / RESULT_FILE, {})
    write_json(folder / PLAN_FILE, {"options": {"pace": [{"factor": 1.0, "least": 0.25}] * 2}})


def test_surgeons_own_processes_are_read_from_their_run(tmp_path: Path) -> None:
    cell = Cell(2, "none", RACKS)
    folder = cell.folder(tmp_path, 0)
    for rank in range(2):
        rack_folder(folder, rank).mkdir(parents=True)
    assert not cell.has_ended(folder)
    leave_racks(folder)
    assert cell.has_ended(folder)
    found = bench(tmp_path).figures(cell, folder)
    assert found.speed == pytest.approx(2 * 8 * racks.WINDOW / 16)
    assert (found.idle, found.most_idle) == (pytest.approx(0.25), pytest.approx(0.25))
    assert (found.forward, found.backward) == (600, 0)
    assert found.paced == pytest.approx(24 / (2 * 8 * 0.5) - 1)
