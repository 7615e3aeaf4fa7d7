"""Accuracy of SmolLM2-135M-Instruct on tasks, beside what others measured of it: a test of how tasks are asked.

    scripts/real/tasks [--rows FOLDER] [--limit 300] [-o runs/real-tasks]

Others' figures are of the weights before they were quantised, by lm-eval without examples. The exit status is 1 if one
of them lies outside the 95% interval around surgeon's. Answers are kept in the output folder: killed, or with another
--limit, the same command goes on. With --rows the tasks are .jsonl files of a folder (arc_easy.jsonl and so on, with
query, choices and gold), else lm-eval's own, from the hub.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # surgeon need not be installed

import pandas as pd

import surgeon
from scripts.gpu.run import table_line
from scripts.real.get import get_model
from scripts.real.run import Row

OTHERS = {("arc_easy", "acc"): 54.1, ("arc_challenge", "acc_norm"): 27.7, ("piqa", "acc_norm"): 66.9}  # per cent
NORMAL = 1.96  # standard errors to either end of a 95% interval


def compare(found: pd.DataFrame) -> list[Row]:
    """The rows of the table, of what `surgeon.evaluate` found."""
    scores = found.set_index(["task", "metric"])
    rows = []
    for (task, metric), others in OTHERS.items():
        score = scores.loc[(task, metric)]
        own, error = 100 * score["value"], 100 * NORMAL * score["stderr"]
        said = f"{own:.1f} ({own - error:.1f} to {own + error:.1f})"
        what = f"{task} {metric}, {score['rows']:.0f}"
        rows.append(Row(what, f"{others}", said, bool(abs(own - others) <= error)))
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/real/tasks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="the .gguf file, or a folder with the model; default: fetched")
    parser.add_argument("--rows", type=Path, metavar="FOLDER", help="of .jsonl files named as the tasks")
    parser.add_argument("--limit", type=int, default=300, help="rows of each task")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/real-tasks"), help="folder for the answers")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options, began = parse(arguments), time.monotonic()
    names = list(dict.fromkeys(task for task, _ in OTHERS))
    tasks = names if options.rows is None else [options.rows / f"{name}.jsonl" for name in names]
    model = options.model or get_model()
    found = surgeon.evaluate(model, tasks=tasks, limit=options.limit, batch_size=8, output=options.output)
    print(table_line("task, rows", "others, unquantised", "surgeon (95%)", "s", "verdict"))
    rows = compare(found.table())
    for row in rows:
        print(table_line(row.what, row.expected, row.found, f"{time.monotonic() - began:.0f}", row.verdict))
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
