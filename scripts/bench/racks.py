"""Block-wise local training against pipelined training: speed, traffic, idle time and memory, in one run.

    python scripts/bench/racks.py -o FOLDER [--rounds N] [--ranks 2,4] [--links none,1ms,10MB/s,1MB/s,slow]
                                  [--minutes M] [--layers N] [--compute SECONDS] [--table]

The same model, windows, order, micro-batches, processes and link: GPipe, 1F1B and interleaved 1F1B of
`torch.distributed.pipelining` (scripts/bench/pipelined_ranks.py), and surgeon's racks with codas of one layer, which
also measure held-out text and save checkpoints. Rounds go through all of them in turn; medians are printed, with
lowest and highest, and the highest are compared: what else runs on a machine only ever takes from them. The last column
says how much: by how much computing took longer than it was to take. In `slow` the second rank takes twice as long for
whatever it computes.

Four ranks on two cores would measure who waits for a core. So computing takes a fixed time here: a layer SECONDS on a
micro-batch forward and twice that backward, a head as many layers as it has multiplications; the rank computes, and
sleeps for the rest. --compute 0 lets it take what it takes, which means something where ranks have cores of their own.
A figure then is that of ranks that compute at this speed, behind such a link; the numbers that are trained are real.

Bytes are those of messages between neighbours, all links together. Idle is the share of a rank's time in which it waits
for a message, or for one to leave; mean and largest over ranks. Memory is the most resident bytes of a rank,
interpreter and all.

Killed, the same command goes on with what is missing; --minutes is a limit after which nothing new begins.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pandas as pd
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.pipelined_ranks import SCHEDULES, Job, read_records, record_of, run_ranks
from scripts.bench.rack_model import Optimisation, build, byte_texts, config_of, cut, head_units
from scripts.commands import add_defaults, make_parser
from scripts.markdown import print_table
from surgeon.checkpoint.tensor_file import read_json
from surgeon.language.program import Program
from surgeon.models.edit import edit
from surgeon.runtime.comm.collectives import Link
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.process import train_in_processes
from surgeon.training.racks.run import (
    PLAN_FILE,
    RESULT_FILE,
    RackOptions,
    RacksToTrain,
    rack_folder,
)
from surgeon.training.racks.streams import TIMELINE_FILE, TRAFFIC_FILE, RackPace
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
COLUMNS = [
    "ranks",
    "link",
    "way",
    "tokens/s (low, high)",
    "to 1F1B",
    "MB a step forward, back",
    "idle mean, most",
    "resident, MB",
    "computing over time",
]


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
        last = [record_of(folder, rank) for rank in range(self.ranks)]
        if self.way == RACKS:
            last = [rack_folder(folder, rank) / RESULT_FILE for rank in range(self.ranks)]
        return all(file.is_file() for file in last)


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
    ranks = []
    for rank, record in enumerate(records):
        rows = timeline(record_of(folder, rank).with_name("timeline.csv"))
        rows = rows[rows["step"] > WARM]
        waited = rows.loc[rows["what"].isin(WAITING), "seconds"].sum()
        begun = record["times"][WARM - 1][1]
        ended = record["times"][-1][1]
        passes = (rows["what"] == "compute") & rows["part"].isin(["forward", "backward"])
        computed = rows.loc[passes, "seconds"].sum()
        sent = [record["sent"].get(way, 0) for way in ("forward", "backward")]
        ranks.append(RankFigures(begun, ended, waited, computed, record["peak"], *sent))
    seconds = max(one.ended for one in ranks) - max(one.begun for one in ranks)
    return summed(ranks, seconds, sum(paced_seconds(job, rank) for rank in range(job.ranks)))


def figures_of_racks(cell: Cell, folder: Path) -> Figures:
    """Of `run_racks`."""
    ranks = []
    for rank in range(cell.ranks):
        traffic = read_json(rack_folder(folder, rank) / TRAFFIC_FILE)
        sent = traffic["sent"].get("training", {"bytes": 0})["bytes"]
        rows = timeline(rack_folder(folder, rank) / TIMELINE_FILE)
        waits = rows[rows["what"].isin(WAITING) & (rows["kind"] == "training")]
        measured = waits[waits["step"] > WARM]
        begun = measured["start"].min()
        work = rows[rows["what"] == "compute"]
        last = waits["end"].max()
        ended = work.loc[work["start"] >= last - 1e-5, "end"].min()
        if pd.isna(ended):
            ended = last
        computed = work.loc[work["start"].between(begun, ended, inclusive="left"), "seconds"].sum()
        waited = measured["seconds"].sum()
        ranks.append(RankFigures(begun, ended, waited, computed, traffic["peak"], sent))
    paces = (float(each["least"]) for each in read_json(folder / PLAN_FILE)["options"]["pace"])
    return summed(ranks, ranks[-1].ended - ranks[-1].begun, sum(paces))


class RankFigures(NamedTuple):
    """When a rank began and ended its measured steps, seconds of waiting and computing in them, and bytes of all."""

    begun: float
    ended: float
    waited: float
    computed: float
    resident: int
    forward: float
    backward: float = 0.0


def summed(ranks: Sequence[RankFigures], seconds: float, pace: float) -> Figures:
    """The figures of all ranks together.

    Args:
        seconds: of the measured steps.
        pace: seconds that a micro-batch is to take, of all ranks together.
    """
    idle = [one.waited / (one.ended - one.begun) for one in ranks]
    wanted = MEASURED * BATCH * pace
    paced = 0.0
    if wanted:
        paced = sum(one.computed for one in ranks) / wanted - 1
    return Figures(
        MEASURED * BATCH * WINDOW / seconds,
        sum(one.forward for one in ranks) / (WARM + MEASURED),
        sum(one.backward for one in ranks) / (WARM + MEASURED),
        sum(idle) / len(idle),
        max(idle),
        max(one.resident for one in ranks),
        paced,
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
    options = RackOptions(
        racks.texts, CODA, True, ahead=AHEAD, link=job.link, pace=tuple(paces), threads=1
    )
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


def show(bench: Bench, todo: Sequence[Cell]) -> None:
    """Print the table of what is there."""
    found = {cell: rounds for cell in todo if (rounds := list(bench.rounds(cell)))}
    layers = bench.config.num_hidden_layers
    took = "what it takes"
    if bench.unit:
        took = f"{1000 * bench.unit:g} ms per layer"
    steps = f"{bench.optimisation.micro_batches} micro-batches a step"
    title = f"\n{layers} layers x {HIDDEN}, {steps}, computing takes {took}"
    rows = [
        row_of(cell, rounds, found.get(replace(cell, way="1f1b"), [])) for cell, rounds in found.items()
    ]
    print_table(title, COLUMNS, rows, left=range(len(COLUMNS)))


def row_of(cell: Cell, rounds: Sequence[Figures], base: Sequence[Figures]) -> list[object]:
    speeds = [each.speed for each in rounds]
    middle = Figures(*map(median, zip(*rounds, strict=True)))
    against = f"{max(speeds) / max(each.speed for each in base) - 1:+.0%}" if base else ""
    return [
        cell.ranks,
        cell.link,
        NAMES[cell.way],
        f"{middle.speed:.0f} ({min(speeds):.0f}, {max(speeds):.0f})",
        against,
        f"{middle.forward / 1e6:.2f}, {middle.backward / 1e6:.2f}",
        f"{middle.idle:.0%}, {middle.most_idle:.0%}",
        f"{middle.resident / 1e6:.0f}",
        f"{middle.paced:+.0%}",
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    add_defaults(
        parser,
        rounds=3,
        layers=16,
        compute=(0.024, "seconds per layer and micro-batch, forward"),
        minutes=40.0,
        table=(False, "print what is there, and run nothing"),
    )
    parser.add_argument(
        "--ranks", default="4,2", type=lambda text: [int(each) for each in text.split(",")]
    )
    parser.add_argument("--links", default=",".join(LINKS), type=lambda text: text.split(","))
    arguments = parser.parse_args()
    bench = Bench(arguments)
    todo = cells(arguments.ranks, arguments.links)
    if not arguments.table:
        bench.measure(todo, arguments.rounds, arguments.minutes)
    show(bench, todo)


if __name__ == "__main__":
    main()
