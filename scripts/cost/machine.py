"""The cost model held against this machine: calibrate it, predict programs, measure them as `surgeon bench` does.

    python scripts/cost/machine.py -o FOLDER [--models demo random] [--ranks 1 2 4] [--links none 0.2ms 1ms 10MB/s]

Two models (the demo model; the random Llama of scripts/bench, 24 layers, 512 wide), every kind of program, several
numbers of ranks and batch sizes, prefill and decode, shared memory and emulated links. Every round calibrates
(`surgeon calibrate`'s code) and runs every program (`surgeon bench`'s); then `surgeon predict`'s code is given the
medians of what was calibrated. Numbers of ranks by which the model's heads do not divide are left out, and said.

Written: a table (machine.md), a picture of predicted against measured (machine.png), the same as data (machine.json),
and the hardware files. "In step" is the median of each round's prediction, made of this round's own figures, over
what the same round measured: what is left when the whole machine becomes faster or slower meanwhile. Noise is the same
measured against itself: odd rounds over even ones.

Nothing else should run meanwhile. On a machine that is never quiet `--typical fastest` compares the fastest pass of all
with figures made of fastest passes. With the defaults it takes about an hour, and 8 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.decoding import random_model
from scripts.bench.deinfer import export_factors
from scripts.bench.runtime import Way, parse_way
from scripts.commands import make_parser
from scripts.cost.against import WHERE, draw, lines
from surgeon.benchmarks.measure import RankBench
from surgeon.benchmarks.timing import load_timed
from surgeon.checkpoint.load import open_stored
from surgeon.cost.calibrate import MachineCalibration, hardware_text
from surgeon.cost.deployment import Deployment
from surgeon.cost.hardware_file import parse_hardware
from surgeon.cost.predict import predict
from surgeon.cost.samples import Round, load_sampled, sample_computing, sample_exchanges
from surgeon.cost.workload import Workload
from surgeon.demo import MODEL_FOLDER
from surgeon.language.operations import fuse_attention_mlp, ladder, pair, tracks
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.processes.files import write_text
from surgeon.progress import progress
from surgeon.provenance import versions
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.threads import threads_per_rank

MODELS = ("demo", "random")
LINKS = ("none", "0.2ms", "1ms", "10MB/s")
NO_LINK = Way("none", "shm")
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
        return open_stored(self.folder).config

    @property
    def shapes(self) -> ModelShapes:
        """Its shapes, which are all that a prediction needs."""
        return ModelShapes.of(self.name, self.config)

    def plan(self, ranks: int, tokens: int, program: Program | None = None) -> Plan:
        """Of the unedited model, or a program of it."""
        return make_plan(self.folder, ranks, tokens, None if program is None else str(program))


@dataclass
class Measured:
    """One number of ranks of a model.

    Attributes:
        rounds: what was calibrated in each.
        plans: of programs, by name.
        passes: seconds of rank 0's passes by round, by link, program, batch and kind.
    """

    ranks: int
    plan: Plan
    rounds: list[Round]
    plans: dict[str, Plan]
    passes: dict[tuple[str, str, int, str], list[list[float]]]


def plans(model: Model, factored: Path, ranks: int, tokens: int) -> dict[str, Plan]:
    """One program of each kind, by name."""
    layers = model.shapes.layers
    dense = Program.dense(layers)
    every = range(layers)
    found = {
        "dense": dense,
        "lp": pair(dense, range(layers // 4, 3 * layers // 4)),
        "ladder": ladder(dense, every),
        "attention || MLP": fuse_attention_mlp(dense, every),
    }
    if ranks > 1:
        found["tracks"] = tracks(dense, every, count=ranks, depth=DEPTH)
    made = {name: model.plan(ranks, tokens, program) for name, program in found.items()}
    return made | {"low rank": make_plan(factored, ranks, tokens, low_rank="gather")}


def measured(model: Model, factored: Path, ranks: int, options: argparse.Namespace) -> Measured:
    """Calibrate and run every program, under every link and load, once in each round."""
    plan = model.plan(ranks, min(CALIBRATED_TOKENS, model.shapes.positions))
    found = Measured(ranks, plan, [], plans(model, factored, ranks, options.prompt + options.new), {})
    links = options.links if ranks > 1 else [NO_LINK]
    loads = [Workload(batch, options.prompt, options.new) for batch in options.batch]
    with Ranks(RankOptions(ranks)) as started:
        load_sampled(started, plan, model.shapes)
        for way, (name, own) in product(links, found.plans.items()):
            started.call(load_timed, own, f"{way.name} {name}", True, way.link)
        total = options.rounds * (1 + len(links) * len(loads) * len(found.plans))
        with progress(f"{model.name}, {ranks} ranks", total, "runs") as advance:
            for number in range(options.rounds + 1):  # the first one is for getting used to it
                one = Round()
                sample_computing(started, plan, model.shapes, one, TYPICAL[options.typical])
                if number:
                    advance(1)
                if ranks > 1:
                    sample_exchanges(started, "shm", one, TYPICAL[options.typical])
                found.rounds += [one] if number else []
                for way, load, name in product(links, loads, found.plans):
                    named = f"{way.name} {name}"
                    bench = RankBench(started, {named: found.plans[name]})
                    lead = bench.run(named, load if number else replace(load, new=2))[0]
                    if number:
                        for kind, decode in (("prefill", False), ("decode", True)):
                            seconds = [each.seconds for each in lead.passes if each.decode == decode]
                            found.passes.setdefault((way.name, name, load.batch, kind), []).append(seconds)
                        advance(1)
    return found


def cells(model: Model, everything: Sequence[Measured], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measurements beside predictions of the file that is written and of each round's own figures (against.py)."""
    typical = TYPICAL[options.typical]
    alone = everything[0]
    hardware = parse_hardware(written(model, everything, options))
    for each in everything:
        own = [
            parse_hardware(file_of(model, {alone.ranks: alone.plan, each.ranks: each.plan}, rounds, options))
            for one in range(options.rounds)
            for rounds in [{1: alone.rounds, each.ranks: each.rounds[one : one + 1]}]
        ]
        links = {way.name: way.link for way in options.links} | {NO_LINK.name: None}
        for link, name, batch in dict.fromkeys(key[:3] for key in each.passes):
            plan = each.plans[name]
            workload = Workload(batch, options.prompt, options.new)
            deployment = Deployment(each.ranks, plan.dtype, emulated=links[link], low_rank="gather")
            program = Program.parse(plan.program)
            by = [predict(model.shapes, program, one, workload, deployment) for one in (hardware, *own)]
            for kind in ("prefill", "decode"):
                rounds = [typical(one) for one in each.passes[link, name, batch, kind]]
                predicted, *step = (getattr(one, kind).seconds for one in by)
                repeated = typical(rounds[::2]) / typical(rounds[1::2] or rounds) - 1
                in_step = median(p / m for p, m in zip(step, rounds, strict=True)) - 1
                where = dict(zip(WHERE, (model.name, each.ranks, link, name, batch, kind), strict=True))
                found = {"predicted": predicted, "measured": typical(rounds), "in_step": in_step, "repeated": repeated}
                yield where | found | {"off": predicted / typical(rounds) - 1}


def written(model: Model, everything: Sequence[Measured], options: argparse.Namespace) -> str:
    """The hardware file of all rounds, as it is written to the folder, too."""
    plans = {each.ranks: each.plan for each in everything}
    text = file_of(model, plans, {each.ranks: each.rounds for each in everything}, options)
    write_text(options.output / f"{model.name}.yaml", text)
    return text


def file_of(model: Model, plans: dict[int, Plan], rounds: dict[int, list[Round]], options: argparse.Namespace) -> str:
    """A hardware file."""
    calibration = MachineCalibration(model.shapes, plans, "cpu", options.rounds, ("shm",), TYPICAL[options.typical])
    return hardware_text(model.name, calibration, rounds)


def compared(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Everything."""
    for name in options.models:
        model = Model(name, MODEL_FOLDER if name == "demo" else random_model(folder / name))
        factored = export_factors(model.folder, KEEP, folder / f"{name}-factors")
        everything = []
        for ranks in options.ranks:
            try:
                everything.append(measured(model, factored, ranks, options))
            except ValueError as error:
                print(f"left out: {model.name}, {ranks} ranks: {error}", file=sys.stderr)
        yield from cells(model, everything, options)


def parse_link(text: str) -> Way:
    """No link but shared memory, or an emulated one."""
    if text == "none":
        return NO_LINK
    return replace(parse_way(text), name=text)


def parsed() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="a folder")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--links", nargs="+", type=parse_link, default=[*map(parse_link, LINKS)])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--typical", choices=TYPICAL, default="median")
    options = parser.parse_args()
    if options.ranks[:1] != [1]:
        parser.error("--ranks has to begin with 1, of whose figures the others are parts")
    return options


def main() -> None:
    options = parsed()
    logging.disable_progress_bar()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        found = pd.DataFrame(compared(options, Path(temporary)))
    threads = ", ".join(f"{ranks} ranks: {threads_per_rank(ranks)}" for ranks in options.ranks)
    text = "\n".join(lines(found, f"threads of each rank: {threads}; load average {os.getloadavg()[0]:.1f} at the end"))
    print(text)
    write_text(options.output / "machine.md", text + "\n")
    record = {"command": sys.argv, "versions": versions(), "cells": found.to_dict("records")}
    write_text(options.output / "machine.json", json.dumps(record, indent=1) + "\n")
    draw(found, options.output / "machine.png")


if __name__ == "__main__":
    main()
