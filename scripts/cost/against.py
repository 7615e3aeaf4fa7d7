"""Predicted against measured: a table, how far off it is, and one picture.

Both take kinds of passes of programs, with the columns model, ranks, link, program, batch, phase, predicted and
measured (seconds), `off` (how far the prediction is from what was measured, in parts of that) and `repeated` (how far
half of the rounds are from the other half).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from scripts.markdown import format_table

AIM = 0.10
WORST = 0.20
KINDS = ["off", "repeated"]
WHERE = ["model", "ranks", "link", "program", "batch", "phase"]
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
MARKERS = {"prefill": "s", "decode": "o"}


def lines(cells: pd.DataFrame, note: str) -> Iterator[str]:
    """A markdown table, and before it what it comes to."""
    yield f"{len(cells)} kinds of passes: {summary(cells)}."
    yield ""
    columns = ["", "passes", "off, median", "worst", "noise, median", "worst"]
    groups = (
        (f"{name} {value}", own) for name in WHERE for value, own in cells.groupby(name, sort=False)
    )
    yield from format_table(columns, (_group(name, own) for name, own in groups))
    yield ""
    shown = cells.assign(program=cells["program"].str.replace("|", "\\|"))
    for name in ("predicted", "measured"):
        shown[name] = (1e3 * cells[name]).map("{:.2f}".format)
    for name in KINDS:
        shown[name] = cells[name].map("{:+.0%}".format)
    columns = [
        "model",
        "ranks",
        "link",
        "program",
        "batch",
        "pass",
        "predicted ms",
        "measured ms",
        "off",
        "noise",
    ]
    values = shown[[*WHERE, "predicted", "measured", *KINDS]].itertuples(index=False)
    yield from format_table(columns, values, left=(0, 2, 3, 5))
    yield ""
    yield f"{note[:1].upper()}{note[1:]}."


def summary(cells: pd.DataFrame) -> str:
    """How far off predictions are, and how far the machine is from itself."""
    parts = cells[KINDS].abs()
    middle = parts.median()
    most = parts.max()
    within = (parts["off"] <= AIM).mean()
    return (
        f"predictions are off by {middle['off']:.1%} (median), {most['off']:.0%} at worst, {within:.0%} of them by at "
        f"most {AIM:.0%}; half of the rounds differ from the other half by {middle['repeated']:.1%}, "
        f"{most['repeated']:.0%} at worst"
    )


def _group(name: str, cells: pd.DataFrame) -> list[object]:
    parts = [cells[kind].abs() for kind in KINDS]
    figures = [text for part in parts for text in (f"{part.median():.1%}", f"{part.max():.0%}")]
    return [name.replace("|", "\\|"), len(cells), *figures]


def draw(cells: pd.DataFrame, path: Path) -> None:
    """One point for each: measured to the right, predicted upwards, with a diagonal and bands around it."""
    figure = Figure(figsize=(7.5, 7), layout="constrained")
    axes = figure.subplots()
    seconds = 1e3 * cells[["predicted", "measured"]]
    ends = [seconds.min(axis=None) / 1.5, seconds.max(axis=None) * 1.5]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for part, alpha in ((WORST, 0.12), (AIM, 0.2)):
        low, high = ([each * factor for each in ends] for factor in (1 - part, 1 + part))
        axes.fill_between(
            ends, low, high, color="gray", alpha=alpha, linewidth=0, label=f"within {part:.0%}"
        )
    for (program, some), color in zip(cells.groupby("program", sort=False), COLORS, strict=False):
        for phase, marker in MARKERS.items():
            own = seconds.loc[some.index[some["phase"] == phase]]
            style = {"s": 18, "color": color, "marker": marker, "alpha": 0.7, "linewidths": 0}
            axes.scatter(own["measured"], own["predicted"], label=f"{program}, {phase}", **style)
    axes.set(
        xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="predicted, ms"
    )
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    off = cells["off"].abs()
    axes.set_title(
        f"{len(cells)} kinds of passes: off by {off.median():.1%} (median), {off.max():.0%} at worst"
    )
    axes.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=130)
