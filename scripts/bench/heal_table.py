"""The tables of scripts/bench/heal.py, from the folders of its runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scripts.markdown import format_table
from surgeon.checkpoint.stored import read_json
from surgeon.quality.summary import Values, interval

RECORD = "run.json"
WINDOWS = "windows.csv"
DRAWN = 4000  # samples of windows for the intervals of shares
COLUMNS = [
    "edit",
    "method",
    "rate",
    "seeds",
    "tokens",
    "perplexity",
    "95%",
    "regained",
    "divergence",
    "95%",
    "regained",
]
COLUMNS += ["minutes"]


def is_whole(folder: Path) -> bool:
    """Whether the run in a folder has ended."""
    record = folder / RECORD
    return record.is_file() and "healed" in read_json(record)


@dataclass(frozen=True)
class Runs:
    """All seeds of one method on one edit.

    Attributes:
        windows: of each seed, with the columns of windows.csv.
        mean: of every window, the mean over seeds, with the same columns.
    """

    row: str
    method: str
    records: list[dict[str, Any]]
    windows: list[pd.DataFrame]
    mean: pd.DataFrame

    @property
    def is_edited(self) -> bool:
        return self.records[0]["recipe"] is not None

    def share(self, of: str) -> str:
        """The part of the loss that is regained, with its 95% interval over windows (bootstrap)."""
        edited = self.mean[f"edited_{of}"].to_numpy()
        regained = edited - self.mean[f"healed_{of}"].to_numpy()
        lost = edited - (self.mean["original_nll"].to_numpy() if of == "nll" else 0)
        drawn = np.random.default_rng(0).integers(0, len(edited), (DRAWN, len(edited)))
        low, high = np.quantile(regained[drawn].mean(1) / lost[drawn].mean(1), (0.025, 0.975))
        return f"{regained.mean() / lost.mean():.0%} ({low:.0%} to {high:.0%})"

    def spread(self) -> str:
        """The shares of divergence of the single seeds."""
        shares = [
            1 - one["healed_divergence"].mean() / one["edited_divergence"].mean() for one in self.windows
        ]
        if len(shares) > 1:
            return f" (seeds {min(shares):.0%} to {max(shares):.0%})"
        return ""


def read_runs(folder: Path) -> Iterator[Runs]:
    """Of every edit and method, in the order in which they were made."""
    found: dict[tuple[str, str], list[Path]] = {}
    whole = [path.parent for path in folder.glob(f"*/*.run/{RECORD}") if is_whole(path.parent)]
    for run in sorted(whole, key=lambda run: (run / RECORD).stat().st_mtime):
        found.setdefault((run.parent.name, run.name.rpartition("-")[0]), []).append(run)
    for (row, method), runs in found.items():
        windows = [pd.read_csv(run / WINDOWS) for run in runs]
        mean = pd.concat(windows).groupby(level=0).mean()
        yield Runs(row, method, [read_json(run / RECORD) for run in runs], windows, mean)


def show_tables(folder: Path) -> None:
    """Print all that is there as markdown."""
    runs = list(read_runs(folder))
    if not runs:
        return
    rows = []
    for row in dict.fromkeys(one.row for one in runs):
        of_row = [one for one in runs if one.row == row]
        rows += [_edited(of_row[0]), *map(_healed, of_row)]
    print("\n".join(format_table(COLUMNS, rows, left=(0, 1))))
    print("\n" + "\n".join(_sentences(runs)))


def _edited(one: Runs) -> list[str]:
    recipe = one.records[0]["recipe"] or "operations: unedited"
    edit = f"{one.row}: " + recipe.partition("operations:")[2].strip(" -\n")
    original = f"as edited (original {math.exp(one.mean['original_nll'].mean()):.3f})"
    return [edit, original, "", "", "", *_numbers(one, "edited", "", ""), ""]


def _healed(one: Runs) -> list[str]:
    shares = ("", "")
    if one.is_edited:
        shares = (one.share("nll"), one.share("divergence") + one.spread())
    record = one.records[0]
    minutes = np.mean([each["seconds"] for each in one.records]) / 60
    rate = f"{record['settings']['learning_rate']:g}"
    start = ["", one.method, rate, str(len(one.windows)), f"{record['tokens']:,}"]
    return [*start, *_numbers(one, "healed", *shares), f"{minutes:.1f}"]


def _numbers(one: Runs, state: str, of_perplexity: str, of_divergence: str) -> list[str]:
    nll = one.mean[f"{state}_nll"].to_numpy()
    divergence = one.mean[f"{state}_divergence"].to_numpy()
    least, most = map(math.exp, interval(nll))
    low, high = interval(divergence)
    perplexities = [f"{math.exp(nll.mean()):.3f}", f"{least:.2f} to {most:.2f}", of_perplexity]
    return [*perplexities, f"{divergence.mean():.4f}", f"{low:.4f} to {high:.4f}", of_divergence]


def _sentences(runs: list[Runs]) -> Iterator[str]:
    """Differences over the same windows: the rest of the loss, and distillation less plain training."""
    by_name = {(one.row, one.method): one for one in runs}
    for (row, method), one in by_name.items():
        if one.is_edited:
            rest = _difference(one.mean["healed_nll"], one.mean["original_nll"])
            yield f"- {row}, {method}: log-perplexity less the original's: {rest}"
        plain = by_name.get((row, "full"))
        if method == "distilled" and plain is not None:
            nll, divergence = (
                _difference(one.mean[name], plain.mean[name])
                for name in ("healed_nll", "healed_divergence")
            )
            yield f"- {row}, distilled less full: log-perplexity {nll}, divergence {divergence}"


def _difference(one: pd.Series[float], other: pd.Series[float]) -> str:
    difference: Values = (one - other).to_numpy()
    low, high = interval(difference)
    return f"{difference.mean():+.4f} ({low:+.4f} to {high:+.4f})"
