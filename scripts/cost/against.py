"""Predicted against measured: a table, how far off it is, and one picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

AIM, WORST = 0.10, 0.20
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
MARKERS = {"prefill": "s", "decode": "o"}


@dataclass(frozen=True)
class Cell:
    """A kind of pass of one program.

    Attributes:
        predicted, measured: seconds.
        repeated: what half of the rounds give over what the other half gives.
    """

    model: str
    ranks: int
    link: str
    program: str
    batch: int
    phase: str
    predicted: float
    measured: float
    repeated: float

    @property
    def off(self) -> float:
        """How far the prediction is from what was measured, in parts of that."""
        return self.predicted / self.measured - 1

    @property
    def noise(self) -> float:
        """How far the machine is from itself."""
        return abs(self.repeated - 1)


def lines(cells: Sequence[Cell], note: str) -> Iterator[str]:
    """A markdown table, and before it what it comes to."""
    yield f"{len(cells)} kinds of passes: {summary(cells)}."
    yield ""
    yield "| | passes | off, median | off, worst | noise, median | noise, worst |"
    yield "|:--|--:|--:|--:|--:|--:|"
    for name in ("model", "ranks", "link", "program", "batch", "phase"):
        for value in dict.fromkeys(getattr(cell, name) for cell in cells):
            yield _group(f"{name} {value}", [cell for cell in cells if getattr(cell, name) == value])
    yield ""
    yield "| model | ranks | link | program | batch | pass | predicted ms | measured ms | off | noise |"
    yield "|:--|--:|:--|:--|--:|:--|--:|--:|--:|--:|"
    for cell in cells:
        where = f"| {cell.model} | {cell.ranks} | {cell.link} | {_shown(cell.program)} | {cell.batch} | {cell.phase} "
        yield where + f"| {1e3 * cell.predicted:.2f} | {1e3 * cell.measured:.2f} | {cell.off:+.0%} | {cell.noise:.0%} |"
    yield ""
    yield f"{note[:1].upper()}{note[1:]}."


def summary(cells: Sequence[Cell]) -> str:
    """How far off predictions are, and how far the machine is from itself."""
    off, noise = [abs(cell.off) for cell in cells], [cell.noise for cell in cells]
    within = sum(each <= AIM for each in off) / len(off)
    return (
        f"predictions are off by {median(off):.1%} (median), {max(off):.0%} at worst, {within:.0%} of them by at most "
        f"{AIM:.0%}; half of the rounds differ from the other half by {median(noise):.1%} (median), {max(noise):.0%} at "
        "worst"
    )


def _group(name: str, cells: Sequence[Cell]) -> str:
    off, noise = [abs(cell.off) for cell in cells], [cell.noise for cell in cells]
    figures = f"{median(off):.1%} | {max(off):.0%} | {median(noise):.1%} | {max(noise):.0%}"
    return f"| {_shown(name)} | {len(cells)} | {figures} |"


def _shown(text: str) -> str:
    return text.replace("|", "\\|")


def draw(cells: Sequence[Cell], path: Path) -> None:
    """One point for each: measured to the right, predicted upwards, with a diagonal and bands around it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 7), layout="constrained")
    axes = figure.subplots()
    seconds = [1e3 * each for cell in cells for each in (cell.predicted, cell.measured)]
    ends = [min(seconds) / 1.5, max(seconds) * 1.5]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for part, alpha in ((WORST, 0.12), (AIM, 0.2)):
        low, high = ([each * factor for each in ends] for factor in (1 - part, 1 + part))
        axes.fill_between(ends, low, high, color="gray", alpha=alpha, linewidth=0, label=f"within {part:.0%}")
    for program, color in zip(dict.fromkeys(cell.program for cell in cells), COLORS, strict=False):
        for phase, marker in MARKERS.items():
            own = [cell for cell in cells if (cell.program, cell.phase) == (program, phase)]
            points = [1e3 * cell.measured for cell in own], [1e3 * cell.predicted for cell in own]
            axes.scatter(*points, s=18, color=color, marker=marker, alpha=0.7, linewidths=0, label=f"{program}, {phase}")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="predicted, ms")
    axes.set_aspect("equal")
    off = [abs(cell.off) for cell in cells]
    axes.set_title(f"{len(cells)} kinds of passes: off by {median(off):.1%} (median), {max(off):.0%} at worst")
    axes.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=130)
