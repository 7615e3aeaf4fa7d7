"""The cost model held against this machine: calibrate it, predict programs, measure them as `surgeon bench` does.

    python scripts/cost/machine.py -o FOLDER [--models demo random] [--ranks 1 2 4] [--links none 0.2ms 1ms 10MB/s]

Two models (the demo model; the random Llama of scripts/bench, 24 layers, 512 wide), every kind of program, several
numbers of ranks and batch sizes, prefill and decode, shared memory and emulated links. Each number of ranks of a model
is calibrated first (`surgeon calibrate`'s code), then everything is measured in rounds (`surgeon bench`'s), then
predicted (`surgeon predict`'s). Ranks by which a program's heads do not divide are left out, and said.

Written: a table (machine.md), a picture of predicted against measured (machine.png), all rounds (machine.json), and the
hardware files. Noise is the same measured against itself: the median over odd rounds beside that over even ones.

Nothing else should run meanwhile. On a machine that is never quiet `--typical fastest` compares the fastest pass of all
with figures made of fastest passes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.decoding import random_model
from scripts.bench.runtime import Way, parse_way
from scripts.cost.against import Cell, draw, lines
from surgeon.bench.measure import Candidate, Load, Result, load_candidates, measure
from surgeon.checkpoint.load import read_config
from surgeon.checkpoint.read import Checkpoint
from surgeon.cost.calibrate import MachineCalibration, hardware_text
from surgeon.cost.hardware import Hardware
from surgeon.cost.hardware_file import parse_hardware
from surgeon.cost.predict import Deployment, Workload, predict
from surgeon.cost.shapes import ModelShapes
from surgeon.demo import MODEL_FOLDER
from surgeon.operations import OPERATIONS, fuse_attention_mlp, ladder, pair, tracks
from surgeon.program import Program
from surgeon.progress import progress
from surgeon.provenance import versions, write_text
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.processes.rank import threads_per_rank
from surgeon.runtime.processes.ranks import RankOptions, Ranks

MODELS = ("demo", "random")
LINKS = ("none", "0.2ms", "1ms", "10MB/s")
DEPTH = 4  # of tracks
KEEP = 0.5  # of the parameters, in low rank
CALIBRATED_TOKENS = 512
TYPICAL: dict[str, Callable[[Sequence[float]], float]] = {"median": median, "fastest": min}


@dataclass(frozen=True)
class Model:
    """A model that is measured."""

    name: str
    folder: Path

    @property
    def config(self) -> Any:
        """Its configuration."""
        return read_config(Checkpoint(self.folder))

    @property
    def shapes(self) -> ModelShapes:
        """Its shapes, which are all that a prediction needs."""
        return ModelShapes.of(self.name, self.config)


def programs(model: Model, ranks: int) -> dict[str, str]:
    """One program of each kind, by name."""
    config, layers = model.config, model.shapes.layers
    dense, every, middle = Program.dense(layers), range(layers), range(layers // 4, 3 * layers // 4)
    shapes = model.shapes.family.layer_shapes(config)
    found = {
        "dense": dense,
        "lp": pair(dense, middle),
        "ladder": ladder(dense, every),
        "attention || MLP": fuse_attention_mlp(dense, every),
        "low rank": OPERATIONS["lowrank"].function(dense, every, shapes=shapes, keep=KEEP),
    }
    if ranks > 1:
        found["tracks"] = tracks(dense, every, count=ranks, depth=DEPTH)
    return {name: str(program) for name, program in found.items()}


def candidates(model: Model, ranks: int, tokens: int) -> list[Candidate]:
    """Those that so many ranks can run; of the others it is said why they are left out."""
    found = []
    for name, program in programs(model, ranks).items():
        try:
            found.append(Candidate(name, make_plan(model.folder, ranks, tokens, program, low_rank="gather")))
        except ValueError as error:
            print(f"left out: {model.name}, {name}, {ranks} ranks: {error}", file=sys.stderr)
    return found


def calibrated(model: Model, counts: Sequence[int], options: argparse.Namespace) -> Hardware:
    """This machine at the model's shapes, with as many ranks as the unedited model can have."""
    path = options.output / f"{model.name}.yaml"
    if options.reuse and path.exists():
        return parse_hardware(path.read_text())
    length = min(CALIBRATED_TOKENS, model.shapes.positions)
    plans: dict[int, Plan] = {}
    for ranks in counts:
        try:
            plans[ranks] = make_plan(model.folder, ranks, length)
        except ValueError as error:
            print(f"not calibrated: {model.name}, {ranks} ranks: {error}", file=sys.stderr)
    calibration = MachineCalibration(plans, "cpu", options.rounds, TYPICAL[options.typical])
    with progress(f"{model.name}: calibrate", calibration.steps, "measurements") as advance:
        text = hardware_text(model.name, calibration, calibration.measure(advance))
    write_text(path, text)
    return parse_hardware(text)


def measured(model: Model, ranks: int, way: Way, options: argparse.Namespace) -> list[Result]:
    """Every program under every load, in rounds."""
    found = candidates(model, ranks, options.prompt + options.new)
    if not found:
        return []
    loads = [Load(batch, options.prompt, options.new) for batch in options.batch]
    with Ranks(RankOptions(ranks, "cpu", "auto", way.link)) as started:
        load_candidates(started, found)
        total = options.rounds * len(loads) * len(found)
        with progress(f"{model.name}, {ranks} ranks, {way.name}", total, "runs") as advance:
            return measure(started, found, loads, options.rounds, advance)


def cells(
    model: Model, hardware: Hardware, way: Way, results: Sequence[Result], options: argparse.Namespace
) -> Iterator[Cell]:
    """What was measured beside what is predicted."""
    for result in results:
        plan, load = result.candidate.plan, result.load
        deployment = Deployment(plan.ranks, plan.dtype, emulated=way.link, low_rank="gather")
        workload = Workload(load.batch, load.prompt, load.new)
        found = predict(model.shapes, Program.parse(plan.program), hardware, workload, deployment)
        where = model.name, plan.ranks, way.name, result.candidate.name, load.batch
        typical = TYPICAL[options.typical]
        yield Cell(*where, "prefill", found.prefill.seconds, *_typical(_passes(result, False), typical))
        assert found.decode is not None
        yield Cell(*where, "decode", found.decode.seconds, *_typical(_passes(result, True), typical))


def _passes(result: Result, decode: bool) -> list[list[float]]:
    """Seconds of rank 0's passes of one kind, by round."""
    return [[one.seconds for one in runs[0].passes if one.decode == decode] for runs in result.runs]


def _typical(rounds: Sequence[Sequence[float]], typical: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    """What counts of all rounds, and of the odd ones over that of the even ones."""
    by_round = [typical(each) for each in rounds]
    odd, even = by_round[::2], by_round[1::2] or by_round
    return typical(by_round), typical(odd) / typical(even)


def compared(options: argparse.Namespace, folder: Path) -> Iterator[Cell]:
    """Everything."""
    for name in options.models:
        model = Model(name, MODEL_FOLDER if name == "demo" else random_model(folder / name))
        hardware = calibrated(model, options.ranks, options)
        for ranks in options.ranks:
            for way in options.links if ranks > 1 else options.links[:1]:
                results = measured(model, ranks, way, options)
                yield from cells(model, hardware, way, results, options)


def parse_link(text: str) -> Way:
    """No link but shared memory, or an emulated one."""
    return Way("none", "shm") if text == "none" else parse_way(text)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="a folder")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--links", nargs="+", type=parse_link, default=[*map(parse_link, LINKS)])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--typical", choices=TYPICAL, default="median")
    parser.add_argument("--reuse", action="store_true", help="take hardware files that the folder has")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    logging.disable_progress_bar()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        found = list(compared(options, Path(temporary)))
    threads = ", ".join(f"{ranks} ranks: {threads_per_rank(ranks)}" for ranks in options.ranks)
    text = "\n".join(lines(found, f"threads of each rank: {threads}; load average {os.getloadavg()[0]:.1f} at the end"))
    print(text)
    write_text(options.output / "machine.md", text + "\n")
    record = {"command": sys.argv, "versions": versions(), "cells": [asdict(cell) for cell in found]}
    write_text(options.output / "machine.json", json.dumps(record, indent=1) + "\n")
    draw(found, options.output / "machine.png")


if __name__ == "__main__":
    main()
