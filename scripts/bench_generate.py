"""What programs win on several ranks: tokens/s, collectives and bytes per token, in rounds that take turns.

    python scripts/bench_generate.py [MODEL] [--tp 2] [--rounds 5] [--batch 1] [--collectives shm gloo]

All programs are loaded by the same ranks, and every round runs each of them once, so that what else the machine does
disturbs all alike. A ratio is the median over rounds of a program's tokens/s by the dense program's of that round.
MODEL is a checkpoint of a Llama shape, `demo`, or `random` for 24 layers, 512 wide, 75M parameters, random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from surgeon.checkpoint.read import locate
from surgeon.operations import OPERATIONS
from surgeon.program import Program, Step
from surgeon.progress import progress
from surgeon.provenance import versions
from surgeon.runtime.bench import WARM_UP_TOKENS, Candidate, Load, load_candidates, run_once, summarise
from surgeon.runtime.collectives import Counts
from surgeon.runtime.launch import Ranks
from surgeon.runtime.prepare import make_plan
from surgeon.runtime.rank import threads_per_rank

DENSE = "dense"


@dataclass
class Row:
    """One program under one kind of collectives; figures by round."""

    collectives: str
    name: str
    depth: float
    expected_syncs: int
    counts: Counts = field(default_factory=Counts)
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)


def programs(num_layers: int) -> dict[str, Program]:
    """The programs compared; pairs and ladders leave the first and last two layers alone, as the LP paper does."""
    dense, middle = Program.dense(num_layers), range(2, num_layers - 2)
    pairs = OPERATIONS["pair"].function(dense, middle)
    late = OPERATIONS["ladder"].function
    return {
        DENSE: dense,
        "LP": pairs,
        "ladder": late(dense, middle),
        "ladder over LP": late(pairs, middle),
        "attention || MLP": Program(
            tuple(
                Step(first.sublayers + second.sublayers)
                for first, second in zip(dense.nodes[::2], dense.nodes[1::2], strict=True)
                if isinstance(first, Step) and isinstance(second, Step)
            )
        ),
    }


def random_model(folder: Path) -> Path:
    """A Llama with random weights: speed does not depend on what they are."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    length = options.prompt_tokens + options.new_tokens
    chosen = programs(AutoConfig.from_pretrained(folder).num_hidden_layers)
    candidates = [
        Candidate(name, make_plan(folder, options.tp, length, str(program))) for name, program in chosen.items()
    ]
    vocabulary = candidates[0].plan.vocabulary
    load = Load(options.batch, options.prompt_tokens, options.new_tokens)
    short = Load(options.batch, options.prompt_tokens, min(WARM_UP_TOKENS, options.new_tokens))
    rows: list[tuple[Candidate, Ranks, Row]] = []
    with ExitStack() as stack:
        for way in options.collectives:
            ranks = stack.enter_context(Ranks(options.tp, collectives=way))
            load_candidates(ranks, candidates)
            for candidate in candidates:
                run_once(ranks, candidate, short, vocabulary)
                name, program = candidate.name, chosen[candidate.name]
                depth = program.effective_depth(candidate.plan.family.steps_per_layer)
                rows.append((candidate, ranks, Row(way, name, depth, program.sync_points(options.tp))))
        with progress("bench", options.rounds * len(rows), "runs") as ran:
            for _ in range(options.rounds):
                for candidate, ranks, row in rows:
                    one = summarise(run_once(ranks, candidate, load, vocabulary), load, connected=True)
                    assert one.decode_pass is not None
                    row.decode.append(options.batch / one.per_token)
                    row.prefill.append(options.batch * options.prompt_tokens / one.prefill)
                    row.counts = one.decode_pass.layers
                    ran(1)
    return [row for _, _, row in rows]


def ratios(row: Row, rows: list[Row]) -> list[float]:
    """Tokens/s by those of the dense program in the same round, under the same collectives."""
    dense = next(other for other in rows if other.name == DENSE and other.collectives == row.collectives)
    return [own / base for own, base in zip(row.decode, dense.decode, strict=True)]


def show(rows: list[Row], options: argparse.Namespace) -> Table:
    table = Table(title=f"{options.model}: {options.tp} ranks, batch {options.batch}", box=None, title_justify="left")
    for heading in ("collectives", "program"):
        table.add_column(heading)
    for heading in ("depth", "syncs", "bytes/token", "prefill tok/s", "tok/s", "best", "by dense", "range"):
        table.add_column(heading, justify="right")
    for row in rows:
        by_dense = ratios(row, rows)
        table.add_row(
            row.collectives,
            row.name,
            f"{row.depth:g}",
            f"{row.counts.all_reduces}" + ("" if row.counts.all_reduces == row.expected_syncs else "!"),
            f"{row.counts.bytes // options.batch}",
            f"{statistics.median(row.prefill):.0f}",
            f"{statistics.median(row.decode):.1f}",
            f"{max(row.decode):.1f}",
            f"{statistics.median(by_dense):.2f}",
            f"{min(by_dense):.2f}-{max(by_dense):.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--collectives", nargs="+", choices=["shm", "gloo"], default=["shm", "gloo"])
    parser.add_argument("--json", type=Path, help="write the figures of every round here as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = random_model(Path(temporary)) if options.model == "random" else locate(options.model)
        rows = measure(options, folder)
    Console(width=120, highlight=False).print(show(rows, options))
    wrong = [row for row in rows if row.counts.all_reduces != row.expected_syncs]
    print(f"{threads_per_rank(options.tp)} thread per rank; load average {os.getloadavg()[0]:.1f} at the end")
    if options.json:
        record = {"command": sys.argv, "versions": versions(), "rows": [vars(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1, default=vars) + "\n")
    if wrong:
        sys.exit(f"collectives do not agree with the program: {', '.join(row.name for row in wrong)}")


if __name__ == "__main__":
    main()
