"""What low-rank models win on two CPU ranks or more: dense, Base and DeInfer, over shared memory and emulated links.

    python scripts/bench/deinfer.py [-o FILE.md] [--keeps 0.8 0.6 0.4 0.2] [--links shm 0.2ms 1ms 10MB/s] [--ranks 2]

The random Llama of runtime.py (24 layers, 512 wide, float32), every matrix of it as two factors that have a share
(`keep`) of its parameters; speed does not depend on what the numbers are. Base shares out both factors of every matrix
by rank columns, sums after each pair, and has every rank compute all heads. DeInfer gathers first factors in rank
space; what is added to the stream is summed there, too. Auto shares out first factors or not, as measured at the start.

All are loaded at once, and every round runs each of them. One markdown table for each way of connecting the ranks, and
with -o a picture of the first batch size beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.decoding import DENSE, add_options, parse, random_model, write_tables
from scripts.bench.runtime import Way, measure_plans, parse_way
from surgeon.benchmarks.measure import Result
from surgeon.exports.export import plan_export, write_export
from surgeon.language.operations import OPERATIONS
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.weights import Factors, WeightMatrix
from surgeon.opened import open_model
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.threads import threads_per_rank

BASE, DEINFER, AUTO = "Base", "DeInfer", "auto"
WAYS = {BASE: "base", DEINFER: "gather", AUTO: "auto"}
LINKS = ("shm", "0.2ms", "1ms", "10MB/s")
HEAD = """\
| batch | keep | how | tokens/s | x dense | x Base | first | per token | compute | waiting | KB sent |
|--:|--:|:--|--:|--:|--:|--:|--:|--:|--:|--:|"""


class RandomFactors:
    """Factors of the right shapes, made at once."""

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        """Small random numbers."""
        rank = sublayer.rank(role)
        assert rank is not None
        outputs, inputs = matrix.shape
        return Factors(torch.randn(rank, inputs) / inputs**0.5, torch.randn(outputs, rank) / rank**0.5)


@dataclass(frozen=True)
class Compared:
    """One of what is compared.

    Attributes:
        keep: None for the dense model.
    """

    name: str
    keep: float | None
    how: str


def export_factors(source: Path, keep: float, folder: Path) -> Path:
    """The model with factors in place of every matrix, as a checkpoint in program form."""
    original = open_model(source)
    shapes = original.family.layer_shapes(original.config)
    dense = Program.dense(original.config.num_hidden_layers)
    layers = range(original.config.num_hidden_layers)
    program = OPERATIONS["lowrank"].function(dense, layers, shapes=shapes, keep=keep)
    write_export(plan_export(original, program, factors=RandomFactors()), folder)
    return folder


def candidates(source: Path, factored: dict[float, Path], ranks: int, tokens: int) -> dict[Compared, Plan]:
    """The dense model, then every way of every keep."""
    found = {Compared(DENSE, None, DENSE): make_plan(source, ranks, tokens)}
    for keep, folder in factored.items():
        for how, way in WAYS.items():
            name = f"{how} {keep:g}"
            found[Compared(name, keep, how)] = make_plan(folder, ranks, tokens, low_rank=way)
    return found


def rate(result: Result) -> float:
    """New tokens per second, the first of each text left out; the median over rounds."""
    return result.load.batch / median(one.per_token for one in result.rounds)


def times(result: Result, base: Result) -> float:
    """How much faster it decodes: the median of the rounds' ratios."""
    return median(b.per_token / own.per_token for b, own in zip(base.rounds, result.rounds, strict=True))


def lines(
    way: Way, found: dict[Compared, Plan], results: Sequence[Result], options: argparse.Namespace
) -> Iterator[str]:
    yield f"### {way.name}, {options.ranks} ranks"
    yield ""
    yield f"Prompt {options.prompt}, {options.new} new tokens, {options.rounds} rounds. Times are ms per pass."
    yield ""
    yield HEAD
    by_name = {(one.name, one.load.batch): one for one in results}
    for batch in options.batch:
        for compared in found:
            own, dense = by_name[compared.name, batch], by_name[DENSE, batch]
            base = None if compared.keep is None else by_name[f"{BASE} {compared.keep:g}", batch]
            yield row(compared, own, dense, base)


def row(compared: Compared, own: Result, dense: Result, base: Result | None) -> str:
    splits = [one.decode_pass for one in own.rounds if one.decode_pass is not None]
    cells = [
        str(own.load.batch),
        "" if compared.keep is None else f"{compared.keep:g}",
        compared.how,
        f"{rate(own):.1f}",
        f"{times(own, dense):.2f}",
        "" if base is None else f"{times(own, base):.2f}",
        f"{1e3 * median(one.first_token for one in own.rounds):.1f}",
        f"{1e3 * median(one.per_token for one in own.rounds):.1f}",
        f"{1e3 * median(split.compute for split in splits):.1f}",
        f"{1e3 * median(split.waiting for split in splits):.1f}",
        f"{median(split.layers.bytes for split in splits) / 1e3:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def draw(found: dict[Compared, Plan], measured: dict[str, list[Result]], path: Path) -> None:
    """Tokens per second over keep, one panel for each way of connecting the ranks, at the first batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(measured), 3.7), layout="constrained")
    for axes, (way, results) in zip(figure.subplots(1, len(measured), squeeze=False)[0], measured.items(), strict=True):
        first = results[0].load.batch
        rates = {one.name: rate(one) for one in results if one.load.batch == first}
        for how, marker in zip(WAYS, "os^", strict=True):
            points = [(one.keep, rates[one.name]) for one in found if one.how == how]
            axes.plot(*zip(*points, strict=True), marker=marker, label=how)
        axes.axhline(rates[DENSE], color="gray", linestyle="--", label=DENSE)
        axes.set(title=way.replace("shared memory and a ", ""), xlabel="keep: share of parameters", ylim=(0, None))
        axes.invert_xaxis()
    figure.axes[0].set_ylabel(f"tokens/s, batch {first}")
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels))  # inside it would hide a line
    figure.savefig(path, dpi=120)


def _recorded(result: Result) -> dict[str, object]:
    rounds = [asdict(one) for one in result.rounds]
    return {"program": result.name, **asdict(result.load), "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", type=parse_way, default=[*map(parse_way, LINKS)])
    parser.add_argument("--keeps", nargs="+", type=float, default=[0.8, 0.6, 0.4, 0.2])
    parser.add_argument("--ranks", type=int, default=2)
    add_options(parser)
    options = parse(parser)
    logging.disable_progress_bar()
    texts: list[str] = []
    measured: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        source = random_model(Path(temporary) / "random")
        factored = {keep: export_factors(source, keep, Path(temporary) / f"keep{keep:g}") for keep in options.keeps}
        found = candidates(source, factored, options.ranks, options.prompt + options.new)
        for way in options.links:
            with Ranks(RankOptions(options.ranks, collectives=way.collectives, link=way.link)) as ranks:
                plans = {one.name: plan for one, plan in found.items()}
                results = measured[way.name] = measure_plans(ranks, plans, way.name, options)
            load = (
                f"{threads_per_rank(options.ranks)} thread per rank; load average {os.getloadavg()[0]:.1f} at the end."
            )
            texts.append("\n".join([*lines(way, found, results, options), "", f"{load}\n"]))
            print(texts[-1], flush=True)
    record = {way: [_recorded(one) for one in results] for way, results in measured.items()}
    write_tables(options.output, texts, record)
    if options.output is not None:
        draw(found, measured, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
