"""The cost model held against this machine: calibrate it, predict programs, measure them as `surgeon bench` does.

    python scripts/cost/machine.py -o FOLDER [--models demo random] [--ranks 1 2 4] [--links none 0.2ms 1ms 10MB/s]

Two models (the demo model; the random Llama of scripts/bench, 24 layers, 512 wide), every kind of program, several
numbers of ranks and batch sizes, prefill and decode, shared memory and emulated links: `surgeon calibrate` measures the
machine, every round runs every program (`surgeon bench`'s code), and `surgeon predict`'s code is given the calibration.
Numbers of ranks by which the model's heads do not divide are left out, and said.

Written: a table (machine.md), a picture of predicted against measured (machine.png), the same as data (machine.json),
and the hardware files. Noise is the machine measured against itself: odd rounds over even ones.

Nothing else should run meanwhile. With the defaults it takes about an hour, and 8 GB of memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import surgeon
from scripts.bench.decoding import random_model, write_tables
from scripts.bench.deinfer import export_factors
from scripts.bench.runtime import Way, measure_plans, parse_way
from scripts.commands import add_defaults, make_parser
from scripts.markdown import format_table
from surgeon.benchmarks.measure import Result
from surgeon.checkpoint.config import open_stored
from surgeon.cost.deployment import Deployment
from surgeon.cost.hardware import Hardware
from surgeon.cost.predict import predict
from surgeon.findings.drawing import scale
from surgeon.language.operations import fuse_attention_mlp, ladder, pair, tracks
from surgeon.language.program import Program
from surgeon.machine import threads_per_rank
from surgeon.models.shapes import ModelShapes
from surgeon.named import MODEL_FOLDER
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks

MODELS = ("demo", "random")
LINKS = ("none", "0.2ms", "1ms", "10MB/s")
NO_LINK = Way("none", "shm")
DEPTH = 4  # of tracks
KEEP = 0.5  # of the parameters, in low rank
AIM = 0.10
WORST = 0.20
KINDS = ["off", "repeated"]
WHERE = ["model", "ranks", "link", "program", "batch", "phase"]
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
MARKERS = {"prefill": "s", "decode": "o"}


def lines(cells: pd.DataFrame, note: str) -> Iterator[str]:
    """A markdown table, and before it what it comes to.

    Args:
        cells: kinds of passes of programs, with the columns of `WHERE`, predicted and measured (seconds), `off` (how
            far the prediction is from what was measured, in parts of that) and `repeated` (how far half of the rounds
            are from the other half).
    """
    yield f"{len(cells)} kinds of passes: {summary(cells)}."
    yield ""
    columns = ["", "passes", "off, median", "worst", "noise, median", "worst"]
    groups = (
        (f"{name} {value}", own) for name in WHERE for value, own in cells.groupby(name, sort=False)
    )
    yield from format_table(columns, (_group(name, own) for name, own in groups))
    yield ""
    shown = cells.assign(program=cells["program"].str.replace("|", "\\|"))
    for name in ("predicted", "measured"):
        shown[name] = (1e3 * cells[name]).map("{:.2f}".format)
    for name in KINDS:
        shown[name] = cells[name].map("{:+.0%}".format)
    columns = [
        "model",
        "ranks",
        "link",
        "program",
        "batch",
        "pass",
        "predicted ms",
        "measured ms",
        "off",
        "noise",
    ]
    values = shown[[*WHERE, "predicted", "measured", *KINDS]].itertuples(index=False)
    yield from format_table(columns, values, left=(0, 2, 3, 5))
    yield ""
    yield f"{note[:1].upper()}{note[1:]}."


def summary(cells: pd.DataFrame) -> str:
    """How far off predictions are, and how far the machine is from itself."""
    parts = cells[KINDS].abs()
    middle = parts.median()
    most = parts.max()
    within = (parts["off"] <= AIM).mean()
    return (
        f"predictions are off by {middle['off']:.1%} (median), {most['off']:.0%} at worst, {within:.0%} of them by at "
        f"most {AIM:.0%}; half of the rounds differ from the other half by {middle['repeated']:.1%}, "
        f"{most['repeated']:.0%} at worst"
    )


def _group(name: str, cells: pd.DataFrame) -> list[object]:
    parts = [cells[kind].abs() for kind in KINDS]
    figures = [text for part in parts for text in (f"{part.median():.1%}", f"{part.max():.0%}")]
    return [name.replace("|", "\\|"), len(cells), *figures]


def draw(cells: pd.DataFrame, path: Path) -> None:
    """One point for each: measured to the right, predicted upwards, with a diagonal and bands around it."""
    figure = Figure(figsize=(7.5, 7), layout="constrained")
    axes = figure.subplots()
    seconds = 1e3 * cells[["predicted", "measured"]]
    ends = [seconds.min(axis=None) / 1.5, seconds.max(axis=None) * 1.5]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for part, alpha in ((WORST, 0.12), (AIM, 0.2)):
        low, high = ([each * factor for each in ends] for factor in (1 - part, 1 + part))
        axes.fill_between(
            ends, low, high, color="gray", alpha=alpha, linewidth=0, label=f"within {part:.0%}"
        )
    for (program, some), color in zip(cells.groupby("program", sort=False), COLORS, strict=False):
        for phase, marker in MARKERS.items():
            own = seconds.loc[some.index[some["phase"] == phase]]
            style = {"s": 18, "color": color, "marker": marker, "alpha": 0.7, "linewidths": 0}
            axes.scatter(own["measured"], own["predicted"], label=f"{program}, {phase}", **style)
    axes.set(xlabel="measured, ms", ylabel="predicted, ms")
    axes.set_aspect("equal")
    for which in ("x", "y"):
        scale(axes, which, ends, log=True)
    off = cells["off"].abs()
    axes.set_title(
        f"{len(cells)} kinds of passes: off by {off.median():.1%} (median), {off.max():.0%} at worst"
    )
    axes.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=130)


def plans(folder: Path, factored: Path, ranks: int, tokens: int) -> dict[str, Plan]:
    """One program of each kind, by name."""
    layers = open_stored(folder).num_layers
    dense = Program.dense(layers)
    found = {
        "dense": dense,
        "lp": pair(dense, range(layers // 4, 3 * layers // 4)),
        "ladder": ladder(dense, range(layers)),
        "attention || MLP": fuse_attention_mlp(dense, range(layers)),
    }
    if ranks > 1:
        found["tracks"] = tracks(dense, range(layers), count=ranks, depth=DEPTH)
    made = {name: make_plan(folder, ranks, tokens, str(program)) for name, program in found.items()}
    return made | {"low rank": make_plan(factored, ranks, tokens, low_rank="gather")}


def cells(
    name: str, folder: Path, factored: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measurements of a model beside predictions."""
    found: dict[int, dict[str, Plan]] = {}
    for ranks in options.ranks:
        try:
            found[ranks] = plans(folder, factored, ranks, options.prompt + options.new)
        except ValueError as error:
            print(f"left out: {name}, {ranks} ranks: {error}", file=sys.stderr)
    file = options.output / f"{name}.yaml"
    file.unlink(missing_ok=True)
    hardware = surgeon.calibrate(folder, file, ranks=[*found], rounds=options.rounds, device="cpu")
    shapes = ModelShapes.of(name, open_stored(folder).config)
    for ranks, made in found.items():
        for way in options.links if ranks > 1 else [NO_LINK]:
            with Ranks(RankOptions(ranks, link=way.link)) as started:
                results = measure_plans(started, made, f"{name}, {ranks} ranks, {way.name}", options)
            for result in results:
                yield from compared(shapes, hardware, ranks, way, result)


def compared(
    shapes: ModelShapes, hardware: Hardware, ranks: int, way: Way, result: Result
) -> Iterator[dict[str, Any]]:
    """Both kinds of passes of a program under a load."""
    deployment = Deployment(ranks, result.plan.dtype, emulated=way.link, low_rank="gather")
    prediction = predict(shapes, Program.parse(result.plan.program), hardware, result.load, deployment)
    for kind, decode in (("prefill", False), ("decode", True)):
        rounds = [
            median(one.seconds for one in runs[0].passes if one.decode == decode) for runs in result.runs
        ]
        where = (shapes.name, ranks, way.name, result.name, result.load.batch, kind)
        predicted = getattr(prediction, kind).seconds
        measured = median(rounds)
        found = {"predicted": predicted, "measured": measured, "off": predicted / measured - 1}
        found["repeated"] = median(rounds[::2]) / median(rounds[1::2] or rounds) - 1
        yield dict(zip(WHERE, where, strict=True)) | found


def parse_link(text: str) -> Way:
    """No link but shared memory, or an emulated one."""
    if text == "none":
        return NO_LINK
    return replace(parse_way(text), name=text)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="a folder")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    add_defaults(parser, ranks=[1, 2, 4], batch=[1, 8, 32], prompt=16, new=12, rounds=5)
    parser.add_argument("--links", nargs="+", type=parse_link, default=[*map(parse_link, LINKS)])
    options = parser.parse_args()
    if options.ranks[:1] != [1]:
        parser.error("--ranks has to begin with 1, of whose figures the others are parts")
    logging.disable_progress_bar()
    options.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.models:
            folder = MODEL_FOLDER if name == "demo" else random_model(Path(temporary) / name)
            factored = export_factors(folder, KEEP, Path(temporary) / f"{name}-factors")
            rows += cells(name, folder, factored, options)
    found = pd.DataFrame(rows)
    threads = ", ".join(f"{ranks} ranks: {threads_per_rank(ranks)}" for ranks in options.ranks)
    note = f"threads of each rank: {threads}; load average {os.getloadavg()[0]:.1f} at the end"
    text = "\n".join(lines(found, note))
    print(text)
    write_tables(options.output / "machine.md", [text], {"cells": rows})
    draw(found, options.output / "machine.png")


if __name__ == "__main__":
    main()
