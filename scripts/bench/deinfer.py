"""What low-rank models win on two CPU ranks or more: dense, Base and DeInfer, over shared memory and emulated links.

    python scripts/bench/deinfer.py [-o FILE.md] [--keeps 0.8 0.6 0.4 0.2] [--links shm 0.2ms 1ms 10MB/s] [--ranks 2]

The random Llama of runtime.py (24 layers, 512 wide, float32), every matrix of it as two factors that have a share
(`keep`) of its parameters; speed does not depend on what the numbers are. Base shares out both factors of every matrix
by rank columns, sums after each pair, and has every rank compute all heads. DeInfer gathers first factors in rank
space; what is added to the stream is summed there, too. Auto shares out first factors or not, as measured at the start.

All are loaded at once, and every round runs each of them. One markdown table for each way of connecting the ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.decoding import DENSE, add_options, format_section, parse, random_model, write_tables
from scripts.bench.runtime import measure_plans, parse_way
from scripts.commands import add_defaults, make_parser
from scripts.markdown import format_table
from surgeon.benchmarks.measure import Result, bench_record, bench_table
from surgeon.checkpoint.random_weights import RandomFactors
from surgeon.exports.export import plan_export, write_export
from surgeon.language.operations import OPERATIONS
from surgeon.language.program import Program
from surgeon.opened import open_model
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks

BASE = "Base"
DEINFER = "DeInfer"
WAYS = {BASE: "base", DEINFER: "gather", "auto": "auto"}
LINKS = ("shm", "0.2ms", "1ms", "10MB/s")
COLUMNS = [
    "batch",
    "keep",
    "how",
    "tokens/s",
    "x dense",
    "x Base",
    "first",
    "per token",
    "compute",
    "waiting",
    "KB sent",
]


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


def candidates(
    source: Path, factored: dict[float, Path], ranks: int, tokens: int
) -> dict[Compared, Plan]:
    """The dense model, then every way of every keep."""
    found = {Compared(DENSE, None, DENSE): make_plan(source, ranks, tokens)}
    for keep, folder in factored.items():
        for how, way in WAYS.items():
            name = f"{how} {keep:g}"
            found[Compared(name, keep, how)] = make_plan(folder, ranks, tokens, low_rank=way)
    return found


def rate(result: Result) -> float:
    """New tokens per second, the first of each text left out; the median over rounds."""
    return float(1e3 * result.load.batch / bench_table([result])["per_token_ms"].iloc[0])


def rows(
    found: dict[Compared, Plan], results: Sequence[Result], options: argparse.Namespace
) -> Iterator[list[object]]:
    by_name = {(one.name, one.load.batch): one for one in results}
    for batch in options.batch:
        dense = by_name[DENSE, batch]
        for compared in found:
            base = dense if compared.keep is None else by_name[f"{BASE} {compared.keep:g}", batch]
            yield row(compared, by_name[compared.name, batch], dense, base)


def row(compared: Compared, own: Result, dense: Result, base: Result) -> list[object]:
    """Ratios are medians of the rounds' ratios."""
    (figures,) = bench_table([dense, own]).tail(1).itertuples()
    over_base = bench_table([base, own])["per_token_speedup"].iloc[-1]
    keep = "" if compared.keep is None else f"{compared.keep:g}"
    return [
        own.load.batch,
        keep,
        compared.how,
        f"{rate(own):.1f}",
        f"{figures.per_token_speedup:.2f}",
        f"{over_base:.2f}" if keep else "",
        f"{figures.first_token_ms:.1f}",
        f"{figures.per_token_ms:.1f}",
        f"{figures.decode_compute_ms:.1f}",
        f"{figures.decode_waiting_ms:.1f}",
        f"{figures.decode_bytes / 1e3:.1f}",
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--links", nargs="+", type=parse_way, default=[*map(parse_way, LINKS)])
    add_defaults(parser, keeps=[0.8, 0.6, 0.4, 0.2], ranks=2)
    add_options(parser)
    options = parse(parser)
    texts: list[str] = []
    measured: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        source = random_model(Path(temporary) / "random")
        factored = {
            keep: export_factors(source, keep, Path(temporary) / f"keep{keep:g}")
            for keep in options.keeps
        }
        found = candidates(source, factored, options.ranks, options.prompt + options.new)
        plans = {one.name: plan for one, plan in found.items()}
        for way in options.links:
            with Ranks(RankOptions(options.ranks, collectives=way.collectives, link=way.link)) as ranks:
                results = measured[way.name] = measure_plans(ranks, plans, way.name, options)
            table = format_table(COLUMNS, rows(found, results, options), left=(2,))
            texts.append(
                format_section(f"{way.name}, {options.ranks} ranks", options, table, options.ranks)
            )
            print(texts[-1], flush=True)
    write_tables(
        options.output, texts, {way: bench_record(results) for way, results in measured.items()}
    )


if __name__ == "__main__":
    main()
