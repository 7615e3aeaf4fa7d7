"""What the benchmark of racks measures: its cells, the runs of each, and the figures that a run comes to."""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.pipelined_ranks import LOCAL, SCHEDULES, Job, Outcome, read_outcome, record_of, run_ranks
from scripts.bench.rack_model import Optimisation, build, bytes_of, config_of
from scripts.bench.rack_processes import PROCESSES, RackRun, is_there, paced_seconds, run_racks
from surgeon.checkpoint.read import read_json
from surgeon.quality.data import Windows, digest_of
from surgeon.training.racks.run_files import PLAN_FILE
from surgeon.training.texts import TrainingText, TrainTexts

HIDDEN, WINDOW, BYTES, BATCH = 64, 128, 256, 8
WARM, MEASURED = 1, 2  # steps
SLOW_RANK, SLOWNESS = 1, 2.0
LINKS: dict[str, dict[str, float]] = {
    "none": {},
    "1ms": {"delay": 0.001},
    "10MB/s": {"delay": 0.0, "bandwidth": 10e6},
    "1MB/s": {"delay": 0.0, "bandwidth": 1e6},
    "slow": {},
}
WAYS = (*SCHEDULES, PROCESSES)
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    LOCAL: "local, a coda of 1",
    PROCESSES: "local, surgeon's processes",
}


@dataclass(frozen=True)
class Cell:
    """What is measured once in every round."""

    ranks: int
    link: str
    way: str

    def folder(self, output: Path, number: int) -> Path:
        """Of a round."""
        return output / "rounds" / str(number) / f"{self.ranks}-{self.link.replace('/', '')}-{self.way}"


@dataclass(frozen=True)
class Figures:
    """What a run came to.

    Attributes:
        speed: tokens per second.
        forward, backward: bytes in a step, over all links.
        idle: share of each rank's time.
        resident: bytes of the rank that had most.
        paced: how much longer computing took than it was to take; 0 where it was to take as long as it takes.
    """

    speed: float
    forward: float
    backward: float
    idle: tuple[float, ...]
    resident: int
    paced: float = 0.0


def cells(ranks: Sequence[int], links: Sequence[str]) -> list[Cell]:
    """All ways of one column beside each other, so that they meet the same machine."""
    return [Cell(count, link, way) for count in ranks for link in links for way in WAYS]


class Bench:
    """The model, the text, and where results go."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.output: Path = arguments.output
        self.unit: float = arguments.compute
        self.config = config_of(HIDDEN, arguments.layers, WINDOW, BYTES)
        self.optimisation = Optimisation(WARM + MEASURED, BATCH, 1, 2e-3, warmup=1)

    def texts(self) -> TrainTexts:
        """As many windows as a run goes through, and one that is held out."""
        texts, count = bytes_of(WINDOW, WINDOW), self.optimisation.steps * self.optimisation.batch
        ids = texts.training.ids[:count]
        training = TrainingText.of(Windows(ids, texts.training.source, digest_of(ids)))
        return TrainTexts(training, texts.held_out)

    def job(self, cell: Cell) -> Job:
        """What the ranks of a cell do."""
        factors = [1.0] * cell.ranks
        if cell.link == "slow":
            factors[SLOW_RANK] = SLOWNESS
        made = Job(
            cell.way, cell.ranks, self.config.to_dict(), self.optimisation, factors=tuple(factors), unit=self.unit
        )
        return replace(made, **LINKS[cell.link])  # type: ignore[arg-type]

    def holding(self, cell: Cell) -> Job:
        """A run that counts what autograd holds, and takes as long as it takes."""
        return replace(self.job(cell), held=True, unit=0.0, optimisation=replace(self.optimisation, steps=2))

    def measure(self, todo: Sequence[Cell], rounds: int, minutes: float) -> None:
        """Run what is not there yet, as long as there is time."""
        begun, texts, model = time.monotonic(), self.texts(), build(self.config, 0)
        plan = [(cell, cell.folder(self.output, number), self.job(cell)) for number in range(rounds) for cell in todo]
        held = [cell for cell in todo if cell.link == todo[0].link and cell.way != PROCESSES]
        plan[len(todo) : len(todo)] = [(cell, self.held_folder(cell), self.holding(cell)) for cell in held]
        for cell, folder, job in plan:
            if whole(cell, folder):
                continue
            if time.monotonic() - begun > 60 * minutes:
                left_out = folder.relative_to(self.output)
                print(f"{minutes:g} minutes are over: {left_out} and what follows is left out", flush=True)
                return
            if cell.way == PROCESSES:
                run_racks(job, model, texts, folder)
            else:
                run_ranks(job, model, texts.training.ids, folder)
            print(f"{folder.relative_to(self.output)}: {figures_of(cell, folder).speed:.0f} tokens/s", flush=True)

    def held_folder(self, cell: Cell) -> Path:
        """Where what autograd holds is counted."""
        return self.output / "held" / f"{cell.ranks}-{cell.way}"

    def folders(self, cell: Cell) -> Iterator[Path]:
        """Of all rounds that are there."""
        for folder in sorted((self.output / "rounds").glob("*")):
            there = cell.folder(self.output, int(folder.name))
            if whole(cell, there):
                yield there

    def held(self, cell: Cell) -> int | None:
        """The most bytes that autograd held in a rank."""
        folder = self.held_folder(cell)
        if cell.way == PROCESSES or not whole(cell, folder):
            return None
        return max(int(record["held"]) for record in read_outcome(self.holding(cell), folder).records)


def whole(cell: Cell, folder: Path) -> bool:
    """Whether a run has ended."""
    if cell.way == PROCESSES:
        return is_there(folder, cell.ranks)
    return all(record_of(folder, rank).is_file() for rank in range(cell.ranks))


def figures_of(cell: Cell, folder: Path) -> Figures:
    """What a run's ranks have written, from the end of the first step on."""
    return figures_of_racks(cell, folder) if cell.way == PROCESSES else figures_of_ranks(folder)


def figures_of_ranks(folder: Path) -> Figures:
    """Of `run_ranks`."""
    outcome = read_outcome(Job.read(folder), folder)
    steps = outcome.job.optimisation.steps
    totals = [Sums(outcome, rank) for rank in range(outcome.job.ranks)]
    sent = [record["sent"] for record in outcome.records]
    wanted = sum(each.wanted for each in totals)
    return Figures(
        outcome.tokens_per_second(WARM),
        sum(each.get("forward", 0) for each in sent) / steps,
        sum(each.get("backward", 0) for each in sent) / steps,
        tuple(each.idle for each in totals),
        max(record["peak"] for record in outcome.records),
        sum(each.computed for each in totals) / wanted - 1 if wanted else 0.0,
    )


def figures_of_racks(cell: Cell, folder: Path) -> Figures:
    """Of `run_racks`."""
    runs = [RackRun(folder, rank, WARM) for rank in range(cell.ranks)]
    steps, last = WARM + MEASURED, runs[-1]
    paces = (float(each["least"]) for each in read_json(folder / PLAN_FILE)["options"]["pace"])
    wanted = MEASURED * BATCH * sum(paces)
    return Figures(
        MEASURED * BATCH * WINDOW / (last.ended - last.begun),
        sum(each.sent() for each in runs) / steps,
        0.0,
        tuple(each.idle for each in runs),
        max(int(each.traffic["peak"]) for each in runs),
        sum(each.computed for each in runs) / wanted - 1 if wanted else 0.0,
    )


class Sums:
    """How a rank has spent its time since the first step.

    Attributes:
        idle: the share in which it waited.
        computed: seconds of forward and backward passes.
        wanted: seconds that these were to take; 0 where they were to take as long as they take.
    """

    def __init__(self, outcome: Outcome, rank: int) -> None:
        times = outcome.records[rank]["times"]
        begun, ended = times[WARM - 1][1], times[-1][1]
        waited = self.computed = self.wanted = 0.0
        for row in timeline(outcome.folder, rank):
            if row["step"] <= WARM:
                continue
            seconds = row["end"] - row["start"]
            if row["what"] in ("wait_input", "wait_room"):
                waited += seconds
            elif row["part"] in ("forward", "backward") and row["what"] == "compute":
                self.computed += seconds
        self.idle = waited / (ended - begun)
        if outcome.job.unit:
            self.wanted = (
                (len(times) - WARM)
                * outcome.job.optimisation.micro_batches
                * paced_seconds(outcome.job, rank, outcome.job.schedule)
            )


def timeline(folder: Path, rank: int) -> list[dict[str, Any]]:
    """A rank's rows; times in seconds, steps as whole numbers."""
    with (folder / f"rank-{rank}" / "timeline.csv").open(newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row |= {"start": float(row["start"]), "end": float(row["end"]), "step": int(row["step"])}
    return rows


def speed(figures: Figures) -> float:
    """Tokens per second."""
    return figures.speed


def median(rounds: Sequence[Figures], of: Callable[[Figures], float]) -> float:
    """Of a figure over rounds."""
    return statistics.median(of(each) for each in rounds)
