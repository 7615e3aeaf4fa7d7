"""Pictures of training over racks: what ranks do when, and losses by tokens and by time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.pipelined_ranks import LOCAL, SCHEDULES, Job, read_outcome
from scripts.bench.rack_bench import BATCH, NAMES, WARM, WINDOW, Bench, Cell, Figures, figures_of, timeline
from scripts.bench.rack_processes import PROCESSES, RackRun
from scripts.bench.rack_quality import HIDDEN, Run, found_in, gaps
from surgeon.results.drawing import COLOURS, MARKERS

SHOWN = 1.0  # nats above the lowest loss
STEPS = 2  # that a timeline shows, of the slowest way
COMPUTE = {"forward": "#0072B2", "backward": "#56B4E9", "loss": "#56B4E9", "update": "#009E73", "": "#2B93CE"}
WAITING = {"wait_input": "#E4E4E4", "wait_room": "#F3D9A4"}
TRAFFIC = {"forward": "#D55E00", "backward": "#CC79A7"}
KEYS = [
    *(Patch(color=COMPUTE[part], label=label) for part, label in (("forward", "forward"), ("backward", "backward"))),
    Patch(color=COMPUTE["update"], label="optimiser"),
    Patch(color=COMPUTE[""], label="computes"),
    Patch(color=WAITING["wait_input"], label="waits for input"),
    Patch(color=WAITING["wait_room"], label="waits to send"),
    Line2D([], [], color=TRAFFIC["forward"], lw=3, label="sends activations"),
    Line2D([], [], color=TRAFFIC["backward"], lw=3, label="sends gradients"),
]


def draw(bench: Bench, found: Mapping[Cell, Sequence[Figures]], quality: Sequence[Path]) -> Iterator[Path]:
    """Draw what can be drawn; yields where it is."""
    folder = bench.output / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for ranks, link in sorted({(cell.ranks, cell.link) for cell in found}):
        there = {cell.way: cell for cell in found if (cell.ranks, cell.link) == (ranks, link)}
        traces = [trace_of(cell, quietest(bench, cell)) for cell in there.values()]
        if set(SCHEDULES) <= set(there):
            path = folder / f"timeline-{ranks}-{link.replace('/', '')}.png"
            draw_timelines(traces, title_of(ranks, link), path)
            yield path
    if quality:
        draw_losses(quality[0], speeds_of(found), folder / "losses.png")
        yield folder / "losses.png"
        draw_gaps(quality, folder / "gaps.png")
        yield folder / "gaps.png"


def quietest(bench: Bench, cell: Cell) -> Path:
    """The round in which the least was taken from it."""
    return max(bench.folders(cell), key=lambda folder: figures_of(cell, folder).speed)


def title_of(ranks: int, link: str) -> str:
    """What stands above a timeline."""
    words = {"none": "no link between them", "slow": "the second takes twice as long", "1ms": "links of 1 ms"}
    return f"{ranks} ranks, {words.get(link, f'links of {link}')}: what each does, from the second step on"


def speeds_of(found: Mapping[Cell, Sequence[Figures]]) -> dict[str, float]:
    """Tokens per second of four ranks behind links of 1 ms, by way."""
    chosen = {cell.way: rounds for cell, rounds in found.items() if (cell.ranks, cell.link) == (4, "1ms")}
    return {way: max(each.speed for each in rounds) for way, rounds in chosen.items()}


@dataclass(frozen=True)
class RanksTrace:
    """One way's ranks.

    Attributes:
        name: of the way, with its speed.
        seconds: of a step.
        ranks: rows of each one's timeline.
        begun: where the picture begins.
    """

    name: str
    seconds: float
    ranks: list[list[dict[str, Any]]]
    begun: float


def trace_of(cell: Cell, folder: Path) -> RanksTrace:
    """A run as it is drawn: from the first rank's second step on."""
    speed = figures_of(cell, folder).speed
    name, seconds = f"{NAMES[cell.way]}: {speed:.0f} tokens/s", BATCH * WINDOW / speed
    if cell.way == PROCESSES:
        runs = [RackRun(folder, rank, WARM) for rank in range(cell.ranks)]
        rows = [
            [
                row | {"part": "forward" if row["what"] == "send" else ""}
                for row in run.rows
                if row["kind"] == "training"
            ]
            for run in runs
        ]
        return RanksTrace(name, seconds, rows, min(run.begun for run in runs))
    outcome = read_outcome(Job.read(folder), folder)
    begun = min(record["times"][WARM - 1][1] for record in outcome.records)
    return RanksTrace(name, seconds, [timeline(folder, rank) for rank in range(cell.ranks)], begun)


def draw_timelines(traces: Sequence[RanksTrace], title: str, path: Path) -> None:
    """One panel for each way, all on one scale of time."""
    span, ranks = STEPS * max(trace.seconds for trace in traces), len(traces[0].ranks)
    figure = Figure(figsize=(12, 1.1 + len(traces) * (0.45 + 0.42 * ranks)), layout="constrained")
    panels = figure.subplots(len(traces), 1, sharex=True)
    for axes, trace in zip(panels, traces, strict=True):
        for rank, rows in enumerate(trace.ranks):
            _draw_rank(axes, rank, rows, trace.begun, span)
        axes.set(xlim=(0, span), ylim=(ranks - 0.4, -0.6))
        axes.set_yticks(range(ranks), labels=[f"rank {rank}" for rank in range(ranks)], fontsize=8)
        axes.set_title(trace.name, loc="left", fontsize=9)
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("seconds")
    figure.legend(handles=KEYS, loc="outside lower center", ncols=len(KEYS), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def _draw_rank(axes: Axes, rank: int, rows: Sequence[dict[str, Any]], begun: float, span: float) -> None:
    bars: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for row in rows:
        start, end = row["start"] - begun, row["end"] - begun
        if end < 0 or start > span:
            continue
        what, part = row["what"], row["part"]
        colour = TRAFFIC.get(part) if what == "send" else WAITING.get(what) or COMPUTE[part]
        if colour is not None:
            bars.setdefault((colour, what == "send"), []).append((start, max(end - start, span / 2000)))
    for (colour, sends), pieces in bars.items():
        place = (rank + 0.3, 0.13) if sends else (rank - 0.32, 0.58)
        axes.broken_barh(pieces, place, facecolors=colour, edgecolor="white", linewidth=0 if sends else 0.4)


def draw_losses(quality: Path, speeds: Mapping[str, float], path: Path) -> None:
    """Held-out loss of the largest size that is there, by tokens, and by the time that these take on four ranks."""
    runs = dict(found_in(quality))
    both = [size for size in HIDDEN if {Run(size), Run(size, racks=1)} <= set(runs)]
    if not both:
        return
    size = both[-1]
    local, whole = runs[Run(size)], runs[Run(size, racks=1)]
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    by_tokens, by_time = figure.subplots(1, 2, sharey=True)
    ways = {"end to end": (whole, COLOURS[0]), "local": (local, COLOURS[1])}
    for number, (name, (values, colour)) in enumerate(ways.items()):
        tokens, losses = _curve(values)
        by_tokens.plot(tokens, losses, color=colour, marker=MARKERS[number], ms=4, label=name)
    for number, (way, tokens_per_second) in enumerate(speeds.items()):
        tokens, losses = _curve(local if way in (LOCAL, PROCESSES) else whole)
        colour = COLOURS[(0, 2, 3, 1, 4)[number % 5]]
        minutes = [each / tokens_per_second / 60 for each in tokens]
        by_time.plot(minutes, losses, color=colour, marker=MARKERS[number], ms=4, label=NAMES[way])
    lowest = min(losses[-1] for _, losses in map(_curve, (local, whole)))
    by_tokens.set(ylim=(lowest - 0.05, lowest + SHOWN))
    by_tokens.xaxis.set_major_formatter(EngFormatter())
    by_tokens.set(xlabel="tokens", ylabel="held-out loss, nats per byte", title="by tokens")
    by_time.set(xlabel="minutes at the speeds of the table (4 ranks, 1 ms)", title="by time")
    for axes in (by_tokens, by_time):
        finish(axes)
    figure.suptitle(f"A model of {whole['body']:,} parameters without embedding, trained both ways", fontsize=11)
    figure.savefig(path, dpi=150)


def _curve(values: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    points = [each for each in values["points"] if each["step"]]
    return [each["step"] * values["tokens_per_step"] for each in points], [each["losses"][-1] for each in points]


def draw_gaps(quality: Sequence[Path], path: Path) -> None:
    """The gap to end-to-end training by tokens per parameter, and each rack's own loss at the end."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for folder, dash in zip(quality, ("-", "--", ":"), strict=False):
        runs = dict(found_in(folder))
        for size, points in gaps(folder).items():
            values, number = runs[Run(size)], list(HIDDEN).index(size)
            seen = values["steps"] * values["tokens_per_step"] / 1e6
            label = f"{values['body'] / 1000:.0f}k parameters, {seen:.1f}M tokens"
            style: dict[str, Any] = {"color": COLOURS[number], "marker": MARKERS[number], "ms": 4, "ls": dash}
            left.plot(*zip(*points, strict=True), label=label, **style)
            losses = values["points"][-1]["losses"]
            right.plot(range(len(losses)), [each - losses[-1] for each in losses], label=label, **style)
    left.axhline(0, color="#888888", lw=0.8)
    left.axvline(20, color="#888888", lw=0.8, ls=":")
    left.set_xscale("log")
    left.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    left.set(xlabel="tokens per parameter", ylabel="local minus end to end, nats", title="gap in loss")
    right.set(
        xlabel="rack", ylabel="its loss minus the last rack's, nats", title="how much worse shallow racks predict"
    )
    right.set_xticks(range(4))
    for axes in (left, right):
        finish(axes)
    figure.savefig(path, dpi=150)


def finish(axes: Axes) -> None:
    """As all pictures have it."""
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
