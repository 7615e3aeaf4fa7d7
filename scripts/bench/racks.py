"""Block-wise local training against pipelined training: speed, traffic, idle time and memory, in one run.

    python scripts/bench/racks.py -o FOLDER [--rounds N] [--ranks 2,4] [--links none,1ms,10MB/s,1MB/s,slow]
                                  [--minutes M] [--layers N] [--compute SECONDS] [--quality FOLDER ...] [--table]

The same model, windows, order, micro-batches, ranks (processes over gloo), messages and link: GPipe, 1F1B and
interleaved 1F1B of `torch.distributed.pipelining` (scripts/bench/pipelined.py), and racks with codas of one layer
(scripts/bench/local_ranks.py); and these by surgeon's own processes (scripts/bench/rack_processes.py), which also keep
what they send on disk and measure held-out text. Rounds go through all of them in turn; medians are printed, with
lowest and highest, and the highest are compared: what else runs on a machine only ever takes from them. The last column
says how much: by how much computing took longer than it was to take. In `slow` the second rank takes twice as long for
whatever it computes.

Four ranks on two cores would measure who waits for a core. So computing takes a fixed time here: a layer SECONDS on a
micro-batch forward and twice that backward, a head as many layers as it has multiplications; the rank computes, and
sleeps for the rest. --compute 0 lets it take what it takes, which means something where ranks have cores of their own.
A figure then is that of ranks that compute at this speed, behind such a link; the numbers that are trained are real.

Bytes are those of messages between neighbours, all links together. Idle is the share of a rank's time in which it waits
for a message, or for one to leave; mean and largest over ranks. Memory: what autograd holds for backward passes, the
rank that holds most, counted in runs of their own; and the most resident bytes of a rank, interpreter and all.

Killed, the same command goes on with what is missing; --minutes is a limit after which nothing new begins. --quality
names folders of scripts/bench/rack_quality.py, each with runs of one length: then the article's claims are printed
beside what was found, and loss curves are drawn. Pictures lie in FOLDER/pictures.
"""

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
from surgeon.quality.data import digest_of
from surgeon.training.racks.run_files import PLAN_FILE
from surgeon.training.texts import TrainTexts

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
        ids = texts.training.ids[:count].clone()
        return TrainTexts(replace(texts.training, ids=ids, digest=digest_of(ids)), texts.held_out)

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
        sum(each.sent("forward") for each in runs) / steps,
        sum(each.sent("backward") for each in runs) / steps,
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


def show(bench: Bench, todo: Sequence[Cell]) -> dict[Cell, list[Figures]]:
    """Print the table of what is there."""
    found = {cell: [figures_of(cell, folder) for folder in bench.folders(cell)] for cell in todo}
    found = {cell: rounds for cell, rounds in found.items() if rounds}
    layers = bench.config.num_hidden_layers
    took = f"computing takes {1000 * bench.unit:g} ms per layer" if bench.unit else "computing takes what it takes"
    print(f"\n{layers} layers x {HIDDEN}, {bench.optimisation.micro_batches} micro-batches a step, {took}\n")
    print("| ranks | link | way | tokens/s (low, high) | to 1F1B | MB a step forward, back | idle mean, most ", end="")
    print("| held by autograd, MB | resident, MB | computing over time |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for cell, rounds in found.items():
        print(row_of(bench, cell, rounds, found.get(replace(cell, way="1f1b"))))
    return found


def row_of(bench: Bench, cell: Cell, rounds: Sequence[Figures], base: Sequence[Figures] | None) -> str:
    """One row of the table."""
    speeds = [each.speed for each in rounds]
    against = "" if base is None else f"{max(speeds) / max(map(speed, base)) - 1:+.0%}"
    held, mean = bench.held(cell), median(rounds, lambda each: statistics.mean(each.idle))
    columns = [
        str(cell.ranks),
        cell.link,
        NAMES[cell.way],
        f"{statistics.median(speeds):.0f} ({min(speeds):.0f}, {max(speeds):.0f})",
        against,
        f"{rounds[0].forward / 1e6:.2f}, {rounds[0].backward / 1e6:.2f}",
        f"{mean:.0%}, {median(rounds, lambda each: max(each.idle)):.0%}",
        "" if held is None else f"{held / 1e6:.1f}",
        f"{median(rounds, lambda each: each.resident) / 1e6:.0f}",
        f"{median(rounds, lambda each: each.paced):+.0%}",
    ]
    return f"| {' | '.join(columns)} |"


def speed(figures: Figures) -> float:
    """Tokens per second."""
    return figures.speed


def median(rounds: Sequence[Figures], of: Callable[[Figures], float]) -> float:
    """Of a figure over rounds."""
    return statistics.median(of(each) for each in rounds)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", default="4,2", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--links", default=",".join(LINKS), type=lambda text: text.split(","))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--compute", type=float, default=0.024, help="seconds per layer and micro-batch, forward")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--quality", type=Path, nargs="+", default=[], help="folders of rack_quality.py")
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    return parser.parse_args()


def main() -> None:
    from scripts.bench import rack_claims, rack_pictures

    arguments = _parse()
    bench, todo = Bench(arguments), cells(arguments.ranks, arguments.links)
    if not arguments.table:
        bench.measure(todo, arguments.rounds, arguments.minutes)
    found = show(bench, todo)
    if arguments.quality:
        rack_claims.show(bench, found, arguments.quality)
    for picture in rack_pictures.draw(bench, found, arguments.quality):
        print(picture.relative_to(arguments.output))


if __name__ == "__main__":
    main()
