"""What the kernels for CPUs win: decoding with them and with PyTorch's own operations, and products beside oneDNN's.

    python scripts/bench/cpu_kernels.py [--size 75M] [--ranks 1] [--batch 1 8 32] [--tokens 1 4 16 48 126 512]
                                        [--rounds 3]

Both are loaded, and every round measures every batch in each of them, one right after the other: milliseconds of a pass
that brings every text one token, behind prompts of 64. Then all products of the model, in its order, with so many
tokens. Figures are medians over the rounds, ratios the medians of the rounds' ratios: how many times faster it is.
"""

# ruff: noqa: E402 - how threads wait is settled before torch is imported

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from surgeon.memory import use_huge_pages
from surgeon.threads import wait_asleep

wait_asleep()  # as ranks do, before torch is imported
use_huge_pages()

from scripts.bench.decoding import SIZES, random_model
from scripts.bench.engines import Surgeon, ratio
from scripts.bench.rooflines import Rooflines
from surgeon.progress import progress
from surgeon.runtime.kernels.build import SWITCH, built

PROMPT, NEW = 64, 24
Times = tuple[list[float], list[float]]  # with the kernels and without, by round


@contextmanager
def switched_off() -> Iterator[None]:
    """Processes that start inside do without the kernels."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "off"
    try:
        yield
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before


def passes(folder: Path, options: argparse.Namespace) -> dict[int, Times]:
    """Seconds of a decode pass, by batch."""
    found: dict[int, Times] = {batch: ([], []) for batch in options.batch}
    own = Surgeon(folder, options.ranks, PROMPT + NEW)
    with switched_off():
        plain = Surgeon(folder, options.ranks, PROMPT + NEW)
    try:
        with progress("passes", options.rounds * len(found), "batches") as advance:
            for _ in range(options.rounds):
                for batch, times in found.items():
                    for engine, seconds in zip((own, plain), times, strict=True):
                        seconds.append(median(engine.measure(batch, PROMPT, NEW)[1]))
                    advance(1)
    finally:
        own.close()
        plain.close()
    return found


def products(options: argparse.Namespace) -> dict[int, Times]:
    """Seconds of all products of the model, by tokens."""
    rooflines = Rooflines(SIZES[options.size])
    found: dict[int, Times] = {tokens: ([], []) for tokens in options.tokens}
    for _ in range(options.rounds):
        for tokens, (own, onednn) in found.items():
            own.append(rooflines.products(tokens))
            onednn.append(rooflines.products(tokens, by_onednn=True))
    return found


def lines(head: tuple[str, str, str], found: dict[int, Times]) -> list[str]:
    """A table."""
    rows = [f"| {' | '.join(head)} | times as fast |", "|--:|--:|--:|--:|"]
    for size, (own, other) in found.items():
        rows.append(f"| {size} | {1000 * median(own):.1f} | {1000 * median(other):.1f} | {ratio(other, own)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="75M")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 48, 126, 512])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if built().library is None:
        parser.error(f"there are no kernels to measure: {built().problem or f'{SWITCH} is off'}")
    with tempfile.TemporaryDirectory() as folder:
        found = passes(random_model(Path(folder), options.size), options)
    print("\n".join(lines(("batch", "ms of a pass", "PyTorch's operations"), found)))
    print()
    print("\n".join(lines(("tokens", "ms of all products", "oneDNN's"), products(options))))


if __name__ == "__main__":
    main()
