"""The tables and the figure of what scripts/real/compare.py has measured.

    python scripts/real/page.py docs/measured/real.csv [--figure docs/figures/real.png]

Prints a table for each place (a link, a size) with a column for each goal: what a method's program loses, the mean
divergence over the texts, before healing and after; then the numbers on each text, and of tasks where there are some.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.commands import make_parser
from scripts.real.compare import DENSE, METHODS, NOT, PLACES
from surgeon.findings.drawing import scale
from surgeon.findings.result import Table

STAGES = ("edited", "healed")
TITLES = {"size": "stored smaller", "NVLink": "on NVLink", "1 ms link": "behind a link of 1 ms"}


def read(path: Path) -> pd.DataFrame:
    rows = pd.read_csv(path)
    goals = rows["goal"].str.extract(r"^([\d.]+) (.+)$")
    return rows.assign(times=goals[0].astype(float), place=goals[1])


def mean(rows: pd.DataFrame, metric: str = "divergence") -> float:
    return float(rows.loc[rows["metric"] == metric, "value"].mean())


def overview(rows: pd.DataFrame, place: str) -> Table:
    """Methods by goals: divergence, mean over the texts, before healing and after."""
    of_place = rows[rows["place"] == place]
    goals = sorted(of_place["times"].unique())
    lines = []
    for method in [one for one in METHODS if one in set(of_place["method"])]:
        cells = []
        for times in goals:
            found = of_place[(of_place["method"] == method) & (of_place["times"] == times)]
            if (found["on"] == NOT).any():
                cells.append(NOT)
                continue
            values = [mean(found[found["stage"] == stage]) for stage in STAGES]
            cells.append(" → ".join(f"{value:.3g}" for value in values if value == value))
        lines.append([method, *cells])
    if place == "size":
        head = [f"{1 / times:.0%} of the size" for times in goals]
    else:
        head = [f"{times:g} times as fast" for times in goals]
    return Table("", [place, *head], lines)


def each_text(rows: pd.DataFrame) -> Table:
    """A line for every program and stage: perplexity, divergence and greedy acceptance on every text."""
    texts = list(dict.fromkeys(rows.loc[rows["metric"] == "perplexity", "on"]))
    lines = []
    for (goal, method, stage), found in rows[rows["on"].isin(texts)].groupby(
        ["goal", "method", "stage"], sort=False
    ):
        cells = []
        for text in texts:
            values = found[found["on"] == text].set_index("metric")["value"]
            cells.append(", ".join(f"{value:.3g}" for value in values))
        lines.append([str(goal), str(method), str(stage), *cells])
    return Table("", ["goal", "method", "", *texts], lines)


def tasks(rows: pd.DataFrame) -> Table | None:
    """A line for every program and stage: accuracies, in percent, with the half width of the 95% interval."""
    found = rows[rows["metric"].str.startswith("acc", na=False)]
    if found.empty:
        return None
    names = [f"{one.on} {one.metric}" for one in found.drop_duplicates(["on", "metric"]).itertuples()]
    lines = []
    for key, own in found.groupby(["goal", "method", "stage"], sort=False):
        cells = {
            f"{one.on} {one.metric}": f"{100 * one.value:.1f} ± {100 * (one.high - one.value):.1f}"
            for one in own.itertuples()
        }
        lines.append([*map(str, key), *(cells.get(name, "") for name in names)])
    return Table("", ["goal", "method", "", *names], lines)


def draw(rows: pd.DataFrame, path: Path) -> None:
    """A panel for each place: divergence by what is reached, a line a method; dashed and hollow before healing."""
    from matplotlib import pyplot

    places = [place for place in PLACES if (rows["place"] == place).any()]
    figure, panels = pyplot.subplots(
        1, len(places), figsize=(4.2 * len(places), 3.8), sharey=True, squeeze=False
    )
    values: list[float] = []
    for panel, place in zip(panels[0], places, strict=True):
        for number, method in enumerate(METHODS):
            colour = f"C{number}"
            found = rows[(rows["place"] == place) & (rows["method"] == method) & (rows["on"] != NOT)]
            for stage, line in zip(STAGES, ("--", "-"), strict=True):
                points = sorted(points_of(found[found["stage"] == stage]))
                values += [value for _, value in points]
                if points:
                    look = {"mfc": "white"} if stage == "edited" else {"label": method}
                    panel.plot(*zip(*points, strict=True), line, marker="o", ms=5, color=colour, **look)
        panel.locator_params("x", nbins=5)
        panel.set_title(TITLES[place])
        panel.set_xlabel("times as fast as dense (predicted)")
        if place == "size":
            panel.set_xlabel("share of the parameters")
            panel.invert_xaxis()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("divergence, nats per token")
    scale(panels[0][0], "y", values, log=True)
    handles = {
        label: handle
        for panel in panels[0]
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncol=5, frameon=False, fontsize=8
    )
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=110)


def points_of(found: pd.DataFrame) -> Iterator[tuple[float, float]]:
    for _, own in found.groupby("goal"):
        value = mean(own)
        first = own.iloc[0]
        reached = first["reached"]
        if first["place"] == "size":
            reached = 1 / first["times"]
        if value == value:
            yield reached, value


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    rows = read(options.table)
    dense = rows[rows["method"] == DENSE]
    print(
        "dense:",
        ", ".join(f"{one.on} {one.metric} {one.value:.4g}" for one in dense.itertuples()),
        end="\n\n",
    )
    for place in PLACES:
        if (rows["place"] == place).any():
            print(overview(rows, place).markdown, end="\n\n")
    print(each_text(rows[(rows["method"] != DENSE) & (rows["on"] != NOT)]).markdown)
    if (found := tasks(rows)) is not None:
        print(f"\n{found.markdown}")
    if options.figure is not None:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
