"""A scan of a model larger than memory: weights read layer by layer, against the same scan in memory.

    python scripts/bench/memory.py [--folder DIR] [--limit 1500MB] [--layers 22]

Makes a random Llama of 2,048 hidden units with about 4 GB of float32 weights (in DIR, or in a temporary folder that is
removed), scans it with `surgeon scan --memory LIMIT` and without a limit, each in a process of its own, and prints the
most resident memory and the time of each, and the largest difference between their numbers. Every number must agree to
1e-4. Where the first scan took more than LIMIT, that is said below the table, and the exit status is 3.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.decoding import copy_tokenizer
from scripts.bench.goals import MISSED, missed, run_surgeon
from scripts.bench.large_model import make_model
from scripts.commands import add_defaults, make_parser
from scripts.markdown import print_table
from surgeon.machine import parse_size, show_size

TOLERANCE = 1e-4
SHARD_BYTES = 500_000_000
OPERATIONS = ("prune", "merge", "2-parallel", "lp", "ladder")


@dataclass(frozen=True)
class Outcome:
    """One scan's process: its peak resident memory in bytes, its seconds, and its cells."""

    peak: int
    seconds: float
    cells: pd.DataFrame


def write_model(folder: Path, layers: int) -> int:
    """Write the random model, with the demo model's tokenizer; returns the bytes of its weights."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=2048,
        max_position_embeddings=1024,
    )
    make_model(folder, config, SHARD_BYTES, torch.float32)
    copy_tokenizer(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def scan(model: Path, output: Path, arguments: argparse.Namespace, limit: str | None) -> Outcome:
    """Run `surgeon scan` in a process of its own."""
    command: list[object] = ["scan", model, "--data", "demo", "-o", output]
    command += ["--tokens", arguments.tokens, "--window", 128, "--every", arguments.every]
    for operation in OPERATIONS:
        command += ["--operation", operation]
    command += [] if limit is None else ["--memory", limit]
    seconds, peak = run_surgeon(*command)
    return Outcome(peak, seconds, pd.read_csv(output / "cells.csv"))


def largest_difference(one: pd.DataFrame, other: pd.DataFrame) -> float:
    """The largest relative difference of perplexities and divergences (absolute where these are next to nothing)."""
    assert (one[["operation", "first", "last"]] == other[["operation", "first", "last"]]).all(axis=None)
    perplexity = (one["perplexity"] / other["perplexity"] - 1).abs().max()
    divergence = (
        (one["divergence"] - other["divergence"]).abs() / np.maximum(other["divergence"], 0.01)
    ).max()
    return float(max(perplexity, divergence))


def main() -> None:
    goal = "the scan with a limit took more"
    parser = make_parser(__doc__, epilog=f"Exit status {MISSED}: {goal}.")
    parser.add_argument("--folder", type=Path, help="keep the model here, and use it again")
    add_defaults(parser, limit="1500MB", layers=22, tokens=256, every=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.folder or Path(temporary) / "model"
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        size = size or write_model(model, arguments.layers)
        streamed = scan(model, Path(temporary) / "streamed", arguments, arguments.limit)
        whole = scan(model, Path(temporary) / "whole", arguments, None)
    title = f"surgeon scan, {len(whole.cells)} cells of a model of {show_size(size)} of float32 weights"
    outcomes = {f"--memory {arguments.limit}": streamed, "no limit": whole}
    rows = [[name, show_size(one.peak), f"{one.seconds:.0f}"] for name, one in outcomes.items()]
    print_table(title, ["", "peak resident", "seconds"], rows)
    difference = largest_difference(streamed.cells, whole.cells)
    print(f"largest difference between their numbers: {difference:.1e}")
    if difference > TOLERANCE:
        raise SystemExit(f"the numbers differ by more than {TOLERANCE:g}")
    limit = parse_size(arguments.limit)
    if streamed.peak > limit:
        raise missed(f"{goal}: {show_size(streamed.peak)}, not at most {show_size(limit)}")


if __name__ == "__main__":
    main()
