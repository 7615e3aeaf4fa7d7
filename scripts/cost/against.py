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
        in_step: how far predictions are from measurements that were made in the same round, in parts of these.
        repeated: how far half of the rounds are from the other half, likewise.
    """

    model: str
    ranks: int
    link: str
    program: str
    batch: int
    phase: str
    predicted: float
    measured: float
    in_step: float
    repeated: float

    @property
    def off(self) -> float:
        """How far the prediction is from what was measured, in parts of that."""
        return self.predicted / self.measured - 1


def lines(cells: Sequence[Cell], note: str) -> Iterator[str]:
    """A markdown table, and before it what it comes to."""
    yield f"{len(cells)} kinds of passes: {summary(cells)}."
    yield ""
    yield "| | passes | off, median | worst | in step, median | worst | noise, median | worst |"
    yield "|:--|--:|--:|--:|--:|--:|--:|--:|"
    for name in ("model", "ranks", "link", "program", "batch", "phase"):
        for value in dict.fromkeys(getattr(cell, name) for cell in cells):
            yield _group(f"{name} {value}", [cell for cell in cells if getattr(cell, name) == value])
    yield ""
    yield "| model | ranks | link | program | batch | pass | predicted ms | measured ms | off | in step | noise |"
    yield "|:--|--:|:--|:--|--:|:--|--:|--:|--:|--:|--:|"
    for cell in cells:
        where = cell.model, cell.ranks, cell.link, _shown(cell.program), cell.batch, cell.phase
        seconds = (f"{1e3 * each:.2f}" for each in (cell.predicted, cell.measured))
        parts = (f"{each:+.0%}" for each in (cell.off, cell.in_step, cell.repeated))
        yield f"| {' | '.join([*map(str, where), *seconds, *parts])} |"
    yield ""
    yield f"{note[:1].upper()}{note[1:]}."


def summary(cells: Sequence[Cell]) -> str:
    """How far off predictions are, and how far the machine is from itself."""
    off, step, noise = _parts(cells)
    within = sum(each <= AIM for each in off) / len(off)
    return (
        f"predictions are off by {median(off):.1%} (median), {max(off):.0%} at worst, {within:.0%} of them by at most "
        f"{AIM:.0%}; in step by {median(step):.1%}, {max(step):.0%} at worst; half of the rounds differ from the other "
        f"half by {median(noise):.1%}, {max(noise):.0%} at worst"
    )


def _group(name: str, cells: Sequence[Cell]) -> str:
    figures = " | ".join(f"{median(each):.1%} | {max(each):.0%}" for each in _parts(cells))
    return f"| {_shown(name)} | {len(cells)} | {figures} |"


def _parts(cells: Sequence[Cell]) -> tuple[list[float], list[float], list[float]]:
    """How far predictions are off, also in step, and how far the machine is from itself."""
    kinds = ("off", "in_step", "repeated")
    off, step, noise = ([abs(getattr(cell, kind)) for cell in cells] for kind in kinds)
    return off, step, noise


def _shown(text: str) -> str:
    return text.replace("|", "\\|")


def draw(cells: Sequence[Cell], path: Path) -> None:
    """One point for each: measured to the right, predicted upwards, with a diagonal and bands around it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

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
            axes.scatter(
                *points, s=18, color=color, marker=marker, alpha=0.7, linewidths=0, label=f"{program}, {phase}"
            )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="predicted, ms")
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    off = [abs(cell.off) for cell in cells]
    axes.set_title(f"{len(cells)} kinds of passes: off by {median(off):.1%} (median), {max(off):.0%} at worst")
    axes.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=130)
