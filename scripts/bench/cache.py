"""How many texts a cache has room for, with keys and values whole and in rank space.

    python scripts/bench/cache.py [--memory 64MB] [--rank 26] [--tokens 256] [--texts 64]

The demo model with factors of this rank in place of every k and v, on one rank and on two, each way of `--kv`; nothing
is run, the figures are those that `surgeon serve` goes by.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from surgeon.checkpoint.config import open_stored
from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, Sublayer
from surgeon.machine import parse_size
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import choose_cache


def low_rank_attentions(layers: int, rank: int) -> str:
    """The unedited program with factors of k and v."""

    def factored(sublayer: Sublayer) -> Sublayer:
        if sublayer.kind == ATTENTION:
            return replace(sublayer, ranks=(("k", rank), ("v", rank)))
        return sublayer

    return str(Program.dense(layers).renamed(factored))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", type=parse_size, default=parse_size("64MB"))
    parser.add_argument("--rank", type=int, default=26)
    parser.add_argument("--tokens", type=int, default=256, help="of the longest text")
    parser.add_argument("--texts", type=int, default=64, help="that are wanted together")
    options = parser.parse_args()
    program = low_rank_attentions(open_stored("demo").num_layers, options.rank)
    print("| ranks | kv | blocks | texts |\n|--:|:--|--:|--:|")
    for ranks in (1, 2):
        for kv in ("full", "lowrank", "auto"):
            plan = make_plan("demo", ranks, options.tokens, program, kv=kv)
            _, blocks = choose_cache(plan, "cpu", options.texts, None, options.memory)
            print(f"| {ranks} | {kv} | {blocks} | {blocks // blocks_for(options.tokens)} |")


if __name__ == "__main__":
    main()
