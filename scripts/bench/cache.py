"""How many texts a cache has room for, with keys and values whole and in rank space.

    python scripts/bench/cache.py [--memory 64MB] [--texts 64]

The demo model with factors of rank 26 in place of every k and v, on one rank and on two, each way of `--kv`, for texts
of 256 tokens; nothing is run, the figures are those that `surgeon serve` goes by.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.commands import make_parser
from scripts.markdown import format_table
from surgeon.checkpoint.config import open_stored
from surgeon.machine import parse_size
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import choose_cache

TOKENS = 256


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--memory", type=parse_size, default=parse_size("64MB"))
    parser.add_argument("--texts", type=int, default=64, help="that are wanted together")
    options = parser.parse_args()
    layers = range(open_stored("demo").num_layers)
    program = " ".join(f"A{layer}@k26,v26 F{layer}" for layer in layers)
    rows = []
    for ranks, kv in product((1, 2), ("full", "lowrank", "auto")):
        plan = make_plan("demo", ranks, TOKENS, program, kv=kv)
        _, blocks = choose_cache(plan, "cpu", options.texts, None, options.memory)
        rows.append([ranks, kv, blocks, blocks // blocks_for(TOKENS)])
    print("\n".join(format_table(["ranks", "kv", "blocks", "texts"], rows, left=(1,))))


if __name__ == "__main__":
    main()
