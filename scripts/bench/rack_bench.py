"""The cells of the benchmark of racks, the runs of each, and the figures that a run comes to."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from transformers import PreTrainedModel

from scripts.bench.pipelined_ranks import SCHEDULES, Job, read_records, record_of, run_ranks
from scripts.bench.rack_model import Optimisation, build, byte_texts, config_of, cut, head_units
from surgeon.checkpoint.stored import read_json
from surgeon.language.program import Program
from surgeon.models.edit import edit
from surgeon.runtime.comm.link import Link
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.rack_log import TIMELINE_FILE, TRAFFIC_FILE, RackPace
from surgeon.training.racks.run_files import (
    PLAN_FILE,
    RESULT_FILE,
    ProcessOptions,
    RacksToTrain,
    rack_folder,
)
from surgeon.training.racks.supervisor import train_in_processes
from surgeon.training.texts import TrainTexts

HIDDEN = 64
WINDOW = 128
BATCH = 8
CODA = 1  # layers
AHEAD = 4  # micro-batches that a rack may have sent and the next one not taken
WARM = 1  # steps
MEASURED = 2
SLOW_RANK = 1
SLOWNESS = 2.0
LINKS = {
    "none": None,
    "1ms": Link(0.001),
    "10MB/s": Link(0.0, 10e6),
    "1MB/s": Link(0.0, 1e6),
    "slow": None,
}
RACKS = "racks"
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    RACKS: "local, surgeon's processes",
}
WAITING = ("wait_input", "wait_room")


@dataclass(frozen=True)
class Cell:
    """A run of every round."""

    ranks: int
    link: str
    way: str

    def folder(self, output: Path, number: int) -> Path:
        """Of a round."""
        return output / "rounds" / str(number) / f"{self.ranks}-{self.link.replace('/', '')}-{self.way}"

    def has_ended(self, folder: Path) -> bool:
        if self.way == RACKS:
            return all((rack_folder(folder, rank) / RESULT_FILE).is_file() for rank in range(self.ranks))
        return all(record_of(folder, rank).is_file() for rank in range(self.ranks))


class Figures(NamedTuple):
    """The figures of a run.

    Attributes:
        speed: tokens per second.
        forward, backward: bytes in a step, over all links.
        idle: share of its time that a rank waits, the mean over ranks.
        most_idle: the largest of these.
        resident: bytes of the rank that had most.
        paced: how much longer computing took than it was to take; 0 where it was to take as long as it takes.
    """

    speed: float
    forward: float
    backward: float
    idle: float
    most_idle: float
    resident: int
    paced: float


def cells(ranks: Sequence[int], links: Sequence[str]) -> list[Cell]:
    """All ways of one column beside each other, so that they meet the same machine."""
    return [Cell(count, link, way) for count in ranks for link in links for way in NAMES]


class Bench:
    """The model, the text, and where results go."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.output: Path = arguments.output
        self.unit: float = arguments.compute
        self.config = config_of(HIDDEN, arguments.layers, WINDOW)
        self.optimisation = Optimisation(WARM + MEASURED, BATCH, 1, 2e-3, warmup=1)

    @cached_property
    def texts(self) -> TrainTexts:
        """As many windows as a run goes through, and one that is held out."""
        return byte_texts(WINDOW, self.optimisation.steps * BATCH)

    def job(self, cell: Cell) -> Job:
        """The work of the ranks of a cell."""
        factors = [1.0] * cell.ranks
        if cell.link == "slow":
            factors[SLOW_RANK] = SLOWNESS
        return Job(
            cell.way,
            cell.ranks,
            self.config,
            self.optimisation,
            LINKS[cell.link],
            tuple(factors),
            unit=self.unit,
        )

    def measure(self, todo: Sequence[Cell], rounds: int, minutes: float) -> None:
        """Run what is not there yet, as long as there is time."""
        begun = time.monotonic()
        model = build(self.config, 0)
        for number in range(rounds):
            for cell in todo:
                folder = cell.folder(self.output, number)
                if cell.has_ended(folder):
                    continue
                if time.monotonic() - begun > 60 * minutes:
                    left_out = folder.relative_to(self.output)
                    print(
                        f"{minutes:g} minutes are over: {left_out} and what follows is left out",
                        flush=True,
                    )
                    return
                if cell.way == RACKS:
                    run_racks(self.job(cell), model, self.texts, folder)
                else:
                    run_ranks(self.job(cell), model, self.texts.training.ids, folder)
                speed = self.figures(cell, folder).speed
                print(f"{folder.relative_to(self.output)}: {speed:.0f} tokens/s", flush=True)

    def rounds(self, cell: Cell) -> Iterator[Figures]:
        """The figures of all rounds that are there."""
        for folder in sorted((self.output / "rounds").glob("*")):
            own = cell.folder(self.output, int(folder.name))
            if cell.has_ended(own):
                yield self.figures(cell, own)

    def figures(self, cell: Cell, folder: Path) -> Figures:
        """The figures of a run, from the end of the first step on."""
        if cell.way == RACKS:
            return figures_of_racks(cell, folder)
        return figures_of_ranks(self.job(cell), folder)


def figures_of_ranks(job: Job, folder: Path) -> Figures:
    """Of `run_ranks`."""
    records = read_records(job, folder)
    steps = job.optimisation.steps
    ends = [[end for _, end in record["times"]] for record in records]
    seconds = max(each[-1] for each in ends) - max(each[WARM - 1] for each in ends)
    idle = []
    computed = 0.0
    for rank, record in enumerate(records):
        rows = timeline(record_of(folder, rank).with_name("timeline.csv"))
        rows = rows[rows["step"] > WARM]
        waited = rows.loc[rows["what"].isin(WAITING), "seconds"].sum()
        idle.append(waited / (record["times"][-1][1] - record["times"][WARM - 1][1]))
        passes = (rows["what"] == "compute") & rows["part"].isin(["forward", "backward"])
        computed += rows.loc[passes, "seconds"].sum()
    micro_batches = (steps - WARM) * job.optimisation.micro_batches
    wanted = micro_batches * sum(paced_seconds(job, rank) for rank in range(job.ranks))
    return Figures(
        micro_batches * job.optimisation.micro_batch * WINDOW / seconds,
        sum(record["sent"].get("forward", 0) for record in records) / steps,
        sum(record["sent"].get("backward", 0) for record in records) / steps,
        sum(idle) / len(idle),
        max(idle),
        max(record["peak"] for record in records),
        computed / wanted - 1 if wanted else 0.0,
    )


def figures_of_racks(cell: Cell, folder: Path) -> Figures:
    """Of `run_racks`."""
    sent = []
    peaks = []
    idle = []
    computed = 0.0
    for rank in range(cell.ranks):
        traffic = read_json(rack_folder(folder, rank) / TRAFFIC_FILE)
        sent.append(traffic["sent"]["forward"].get("training", {"bytes": 0})["bytes"])
        peaks.append(traffic["peak"])
        rows = timeline(rack_folder(folder, rank) / TIMELINE_FILE)
        waits = rows[rows["what"].isin(WAITING) & (rows["kind"] == "training")]
        measured = waits[waits["step"] > WARM]
        begun = measured["start"].min()
        work = rows[rows["what"] == "compute"]
        last = waits["end"].max()
        ended = work.loc[work["start"] >= last - 1e-5, "end"].min()
        ended = last if pd.isna(ended) else ended
        idle.append(measured["seconds"].sum() / (ended - begun))
        computed += work.loc[work["start"].between(begun, ended, inclusive="left"), "seconds"].sum()
    paces = (float(each["least"]) for each in read_json(folder / PLAN_FILE)["options"]["pace"])
    wanted = MEASURED * BATCH * sum(paces)
    return Figures(
        MEASURED * BATCH * WINDOW / (ended - begun),  # of the last rack
        sum(sent) / (WARM + MEASURED),
        0.0,
        sum(idle) / len(idle),
        max(idle),
        max(peaks),
        computed / wanted - 1 if wanted else 0.0,
    )


def timeline(path: Path) -> pd.DataFrame:
    """The rows of a rank or a rack, with how long each took."""
    rows = pd.read_csv(path)
    return rows.assign(seconds=rows["end"] - rows["start"])


def run_racks(job: Job, model: PreTrainedModel, texts: TrainTexts, folder: Path) -> None:
    """Train in surgeon's processes."""
    layers = job.config.num_hidden_layers
    program = Program.dense(layers)
    racks = Racks.parse([f"{span.start}:{span.stop}" for span in cut(layers, job.ranks)], program, CODA)
    paces = [RackPace(job.factor(rank), paced_seconds(job, rank)) for rank in range(job.ranks)]
    options = ProcessOptions(ahead=AHEAD, link=job.link, pace=tuple(paces), threads=1)
    whole = edit(copy.deepcopy(model), program)
    settings = job.optimisation.settings()
    train_in_processes(
        RacksToTrain(whole, racks, texts, settings, folder, seed=job.optimisation.seed), options
    )


def paced_seconds(job: Job, rank: int) -> float:
    """The seconds that a micro-batch is to take in a rank, forward and backward."""
    units = job.config.num_hidden_layers / job.ranks
    if rank == job.ranks - 1:
        units += head_units(job.config)
    elif job.schedule not in SCHEDULES:
        units += CODA + head_units(job.config)
    return 3 * units * job.unit * job.factor(rank)
