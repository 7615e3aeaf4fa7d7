"""What the kernels for CPUs win over PyTorch's own operations when decoding, and over oneDNN's products.

    python scripts/bench/cpu_kernels.py [--size 75M] [--ranks 1] [--batch 1 8 32] [--tokens 1 4 16 48 126 512]
                                        [--keys 1024] [--rounds 3]

Both are loaded, and every round measures every batch in each of them, one right after the other: milliseconds of a pass
that brings every text one token, behind prompts of 64. Then all products of the model, in its order, with so many
tokens. Then attention alone of such a pass, of all layers, over so many keys of each text; PyTorch's has the keys of
all texts as one tensor, the runtime's lie in a paged cache. Figures are medians over the rounds, ratios the medians of
the rounds' ratios: how many times faster it is.
"""

# ruff: noqa: E402 - how threads wait is settled before torch is imported

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from surgeon.machine import use_huge_pages, wait_asleep

wait_asleep()  # as ranks do, before torch is imported
use_huge_pages()

import torch
from torch.nn.functional import scaled_dot_product_attention

from scripts.bench.decoding import SIZES, random_model
from scripts.bench.engines import Surgeon, ratio
from scripts.bench.rooflines import Rooflines
from scripts.commands import add_defaults, changed_environment, make_parser
from scripts.markdown import format_table
from surgeon.progress import progress
from surgeon.runtime.kernels.build import SWITCH, load_kernels
from surgeon.runtime.kernels.functions import Kernels, Runs, Weighting, kernels

PROMPT = 64
NEW = 24
CACHE_BYTES = 1 << 30  # keys and values of as many layers as lie in so many are measured
Times = tuple[list[float], list[float]]  # with the kernels and without, by round


def passes(folder: Path, options: argparse.Namespace) -> dict[int, Times]:
    """Seconds of a decode pass, by batch."""
    found: dict[int, Times] = {batch: ([], []) for batch in options.batch}
    own = Surgeon(folder, options.ranks, PROMPT + NEW)
    with changed_environment(**{SWITCH: "off"}):
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


def attentions(own: Kernels, options: argparse.Namespace) -> dict[int, Times]:
    """Seconds of the attention of all layers, by texts."""
    size = SIZES[options.size]
    keys = options.keys
    heads = size["num_attention_heads"]
    kv_heads = size["num_key_value_heads"]
    dim = size["hidden_size"] // heads
    layers = size["num_hidden_layers"]
    found: dict[int, Times] = {}
    for texts in options.batch:
        measured = max(1, min(layers, CACHE_BYTES // (2 * kv_heads * texts * keys * dim * 4)))
        pairs = [torch.randn(2 * kv_heads, texts * keys, dim) for _ in range(measured)]
        wholes = [
            pair.view(2, kv_heads, texts, keys, dim).transpose(1, 2).contiguous() for pair in pairs
        ]
        read = Runs(
            torch.tensor([[text * keys, keys] for text in range(texts)]), torch.arange(1, texts + 1)
        )
        queries = torch.randn(texts, heads, dim)
        times: Times = ([], [])
        for _ in range(1 + options.rounds):
            began = perf_counter()
            for pair in pairs:
                own.attend(queries, pair, read, Weighting())
            then = perf_counter()
            for whole in wholes:
                scaled_dot_product_attention(queries[:, :, None], *whole, enable_gqa=heads != kv_heads)
            for seconds, one in zip(times, (then - began, perf_counter() - then), strict=True):
                seconds.append(one * layers / measured)
        found[texts] = (times[0][1:], times[1][1:])  # libraries made themselves ready in the first round
    return found


def show(head: tuple[str, str, str], found: dict[int, Times]) -> None:
    """Print a table."""
    rows = [
        [size, f"{1000 * median(own):.1f}", f"{1000 * median(other):.1f}", ratio(other, own)]
        for size, (own, other) in found.items()
    ]
    print("\n".join(format_table([*head, "times as fast"], rows, left=())), end="\n\n")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="75M")
    add_defaults(parser, ranks=1, batch=[1, 8, 32], tokens=[1, 4, 16, 48, 126, 512], keys=1024, rounds=3)
    options = parser.parse_args()
    own = kernels()
    if own is None:
        parser.error(
            f"there are no kernels to measure: {load_kernels().problem or f'{SWITCH} is off, or cores are too few'}"
        )
    with tempfile.TemporaryDirectory() as folder:
        found = passes(random_model(Path(folder), options.size), options)
    show(("batch", "ms of a pass", "PyTorch's operations"), found)
    show(("tokens", "ms of all products", "oneDNN's"), products(options))
    head = ("texts", f"ms of attention, {options.keys} keys", "PyTorch's")
    show(head, attentions(own, options))


if __name__ == "__main__":
    main()
