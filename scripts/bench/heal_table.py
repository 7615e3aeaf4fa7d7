"""The tables of scripts/bench/heal.py, from the folders of its runs; the papers' numbers beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from surgeon.quality.summary import interval

RECORD, WINDOWS = "run.json", "windows.csv"
DRAWN = 4000  # samples of windows for the intervals of shares
Numbers = NDArray[np.float64]

# Layer Parallelism, table 2: accuracies in percent of the original, fine-tuned for 4,096 steps, and not fine-tuned.
LP_TABLE_2 = """\
| Layer Parallelism, table 2 | depth | MMLU not / fine-tuned | ARC-C | GSM-8K | of the lost GSM-8K regained |
|---|--:|--:|--:|--:|--:|
| Qwen3 4B | 36 (original) | 70.16 | 58.79 | 84.99 | |
| | 31 | 68.87 / 69.11 | 53.67 / 54.10 | 53.75 / 62.47 | 28% |
| | 30 | 67.49 / 68.43 | 50.43 / 54.10 | 36.77 / 56.56 | 41% |
| | 27 | 44.09 / 61.96 | 44.54 / 51.02 | 3.56 / 48.29 | 55% |
| Qwen3 14B | 40 (original) | 78.83 | 66.21 | 82.26 | |
| | 35 | 77.92 / 77.89 | 64.68 / 63.05 | 61.64 / 81.73 | 97% |
| | 32 | 73.70 / 74.38 | 59.73 / 59.30 | 64.67 / 71.27 | 38% |"""
# Ladder Residual, table 4: Llama-3.1-8B-Instruct, retrained on 3B tokens for 2 epochs.
LADDER_TABLE_4 = """\
| Ladder Residual, table 4 | MMLU | ARC-C | HellaSwag | GSM-8K | average of nine tasks |
|---|--:|--:|--:|--:|--:|
| original | 68.14 | 60.32 | 80.04 | 84.99 | 56.11 |
| layers 16:32 late, as edited | 63.19 | 56.57 | 77.70 | 10.54 | 41.65 |
| layers 16:32 late, retrained | 65.93 | 59.13 | 78.86 | 80.29 | 56.24 |
| layers 12:32 late, retrained | 62.31 | 59.90 | 77.49 | 76.19 | 53.86 |"""
HEAD = """\
| edit | method | rate | seeds | tokens | perplexity | 95% | regained | divergence | 95% | regained | minutes |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""


def is_whole(folder: Path) -> bool:
    """Whether the run in a folder has ended."""
    record = folder / RECORD
    return record.is_file() and "healed" in json.loads(record.read_text())


@dataclass(frozen=True)
class Runs:
    """All seeds of one method on one edit.

    Attributes:
        windows: of each seed, with the columns of windows.csv.
    """

    row: str
    method: str
    records: list[dict[str, Any]]
    windows: list[pd.DataFrame]

    def mean(self, column: str) -> Numbers:
        """Of every window, the mean over seeds."""
        return np.mean([one[column].to_numpy() for one in self.windows], axis=0)

    def share(self, of: str) -> tuple[float, float, float]:
        """What is regained of what was lost, with its 95% interval over windows (bootstrap)."""
        edited, healed = self.mean(f"edited_{of}"), self.mean(f"healed_{of}")
        original = self.mean("original_nll") if of == "nll" else np.zeros_like(edited)
        drawn = np.random.default_rng(0).integers(0, len(edited), (DRAWN, len(edited)))
        shares = (edited - healed)[drawn].mean(1) / (edited - original)[drawn].mean(1)
        low, high = np.quantile(shares, (0.025, 0.975))
        return float((edited - healed).mean() / (edited - original).mean()), float(low), float(high)

    def spread(self) -> str:
        """The shares of divergence of the single seeds."""
        shares = [1 - one["healed_divergence"].mean() / one["edited_divergence"].mean() for one in self.windows]
        return f" (seeds {min(shares):.0%} to {max(shares):.0%})" if len(shares) > 1 else ""


def read_runs(folder: Path) -> Iterator[Runs]:
    """Of every edit and method, in the order in which they were made."""
    found: dict[tuple[str, str], list[Path]] = {}
    whole = [path.parent for path in folder.glob(f"*/*.run/{RECORD}") if is_whole(path.parent)]
    for run in sorted(whole, key=lambda run: (run / RECORD).stat().st_mtime):
        found.setdefault((run.parent.name, run.name.rpartition("-")[0]), []).append(run)
    for (row, method), runs in found.items():
        records = [json.loads((run / RECORD).read_text()) for run in runs]
        yield Runs(row, method, records, [pd.read_csv(run / WINDOWS) for run in runs])


def show_tables(folder: Path) -> None:
    """Print all that is there as markdown."""
    runs = list(read_runs(folder))
    if runs:
        print(HEAD)
        rows = list(dict.fromkeys(one.row for one in runs))
        for row in rows:
            of_row = [one for one in runs if one.row == row]
            print(_edited(of_row[0]))
            print("\n".join(map(_healed, of_row)))
        print("\n" + "\n".join(_sentences(runs)))
        print(f"\n{LP_TABLE_2}\n\n{LADDER_TABLE_4}")
    _show_sweep(folder / "sweep")


def _edited(one: Runs) -> str:
    record = one.records[0]
    edit = f"{one.row}: {_operations(record)}"
    original = f"{math.exp(one.mean('original_nll').mean()):.3f}"
    numbers = _numbers(one.mean("edited_nll"), one.mean("edited_divergence"), "", "")
    return f"| {edit} | as edited (original {original}) | | | | {numbers} | |"


def _operations(record: dict[str, Any]) -> str:
    recipe = record["recipe"]
    return "unedited" if recipe is None else recipe.partition("operations:")[2].strip(" -\n")


def _healed(one: Runs) -> str:
    record = one.records[0]
    numbers = _numbers(
        one.mean("healed_nll"),
        one.mean("healed_divergence"),
        _share(one.share("nll")) if record["recipe"] else "",
        _share(one.share("divergence")) + one.spread() if record["recipe"] else "",
    )
    minutes = np.mean([one["seconds"] for one in one.records]) / 60
    rate = record["settings"]["learning_rate"]
    return f"| | {one.method} | {rate:g} | {len(one.windows)} | {record['tokens']:,} | {numbers} | {minutes:.1f} |"


def _numbers(nll: Numbers, divergence: Numbers, of_perplexity: str, of_divergence: str) -> str:
    ends = [math.exp(end) for end in interval(nll)]
    low, high = interval(divergence)
    return (
        f"{math.exp(nll.mean()):.3f} | {ends[0]:.2f} to {ends[1]:.2f} | {of_perplexity} | {divergence.mean():.4f} | "
        f"{low:.4f} to {high:.4f} | {of_divergence}"
    )


def _share(found: tuple[float, float, float]) -> str:
    share, low, high = found
    return f"{share:.0%} ({low:.0%} to {high:.0%})"


def _sentences(runs: list[Runs]) -> Iterator[str]:
    """Differences over the same windows: what is left of the loss, and distillation less plain training."""
    by_name = {(one.row, one.method): one for one in runs}
    for (row, method), one in by_name.items():
        if one.records[0]["recipe"]:
            yield f"- {row}, {method}: log-perplexity less the original's: {_difference(one, one, 'original')}"
        plain = by_name.get((row, "full"))
        if method == "distilled" and plain is not None:
            yield f"- {row}, distilled less full: log-perplexity {_difference(one, plain, 'healed')}, divergence " + (
                _ends(one.mean("healed_divergence") - plain.mean("healed_divergence"))
            )


def _difference(one: Runs, other: Runs, state: str) -> str:
    return _ends(one.mean("healed_nll") - other.mean(f"{state}_nll"))


def _ends(difference: Numbers) -> str:
    low, high = interval(difference)
    return f"{difference.mean():+.4f} ({low:+.4f} to {high:+.4f})"


def _show_sweep(folder: Path) -> None:
    """Perplexity and divergence at every learning rate, on training text that was not learned from."""
    found = sorted(folder.glob(f"*/*.run/{RECORD}"))
    if not found:
        return
    print("\n| edit | method | rate | steps | perplexity | divergence |\n|---|---|--:|--:|--:|--:|")
    for record in (json.loads(path.read_text()) for path in found):
        if "healed" in record:
            rate, healed = record["settings"]["learning_rate"], record["healed"]
            numbers = f"{healed['perplexity']:.3f} | {healed['divergence']:.4f}"
            print(f"| {record['row']} | {record['method']} | {rate:g} | {record['steps']} | {numbers} |")
