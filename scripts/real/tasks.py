"""Accuracy of SmolLM2-135M-Instruct on tasks, beside what others measured of it: a test of how tasks are asked.

    scripts/real/tasks [--rows FOLDER] [--limit 300] [-o runs/real-tasks]

Others' figures are of the weights before they were quantised, by lm-eval without examples. The exit status is 1 if one
of them lies outside the 95% interval around surgeon's. Answers are kept in the output folder: killed, or with another
--limit, the same command goes on. With --rows the tasks are .jsonl files of a folder (arc_easy.jsonl and so on, with
query, choices and gold), else lm-eval's own, from the hub. --alone N asks the first N rows of lm-eval alone, too, with
its own prompts and in a process without surgeon (alone.py): the same accuracies.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # surgeon need not be installed

import pandas as pd

import surgeon
from scripts.commands import make_parser
from scripts.gpu.run import table_line
from scripts.real.get import get_model
from scripts.real.run import Row

# Others give their figures in per cent.
OTHERS = {("arc_easy", "acc"): 54.1, ("arc_challenge", "acc_norm"): 27.7, ("piqa", "acc_norm"): 66.9}
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


def beside_alone(model: Path, rows: Path, count: int, found: pd.DataFrame) -> Row:
    """Whether lm-eval alone finds the same of the first rows of a task."""
    command = [sys.executable, "-I", Path(__file__).with_name("alone.py"), model, rows.stem, rows, count]
    ran = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
    scores = found.set_index(["task", "metric"])["value"]
    alone = json.loads(ran.stdout)
    own = {metric: float(scores[rows.stem, metric]) for metric in alone}
    said = [", ".join(f"{100 * value:.1f}" for value in each.values()) for each in (alone, own)]
    right = all(abs(own[metric] - value) < 1e-9 for metric, value in alone.items())
    return Row(f"{rows.stem} by lm-eval, {count}", said[0], said[1], right)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, prog="scripts/real/tasks")
    parser.add_argument(
        "--model", type=Path, help="the .gguf file, or a folder with the model; default: fetched"
    )
    parser.add_argument("--rows", type=Path, metavar="FOLDER", help="of .jsonl files named as the tasks")
    parser.add_argument("--limit", type=int, default=300, help="rows of each task")
    parser.add_argument(
        "--alone", type=int, metavar="N", help="rows to ask of lm-eval alone, too (with --rows)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("runs/real-tasks"), help="folder for the answers"
    )
    options = parser.parse_args(arguments)
    if options.alone and options.rows is None:
        parser.error("--alone needs the rows; give their folder with --rows")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    began = time.monotonic()
    names = list(dict.fromkeys(task for task, _ in OTHERS))
    tasks = names if options.rows is None else [options.rows / f"{name}.jsonl" for name in names]
    model = options.model or get_model()
    found = surgeon.evaluate(
        model, tasks=tasks, limit=options.limit, batch_size=8, output=options.output
    )
    print(table_line("task, rows", "others, unquantised", "surgeon (95%)", "s", "verdict"))
    rows = compare(found.table())
    if options.alone:
        found = surgeon.evaluate(
            model, tasks=tasks, limit=options.alone, batch_size=8, output=options.output
        )
        rows += [
            beside_alone(surgeon.open(model).folder, path, options.alone, found.table())
            for path in tasks
        ]
    for row in rows:
        seconds = f"{time.monotonic() - began:.0f}"
        print(table_line(row.what, row.expected, row.found, seconds, row.verdict))
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
