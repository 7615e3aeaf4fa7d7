"""What each program wins on two CPU ranks, over shared memory, gloo and emulated links, beside what was to be expected.

    python scripts/bench/runtime.py [-o FILE.md] [--rounds 3] [--batch 1 8] [--links shm gloo 1ms 0.2ms]
        [--programs dense halves ladder]

A random Llama of 24 layers, 512 wide (75M parameters, vocabulary 4,096), float32. For each way of connecting the ranks
all programs are loaded at once, and every round runs each of them, so that what else the machine does disturbs all
alike. One markdown table for each way; figures are medians over the rounds, "x dense" the median of the rounds' ratios:
of decoding passes, and behind the time to the first token of that. "Halves" is the dense program in two halves that
take turns (surgeon/runtime/model/engine.py), which texts alone have of their prompts only.
A link is a delay per collective (1ms) or a bandwidth (10MB/s); +int8 or +int4 sends reductions as integers.

Expected: every decoding pass is run again on clocks, with what each rank took to compute each step of it, and a delay
d per collective: a dense program costs c + d per step, LP saves whole steps' d, a ladder's period is max(c, (c + d) /
2), and no less than what the bytes of one keep a link of little bandwidth busy. Of an emulated link d is known; of
shared memory and gloo it is what makes dense's expectation right. Syncs are those of the program's steps; two more per
pass belong to the embedding and the head.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.decoding import (
    LAYERS,
    RANKS,
    add_options,
    compared,
    parse,
    random_model,
    write_tables,
)
from scripts.bench.expected import ENDS, expected_decode
from surgeon.benchmarks.measure import RankBench, Result, Split
from surgeon.benchmarks.timing import RankRun
from surgeon.cost.workload import Workload
from surgeon.language.program import Program
from surgeon.progress import progress
from surgeon.runtime.comm.link import Link
from surgeon.runtime.comm.wires import WIRES
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.threads import threads_per_rank

UPPER_BOUND, HALVES = "upper bound", "halves"
WAYS = ("shm", "gloo", "1ms", "0.2ms")
COLUMNS = (
    *("batch", "program", "depth", "syncs", "tokens/s", "x dense", "first", "x dense", "compute", "waiting"),
    *("per token", "expected", "off by"),
)
HEAD = "| " + " | ".join(COLUMNS) + " |\n|--:|:--|" + "--:|" * (len(COLUMNS) - 2)


@dataclass(frozen=True)
class Way:
    """How ranks are connected: collectives, an emulated link, and how reductions are sent."""

    name: str
    collectives: str
    link: Link | None = None
    compression: str | None = None


def programs() -> dict[str, Program]:
    """The programs compared; the last one on ranks that are not connected."""
    return compared(LAYERS) | {HALVES: Program.dense(LAYERS), UPPER_BOUND: Program.dense(LAYERS)}


def parse_way(text: str) -> Way:
    """Shm, gloo, 1ms, 10MB/s; with +int8 or +int4."""
    base, _, integers = text.partition("+")
    compression = integers if integers in WIRES else None
    sent = f", sent as {compression}" if compression else ""
    if bool(integers) == bool(compression):
        if base in ("shm", "gloo"):
            return Way(base + sent, base, None, compression)
        for unit, what in (("ms", "delay"), ("MB/s", "bandwidth")):
            number = base.removesuffix(unit)
            if number != base and number.replace(".", "", 1).isdigit():
                link = Link(delay=float(number) / 1e3) if what == "delay" else Link(bandwidth=float(number) * 1e6)
                return Way(f"shared memory and a link of {number} {unit}{sent}", "shm", link, compression)
    raise argparse.ArgumentTypeError(f"{text!r} is not shm, gloo, a delay such as 1ms or a bandwidth such as 10MB/s")


def measure_way(way: Way, folder: Path, options: argparse.Namespace) -> list[Result]:
    """Every program at every batch size."""
    plans = {
        name: make_plan(
            folder, RANKS, options.prompt + options.new, str(program), halves="on" if name == HALVES else "off"
        )
        for name, program in programs().items()
        if name in options.programs
    }
    with Ranks(RankOptions(RANKS, collectives=way.collectives, link=way.link, compression=way.compression)) as ranks:
        return measure_plans(ranks, plans, way.name, options)


def measure_plans(ranks: Ranks, plans: Mapping[str, Plan], name: str, options: argparse.Namespace) -> list[Result]:
    """The same, given ranks."""
    loads = [Workload(batch, options.prompt, options.new) for batch in options.batch]
    bench = RankBench.load(ranks, plans, {UPPER_BOUND})
    with progress(name, options.rounds * len(loads) * len(plans), "runs") as advance:
        return bench.measure(loads, options.rounds, advance)


def decoding(result: Result) -> list[Split]:
    """Where decoding passes' time goes, by round."""
    return [one.decode_pass for one in result.rounds if one.decode_pass is not None]


def delays(way: Way, dense: Result) -> list[tuple[float, float]]:
    """Seconds of a collective, by round: its delay, and before that what its bytes keep the line busy."""
    program = Program.parse(dense.plan.program)
    collectives = program.sync_points(RANKS) + ENDS
    if way.link is None:
        measured = zip(dense.rounds, dense.runs, strict=True)
        return [((one.per_token - expected_decode(program, runs, 0.0)) / collectives, 0.0) for one, runs in measured]
    calls = [split.layers for split in decoding(dense)]
    return [(way.link.delay, one.bytes / (one.all_reduces + one.all_gathers) / way.link.bandwidth) for one in calls]


def expected(result: Result, dense: Result, each: Sequence[tuple[float, float]]) -> float:
    """Seconds per token, the median over rounds; without communication, what dense's slowest rank computes."""
    if not result.connected:
        return median(max(map(computing, runs)) for runs in dense.runs)
    program = Program.parse(result.plan.program)
    parts = 2 if result.plan.halves == "on" and result.load.batch > 1 else 1
    return median(
        expected_decode(program, runs, *one, parts=parts) for runs, one in zip(result.runs, each, strict=True)
    )


def computing(run: RankRun) -> float:
    """Seconds that a rank computes per decoding pass."""
    return fmean(one.seconds - (one.waiting or 0.0) for one in run.passes if one.decode)


def lines(way: Way, results: Sequence[Result], options: argparse.Namespace) -> Iterator[str]:
    yield f"### {way.name}"
    yield ""
    yield f"Prompt {options.prompt}, {options.new} new tokens, {options.rounds} rounds. Times are ms per pass."
    yield ""
    yield HEAD
    for result in results:
        yield row(way, result, next(one for one in results if one.load == result.load))


def row(way: Way, result: Result, dense: Result) -> str:
    plan, connected = result.plan, result.connected
    program = Program.parse(plan.program)
    per_token = median(one.per_token for one in result.rounds)
    rounds = list(zip(dense.rounds, result.rounds, strict=True))
    ratios = [base.per_token / own.per_token for base, own in rounds]
    firsts = [base.first_token / own.first_token for base, own in rounds]
    foreseen = expected(result, dense, delays(way, dense))
    cells = [
        str(result.load.batch),
        result.name,
        f"{program.effective_depth():g}",
        str(program.sync_points(RANKS) if connected else 0),
        f"{result.load.batch / per_token:.1f}",
        f"{median(ratios):.2f}",
        f"{1e3 * median(one.first_token for one in result.rounds):.1f}",
        f"{median(firsts):.2f}",
        f"{1e3 * median(split.compute for split in decoding(result)):.1f}",
        f"{1e3 * median(split.waiting for split in decoding(result)):.1f}",
        f"{1e3 * per_token:.1f}",
        f"{1e3 * foreseen:.1f}",
        f"{per_token / foreseen - 1:+.0%}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", type=parse_way, default=[*map(parse_way, WAYS)])
    parser.add_argument("--programs", nargs="+", choices=[*programs()], default=[*programs()], help="dense among them")
    add_options(parser)
    options = parse(parser)
    logging.disable_progress_bar()
    texts: list[str] = []
    record: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = random_model(Path(temporary) / "random")
        for way in options.links:
            results = measure_way(way, folder, options)
            load = f"{threads_per_rank(RANKS)} thread per rank; load average {os.getloadavg()[0]:.1f} at the end."
            texts.append("\n".join([*lines(way, results, options), "", f"{load}\n"]))
            record[way.name] = [{"program": one.name, **asdict(one.load),
                                 "rounds": [asdict(each) for each in one.rounds]} for one in results]  # fmt: skip
            print(texts[-1], flush=True)
    write_tables(options.output, texts, record)


if __name__ == "__main__":
    main()
