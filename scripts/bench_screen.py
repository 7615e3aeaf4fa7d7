"""What `surgeon scan --screen` wins, and what it costs: against the full scan, and against a plain loop over cells.

    python scripts/bench_screen.py [MODEL] [--tokens 4096] [--window 128] [--operation prune ...] [--threads N]

The three run one after the other on the same cells. The loop is that of bench_scan.py: edit the model, run it, take
the same numbers. Rank correlation (Spearman's) is between the perplexities of the full and of the screened scan, over
the cells that the full one has below ten times the base perplexity.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_scan import Bench
from rich.console import Console
from rich.table import Table
from scipy import stats
from transformers import AutoTokenizer

import surgeon
from surgeon.analysis.cells import HEATMAPS, SCANNED, Cell, Selection, scan_cells, select
from surgeon.analysis.scan import Scan, scan
from surgeon.analysis.screen import HOPELESS
from surgeon.checkpoint.read import locate
from surgeon.quality.data import Windows, load_windows

Seconds = tuple[float, float]  # wall clock, and processor time, which other programs on the machine disturb less


def timed_scan(model: Any, windows: Windows, selection: Selection, screened: bool) -> tuple[Scan, Seconds]:
    """A scan from nothing, and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter(), time.process_time()
        result = scan(model, windows, Path(folder), selection, weights_hash="", screened=screened)
        return result, _since(begun)


def timed_loop(model: Any, windows: Windows, cells: list[Cell], at_once: int) -> Seconds:
    """How long a plain loop over the cells takes."""
    bench = Bench(model, windows.ids, at_once)
    begun = time.perf_counter(), time.process_time()
    bench.loop([cell.program for cell in cells])
    return _since(begun)


def _since(begun: Seconds) -> Seconds:
    return time.perf_counter() - begun[0], time.process_time() - begun[1]


def quality_table(full: Scan, screened: Scan) -> Table:
    """By operation: how well the screened scan orders the cells, how far it is off, and what it rests on."""
    table = Table(title="Screened against full: cells below ten times the base perplexity")
    for heading in ("operation", "cells", "rank correlation", "median error", "largest error", "tokens used"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    good = full.table["perplexity"] < HOPELESS * full.base_perplexity
    for name in ["all", *full.table["operation"].unique()]:
        cells = good if name == "all" else good & (full.table["operation"] == name)
        here = full.table["operation"].notna() if name == "all" else full.table["operation"] == name
        wanted, found = full.table["perplexity"][cells], screened.table["perplexity"][cells]
        errors = np.abs(found / wanted - 1)
        rests_on = screened.table["tokens"][here].mean() / full.table["tokens"].max()
        rank = stats.spearmanr(wanted, found).statistic
        row = (f"{cells.sum()}", f"{rank:.4f}", f"{errors.median():.2%}", f"{errors.max():.1%}", f"{rests_on:.0%}")
        table.add_row(name, *row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="a model folder; default: the demo model")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="windows at once in the loop")
    parser.add_argument("--operation", action="append", choices=list(HEATMAPS))
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    folder = locate(arguments.model or surgeon.demo_model())
    model = surgeon.load(folder)
    windows = load_windows(AutoTokenizer.from_pretrained(folder), arguments.data, arguments.window, arguments.tokens)
    num_layers = model.config.num_hidden_layers
    selection = select(arguments.operation or SCANNED, num_layers)
    screened, screened_seconds = timed_scan(model, windows, selection, True)
    full, full_seconds = timed_scan(model, windows, selection, False)
    loop_seconds = timed_loop(model, windows, scan_cells(selection.operations, num_layers, 0), arguments.batch)
    times = Table(title=f"{len(full.table):,} cells, {len(windows.ids)} windows of {arguments.window} tokens")
    for heading in ("way", "seconds", "times faster", "processor seconds", "times faster", "sublayers run"):
        times.add_column(heading, justify="left" if heading == "way" else "right")
    loop_sublayers = full.record["sublayers_of_a_loop"]["total"]
    for way, seconds, sublayers in (
        ("plain loop", loop_seconds, loop_sublayers),
        ("scan", full_seconds, full.record["sublayers_run"]["total"]),
        ("scan --screen", screened_seconds, screened.record["sublayers_run"]["total"]),
    ):
        ratios = ((f"{s:.1f}", f"{of_loop / s:.2f}") for s, of_loop in zip(seconds, loop_seconds, strict=True))
        times.add_row(way, *(text for pair in ratios for text in pair), f"{sublayers:,}")
    console = Console(width=100)
    console.print(f"{folder}: {num_layers} layers, {torch.get_num_threads()} threads")
    console.print(times)
    console.print(quality_table(full, screened))


if __name__ == "__main__":
    main()
