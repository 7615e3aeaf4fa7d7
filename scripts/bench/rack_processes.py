"""surgeon's own processes (`surgeon.training.racks.supervisor`) on what the other ways are measured on."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.pipelined_ranks import LOCAL, Job
from scripts.bench.rack_model import cut, head_units
from surgeon.checkpoint.read import read_json
from surgeon.language.program import Program
from surgeon.models.edit import edit
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.rack_log import TIMELINE_FILE, TRAFFIC_FILE, RackPace
from surgeon.training.racks.run_files import RESULT_FILE, ProcessOptions, RacksToTrain, rack_folder
from surgeon.training.racks.supervisor import train_in_processes
from surgeon.training.run_log import read_rows
from surgeon.training.texts import TrainTexts

PROCESSES = "racks"
WAITING = ("wait_input", "wait_room")


def is_there(folder: Path, ranks: int) -> bool:
    """Whether a run has ended."""
    return all((rack_folder(folder, rank) / RESULT_FILE).is_file() for rank in range(ranks))


def run_racks(job: Job, model: PreTrainedModel, texts: TrainTexts, folder: Path) -> None:
    """Train in surgeon's processes."""
    made, layers = job.optimisation, job.config.num_hidden_layers
    program = Program.dense(layers)
    racks = Racks.parse([f"{span.start}:{span.stop}" for span in cut(layers, job.ranks)], program, job.coda)
    settings = made.settings()
    paces = [RackPace(factor, paced_seconds(job, rank, PROCESSES)) for rank, factor in enumerate(job.factors)]
    options = ProcessOptions(ahead=job.ahead, link=job.link, pace=tuple(paces), threads=1)
    whole = edit(copy.deepcopy(model), program)
    train_in_processes(RacksToTrain(whole, racks, texts, settings, folder, seed=made.seed), options)


def paced_seconds(job: Job, rank: int, way: str) -> float:
    """What a micro-batch is to take in a rank, forward and backward."""
    layers, head = job.config.num_hidden_layers / job.ranks, head_units(job.config)
    last = rank == job.ranks - 1
    units = layers + (head if last else (job.coda + head) * (way in (LOCAL, PROCESSES)))
    return 3 * units * job.unit * (job.factors[rank] if job.factors else 1.0)


class RackRun:
    """What one rack has left behind.

    Attributes:
        rows: of its timeline, times in seconds.
        begun, ended: of its steps but the first `warm`.
        idle: the share of that time in which it waited.
    """

    def __init__(self, folder: Path, rank: int, warm: int) -> None:
        written: Sequence[dict[str, Any]] = read_rows(rack_folder(folder, rank) / TIMELINE_FILE)
        self.rows = [
            row | {"start": float(row["start"]), "end": float(row["end"]), "step": int(row["step"])} for row in written
        ]
        self.traffic = read_json(rack_folder(folder, rank) / TRAFFIC_FILE)
        waits = [row for row in self.rows if row["what"] in WAITING and row["kind"] == "training"]
        self.begun = min(row["start"] for row in waits if row["step"] > warm)
        last = max(row["end"] for row in waits)
        after = (row["end"] for row in self.rows if row["what"] == "compute" and row["start"] >= last - 1e-5)
        self.ended = min(after, default=last)
        waited = sum(row["end"] - row["start"] for row in waits if row["step"] > warm)
        self.idle = waited / (self.ended - self.begun)
        self.computed = sum(
            row["end"] - row["start"]
            for row in self.rows
            if row["what"] == "compute" and self.begun <= row["start"] < self.ended
        )

    def sent(self) -> int:
        """Bytes of the streams of training."""
        return int(self.traffic["sent"]["forward"].get("training", {"bytes": 0})["bytes"])
