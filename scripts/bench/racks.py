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
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.rack_bench import HIDDEN, LINKS, NAMES, Bench, Cell, Figures, cells
from scripts.commands import add_defaults, make_parser
from scripts.markdown import format_table

COLUMNS = [
    "ranks",
    "link",
    "way",
    "tokens/s (low, high)",
    "to 1F1B",
    "MB a step forward, back",
    "idle mean, most",
]
COLUMNS += ["resident, MB", "computing over time"]


def show(bench: Bench, todo: Sequence[Cell]) -> None:
    """Print the table of what is there."""
    found = {cell: rounds for cell in todo if (rounds := list(bench.rounds(cell)))}
    layers = bench.config.num_hidden_layers
    took = (
        f"computing takes {1000 * bench.unit:g} ms per layer"
        if bench.unit
        else "computing takes what it takes"
    )
    print(
        f"\n{layers} layers x {HIDDEN}, {bench.optimisation.micro_batches} micro-batches a step, {took}\n"
    )
    rows = [
        row_of(cell, rounds, found.get(replace(cell, way="1f1b"), [])) for cell, rounds in found.items()
    ]
    print("\n".join(format_table(COLUMNS, rows, left=range(len(COLUMNS)))))


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


def _parse() -> argparse.Namespace:
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
    return parser.parse_args()


def main() -> None:
    arguments = _parse()
    bench = Bench(arguments)
    todo = cells(arguments.ranks, arguments.links)
    if not arguments.table:
        bench.measure(todo, arguments.rounds, arguments.minutes)
    show(bench, todo)


if __name__ == "__main__":
    main()
