"""Prediction: what programs would cost on described hardware, as tables for a terminal, charts and a section."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch

from surgeon.findings.blocks import Block, Finding, Paragraph, Table
from surgeon.findings.drawing import COLOURS, INK, NO_CELL, PAPER, Chart, Picture, bars, points, scale
from surgeon.findings.result import RunResult, TableFile
from surgeon.language.operations.variants import DENSE
from surgeon.memory import show_size
from surgeon.words import NO_VALUE, TIMES, WIDTH, aligned, hanging, number, plural, three_digits, times

AXES = ("ranks", "batch", "prompt", "new")
PARTS = ("compute", "launches", "exposed")  # of a pass's time
SPEEDUPS = ("first_token_speedup", "per_token_speedup", "tokens_per_second_speedup")
TOO_LARGE = "does not fit into memory"  # why a cell of a sweep is refused that has a prediction
_SPEEDS = ("first_token_ms", "per_token_ms", "tokens_per_second")
_PARTS = (("compute", 0), ("launches, gaps", 7), ("waiting for collectives", 1))  # words and colour
_MOST_CHARTS = 8
_GIB = 1 << 30
DRAFT_COLUMNS = (
    *("ranks", "batch", "prompt", "new", "acceptance", "ahead", "draft_ms", "verify_ms", "per_token_ms"),
    *("dense", "drafted", "alone", "speedup", "alone_speedup"),
)
_SPEEDUP = "_speedup"  # what the columns of programs end in
_FULL_COLOUR = 2.0  # times as fast
_DARK = 1.6  # sum of red, green and blue: white text can be read on it


@dataclass(frozen=True, repr=False)
class Predictions(RunResult):
    """The result of `predict`.

    Attributes:
        speeds: one row per program, ranks and load, as in `predict.csv`; speedups are over the first program on the
            same ranks for the same load.
        cells: by ranks and load, of every program; of predictions just made.
    """

    COMMAND = "predict"
    RECORD = "predict.json"
    TITLE = "Predictions"
    TABLES: ClassVar = {
        "speeds": TableFile(
            "predict.csv",
            (*AXES, *_SPEEDS, "communication_share", "needed_bytes", "there_bytes", "fits", *SPEEDUPS),
            ("program",),
        )
    }

    speeds: pd.DataFrame
    cells: Sequence[Any] = ()

    def __str__(self) -> str:
        """Tables of at most 80 columns; behind them how ranks share experts, where that was open."""
        table = self.speeds
        parts = [hanging("", self.heading), ""]
        if self.record["swept"]:
            parts.append(self._sweep())
        else:
            parts += ["Latency, throughput, and memory of the rank that needs most", self._latency()]
            parts += ["", "Where the time of a pass goes", self._passes()]
            if table["program"].nunique() > 1:
                lines = [["program", "batch", "first token", "per token", "tokens/s"]]
                for _, row in table.iterrows():
                    lines.append([row["program"], str(row["batch"]), *(times(row[name]) for name in SPEEDUPS)])
                parts += ["", f"Times as fast as {table['program'].iloc[0]}", aligned(lines)]
        if "experts" in self.record:
            parts += ["", *self.record["experts"]]
        return "\n".join(parts)

    def _sweep(self) -> str:
        """A line for each cell, and what its marks stand for."""
        table = self.speeds
        axes = swept_axes(self.speeds)
        lines = [["program", *axes, "first", "per token", "tokens/s", "speedup", "comm.", "memory"]]
        lines.append(["", *("" for _ in axes), "ms", "ms", "", "", "", ""])
        for _, row in table.iterrows():
            begin = [row["program"], *(str(row[name]) for name in axes)]
            if math.isnan(row["first_token_ms"]):
                lines.append([*begin, "-", "-", "-", "-", "-", "refused"])
                continue
            memory = show_size(row["needed_bytes"]) + ("" if row["fits"] else "!")
            lines.append([*begin, *_speeds(row), times(row["tokens_per_second_speedup"]), _share(row), memory])
        notes = []
        if not table["fits"].all() and (table["refused"] == TOO_LARGE).any():
            notes.append(f"!: does not fit into the {show_size(table['there_bytes'].max())} that there are for it.")
        refused = table[table["first_token_ms"].isna()]
        notes += [hanging("refused: ", reason) for reason in refused["refused"].drop_duplicates()]
        return "\n".join([aligned(lines), "", *notes]).rstrip()

    def _latency(self) -> str:
        lines = [["program", "batch", "first token", "per token", "tokens/s", "comm.", "memory", "fits"]]
        lines.append(["", "", "ms", "ms", "", "", "", ""])
        for _, row in self.speeds.iterrows():
            fits = "no"
            if row["fits"]:
                fits = "yes"
            begin = [row["program"], str(row["batch"])]
            lines.append([*begin, *_speeds(row), _share(row), show_size(row["needed_bytes"]), fits])
        return aligned(lines)

    def _passes(self) -> str:
        lines = [["program", "batch", "pass", "compute", "launch", "comm.", "hidden", "collectives", "bytes"]]
        lines.append(["", "", "", "ms", "ms", "ms", "ms", "", ""])
        for _, row in self.speeds.iterrows():
            for phase in ("prefill", "decode"):
                if math.isnan(row[f"{phase}_compute_ms"]):
                    continue
                hidden = max(0.0, row[f"{phase}_communication_ms"] - row[f"{phase}_exposed_ms"])
                spent = [three_digits(value) for value in (*(row[f"{phase}_{part}_ms"] for part in PARTS), hidden)]
                calls = int(row[f"{phase}_all_reduces"] + row[f"{phase}_all_gathers"])
                counts = [f"{calls}+{int(row[f'{phase}_vocabulary_collectives'])}", show_size(row[f"{phase}_bytes"])]
                if phase == "prefill":
                    begin = [row["program"], str(row["batch"])]
                else:
                    begin = ["", ""]
                lines.append([*begin, phase, *spent, *counts])
        return aligned(lines)

    def section(self) -> Iterator[Block]:
        table = self.speeds
        first = table["program"].iloc[0]
        yield Paragraph(
            f"What programs would cost on {self.record.get('hardware', 'hardware that has no name')}, from its figures "
            f"and the model's shapes: nothing was run. Speedups are over {first} on the same ranks for the same load."
        )
        charts = []
        if not self.record.get("swept"):
            charts += _passes(table)
        if table[[*AXES]].nunique().max() > 1:
            charts += _lines(table)
        if charts:  # none where nothing can be shared out
            yield Picture(charts, name="predict")
        yield _cells(table)

    def summary(self) -> Iterator[Finding]:
        table = self.speeds
        fitting = table[(table["fits"] == 1) & (table["program"] != table["program"].iloc[0])]
        hardware = self.record.get("hardware", "hardware")
        if fitting["tokens_per_second_speedup"].notna().any():
            best = fitting.loc[fitting["tokens_per_second_speedup"].idxmax()]
            where = f"{plural(int(best['ranks']), 'rank')} with batch {int(best['batch'])}"
            speedup = f"{number(float(best['tokens_per_second_speedup']), 3)}{TIMES}"
            text = f"On {hardware}, {best['program']} should win most on {where}: {speedup} the tokens per second."
            yield Finding("Predicted", text, speedup, f"predicted on {hardware}")


def _speeds(row: Any) -> list[str]:
    return [three_digits(row[name]) for name in _SPEEDS]


def _share(row: Any) -> str:
    return f"{row['communication_share']:.0%}"


def swept_axes(table: pd.DataFrame) -> list[str]:
    """The axes that take several values, ranks and batch if none does."""
    return [name for name in AXES if table[name].nunique() > 1] or ["ranks", "batch"]


def drawn_axes(table: pd.DataFrame) -> tuple[str, str, pd.DataFrame]:
    """The axis of a sweep along which lines go, that of which there are panels, and the first of all others."""
    along, panels_of, *others = sorted(("batch", "ranks", "prompt", "new"), key=lambda name: table[name].nunique() == 1)
    for name in others:
        table = table[table[name] == table[name].iloc[0]]
    return along, panels_of, table


def words_of(axis: str, value: int) -> str:
    """A value of an axis: 8 ranks, batch 16, prompt 1024, 512 new."""
    if axis == "ranks":
        return plural(value, "rank")
    if axis == "new":
        return f"{value} new"
    return f"{axis} {value}"


def _passes(table: pd.DataFrame) -> list[Chart]:
    """Both passes of every program, by what their time goes to."""
    return [_pass(table, phase) for phase in ("prefill", "decode") if table[f"{phase}_compute_ms"].notna().any()]


def _pass(table: pd.DataFrame, phase: str) -> Chart:
    names = [str(program) for program in table["program"]]
    if table["batch"].nunique() > 1:
        names = [f"{program}, {batch}" for program, batch in zip(names, table["batch"], strict=True)]
    spent = [table[f"{phase}_{part}_ms"].to_numpy() for part in PARTS]
    speedups = table["per_token_speedup" if phase == "decode" else "first_token_speedup"]
    notes = [
        f"{three_digits(end)} ms, {speedup:.2f}x" for end, speedup in zip(np.sum(spent, axis=0), speedups, strict=True)
    ]

    def draw(axes: Axes) -> None:
        bars(axes, names, [(*part, own) for part, own in zip(_PARTS, spent, strict=True)], notes)

    height = 70.0 + 26.0 * len(table)
    return Chart(f"One {phase} pass", draw, "ms", "", "Where its time goes.", height=height, left=150.0)


def _lines(table: pd.DataFrame) -> Iterator[Chart]:
    """Tokens per second along an axis of a sweep, a chart for each value of another; speedups where there are several.

    Where more than two axes are swept, the charts are of the first value of the others.
    """
    several = table["program"].nunique() > 1
    column = "tokens_per_second"
    if several:
        column = "tokens_per_second_speedup"
    title = "new tokens per second"
    if several:
        title = f"tokens/s, times {table['program'].iloc[0]}"
    along, by, table = drawn_axes(table)
    for value in list(table[by].unique())[:_MOST_CHARTS]:
        own = table[(table[by] == value) & table[column].notna()]
        if len(own):
            yield _line_chart(own, column, along, title, words_of(by, int(value)))


def _line_chart(own: pd.DataFrame, column: str, along: str, y: str, title: str) -> Chart:
    def draw(axes: Axes) -> None:
        ticks = sorted(set(own[along]))
        shown = ticks[:: max(1, math.ceil(len(ticks) / 8))]
        axes.set_xscale("log")
        axes.set_xlim(ticks[0] / 1.1, max(ticks[-1], ticks[0] * 2) * 1.1)
        axes.set_xticks(shown, labels=[str(int(tick)) for tick in shown])
        axes.minorticks_off()
        scale(axes, "y", own[column].tolist(), log=not column.endswith("speedup"))
        for style, (program, rows) in enumerate(own.groupby("program", sort=False)):
            tips = []
            for _, row in rows.iterrows():
                fits = "" if row["fits"] else ", does not fit into memory"
                tips.append(f"{program}, {along} {int(row[along])}: {number(row[column], 3)}{fits}")
            points(axes, rows[along], rows[column], tips, style, str(program))

    return Chart(title, draw, along, y, described=f"{y}, {title}")


def _cells(table: pd.DataFrame) -> Table:
    axes = swept_axes(table)
    head = ["program", *axes, "first token, ms", "per token, ms", "tokens/s", "speedup", "waiting", "GiB"]
    rows = []
    for _, row in table.iterrows():
        begin = [str(row["program"]), *(str(int(row[name])) for name in axes)]
        if math.isnan(row["first_token_ms"]):
            rows.append([*begin, NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE, "cannot be shared"])
            continue
        numbers = [number(row[name], 3) for name in ("first_token_ms", "per_token_ms", "tokens_per_second")]
        speedup = number(row["tokens_per_second_speedup"], 3)
        waiting = f"{row['communication_share']:.0%}"
        memory = number(row["needed_bytes"] / _GIB, 3) + ("" if row["fits"] else ": too much")
        rows.append([*begin, *numbers, speedup, waiting, memory])
    note = (
        "Waiting: the part of the time in which ranks wait for collectives. GiB: of the rank that needs most; there "
        f"are {number(float(table['there_bytes'].max()) / _GIB, 3)} for it."
    )
    return Table("Every prediction", head, rows, note, folded=len(rows) > 24)


@dataclass(frozen=True, repr=False)
class BestPrograms(RunResult):
    """The result of a prediction of the best programs.

    Attributes:
        winners: a row for every link, number of ranks and batch, as in `best.csv`: what wins (nothing where the dense
            model does not fit), and what every program wins there, times the dense one's speed.
        choices: one for each link, number of ranks and batch; of a prediction just made.
    """

    COMMAND = "predict"
    RECORD = "best.json"
    TABLES: ClassVar = {"winners": TableFile("best.csv", ("ranks", "batch", "speedup"), ("link", "winner"))}

    winners: pd.DataFrame
    choices: Sequence[Any] = ()

    def __str__(self) -> str:
        """One table for each link: batches down, ranks across, each with its winner and what it wins."""
        unfit = ""
        if (self.winners["winner"] == "").any():
            unfit = " (-: it does not fit into memory)"
        parts = [hanging("", self.heading), "", f"Fastest, and times as fast as the dense model{unfit}", ""]
        for link, here in self.winners.groupby("link", sort=False):
            cells = here.assign(text=[_words(one) for one in here.itertuples()])
            table = cells.pivot(index="batch", columns="ranks", values="text").fillna("-")
            table = table.reindex(index=here["batch"].unique(), columns=here["ranks"].unique())
            parts += [str(link) or "no link", _across(table), ""]
        if "reaches" in self.record:  # not in older ones
            parts += ["The batches at which a program pays", "", self.record["reaches"]]
        return "\n".join(parts).rstrip()

    def pictures(self) -> dict[str, Picture]:
        """`best`: a panel for each link, ranks down, batches across, coloured by what wins and how much."""
        names = [str(name).removesuffix(_SPEEDUP) for name in self.winners if str(name).endswith(_SPEEDUP)]
        colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
        colours |= {DENSE: NO_CELL, "": PAPER}

        def paint(one: Any) -> tuple[Any, str]:
            colour = np.array(to_rgba(colours[one.winner]))
            if one.winner not in ("", DENSE):  # mixed with white where it wins little
                strength = 0.25 + 0.75 * min(1.0, (one.speedup - 1) / (_FULL_COLOUR - 1))
                colour = 1 - strength * (1 - colour)
            return colour, f"{one.speedup:.2f}" if one.winner else ""

        panels = []
        for link, own in self.winners.groupby("link", sort=False):
            named = {DENSE: "nothing pays", "": "does not fit"}
            keys = {named.get(name, name): colours[name] for name in colours if name in set(own["winner"])}
            panels.append(_by_load(str(link) or "one rank", own, paint, keys=keys))
        return {"best": Picture(panels)}


def _across(table: pd.DataFrame) -> str:
    """Batches down and ranks across; where those are too many for a terminal, the other half of them below."""
    lines = [["batch", *(plural(int(ranks), "rank") for ranks in table.columns.to_numpy())]]
    lines += [[str(batch), *texts] for batch, texts in zip(table.index, table.to_numpy(), strict=True)]
    text = aligned(lines)
    count = table.shape[1]
    if count == 1 or max(map(len, text.splitlines())) <= WIDTH:
        return text
    return "\n\n".join(map(_across, (table.iloc[:, : count // 2], table.iloc[:, count // 2 :])))


def _words(one: Any) -> str:
    return {"": "-", DENSE: DENSE}.get(one.winner) or f"{one.winner} {one.speedup:.2f}"


def _by_load(
    title: str,
    table: pd.DataFrame,
    paint: Callable[[Any], tuple[Any, str]],
    row_height: float = 30.0,
    keys: Mapping[str, str] | None = None,
) -> Chart:
    """Cells by ranks (down) and batch (across), each with the colour and the text that `paint` gives its row."""
    ranks = list(table["ranks"].unique())
    batches = list(table["batch"].unique())

    def draw(axes: Axes) -> None:
        image = np.ones((len(ranks), len(batches), 4))
        for one in table.itertuples():
            place = ranks.index(one.ranks), batches.index(one.batch)
            image[place], text = paint(one)
            ink = "white" if image[place][:3].sum() < _DARK else INK
            axes.text(place[1], place[0], text, ha="center", va="center", fontsize=8, color=ink)
        axes.imshow(image, aspect="auto")
        axes.set_xticks(range(len(batches)), labels=[f"{batch:g}" for batch in batches])
        axes.set_yticks(range(len(ranks)), labels=[f"{count:g}" for count in ranks])
        axes.grid(visible=False)
        if keys:
            handles = [Patch(facecolor=colour, edgecolor="#888888", label=words) for words, colour in keys.items()]
            place_of_keys: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}
            axes.legend(handles=handles, fontsize=9, frameon=False, ncols=3, **place_of_keys)

    return Chart(title, draw, "batch", "ranks", height=80.0 + row_height * len(ranks))


@dataclass(frozen=True, repr=False)
class DraftRun(RunResult):
    """The result of a prediction of drafts.

    Attributes:
        speeds: one row per ranks, load and acceptance, as in `drafts.csv`: times in ms, tokens per second without
            drafts (`dense`), with them (`drafted`) and of the draft alone (`alone`), and how often the first is in the
            others.
    """

    COMMAND = "predict"
    RECORD = "drafts.json"
    TABLES: ClassVar = {"speeds": TableFile("drafts.csv", DRAFT_COLUMNS, may_be_empty=True)}

    speeds: pd.DataFrame

    def __str__(self) -> str:
        """A table of at most 80 columns, and below it what was refused."""
        lines = [["ranks", "batch", "accepted", "ahead", "draft", "verify", "tokens/s", "dense", "times", "alone"]]
        lines.append(["", "", "", "", "ms", "ms", "", "", "", "times"])
        for _, row in self.speeds.iterrows():
            begin = [f"{row[name]:g}" for name in ("ranks", "batch", "acceptance", "ahead")]
            spent = [three_digits(row[name]) for name in ("draft_ms", "verify_ms", "drafted", "dense")]
            speedups = [f"{row[name]:.2f}" for name in ("speedup", "alone_speedup")]
            lines.append([*begin, *spent, *speedups])
        refused = [hanging("refused: ", reason) for reason in self.record["refused"]]
        return "\n".join([hanging("", self.heading), "", aligned(lines, ()), *refused])

    def pictures(self) -> dict[str, Picture]:
        """`drafts`: a map for each acceptance, and one of the draft alone; none where all was refused."""
        if self.speeds.empty:
            return {}
        return {"drafts": drafts_picture({"": self.speeds})}


def drafts_picture(found: dict[str, pd.DataFrame]) -> Picture:
    """Maps of each draft by its name: ranks down, batches across, of the first prompt and number of tokens."""
    shades = matplotlib.colormaps["YlGnBu"]

    def paint(one: Any) -> tuple[Any, str]:
        if not one.ahead:
            return shades((one.speedup - 1) / (_FULL_COLOUR - 1)), "off"
        return shades((one.speedup - 1) / (_FULL_COLOUR - 1)), f"{one.speedup:.2f}\n+{one.ahead:.0f}"

    def paint_alone(one: Any) -> tuple[Any, str]:
        return shades((one.alone_speedup - 1) / (_FULL_COLOUR - 1)), f"{one.alone_speedup:.2f}"

    panels = []
    for name, speeds in found.items():
        drawn = speeds[(speeds[["prompt", "new"]] == speeds[["prompt", "new"]].iloc[0]).all(axis="columns")]
        for chance, cells in drawn.groupby("acceptance"):
            panels.append(_by_load(f"{name} {chance:g} accepted".strip(), cells, paint, 34.0))
        alone = drawn.drop_duplicates(["ranks", "batch"])
        panels.append(_by_load(f"{name} alone (lossy)".strip(), alone, paint_alone, 34.0))
    caption = (
        "How many times as fast texts are as without drafts, and below it how many tokens are drafted. The draft alone "
        "is lossy. Cells that were refused stay empty."
    )
    return Picture(panels, caption)
