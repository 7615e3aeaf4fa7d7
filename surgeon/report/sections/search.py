"""Searches: quality against depth, what was tried, and the recipe that won."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from surgeon.report.blocks import Block, Chart, Code, Finding, Gallery, Table
from surgeon.report.chart import Point, Series, draw_chart, layer_axis, log_axis
from surgeon.report.runs import Kind, Run, TableFile
from surgeon.report.words import interval, interval_heads, listed, number, plural, with_intervals
from surgeon.search.proposer import ADDITIVE, NEIGHBOUR, REGRESSION, SECOND_ORDER, WINDOW
from surgeon.search.storage import STUDY_FILE

DAMAGE, PROFILE = "pair_damage", "profile"

TRIALS, RECIPE = "trials.csv", "recipe.yaml"
_SOURCES = {
    WINDOW: ("one unbroken stretch", 0),
    ADDITIVE: ("least sum of single pairs' damage", 2),
    NEIGHBOUR: ("neighbour of the best", 1),
    SECOND_ORDER: ("second order", 7),
    REGRESSION: ("regression", 3),
}
_SHOWN = 10  # trials in the table


def _show(run: Run) -> Iterator[Block]:
    trials, known = run.tables[TRIALS], _study(run)
    charts = [_by_depth(trials, known.get(PROFILE) or []), _by_trial(trials)]
    if known.get(DAMAGE):
        charts.append(_pair_damage(known[DAMAGE]))
    yield Gallery(charts)
    yield _best_trials(trials)
    if RECIPE in run.texts:
        yield Code("The recipe that was found (recipe.yaml)", run.texts[RECIPE])


def _study(run: Run) -> dict[str, Any]:
    """What the search measured besides trials, from its own file; nothing if the file is not there."""
    path = run.folder / STUDY_FILE
    if not path.is_file():
        return {}
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.load_study(study_name=None, storage=f"sqlite:///file:{path.resolve()}?mode=ro&uri=true")
        return dict(study.user_attrs)
    except (optuna.exceptions.OptunaError, SQLAlchemyError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read ({reason}); remove it, or run the search again") from error


def _tip(row: Any) -> str:
    known = interval(row.get("divergence_low"), row.get("divergence_high"))
    pairs = f", pairs {row['pairs']}" if row.get("pairs") else ""
    divergence = f"divergence {number(row['divergence'])}{f' (95%: {known})' if known else ''}"
    return f"depth {row['depth']:g}{pairs}: perplexity {number(row['perplexity'])}, {divergence}"


def _by_depth(trials: pd.DataFrame, profile: list[Any]) -> Chart:
    """Perplexity of the trials, and on the way from the unedited model to the budget."""
    way = [{"depth": float(depth), **values} for depth, values in profile]
    series = []
    if way:
        points = [Point(row["depth"], row["perplexity"], _tip(row)) for row in way]
        series.append(Series("best sum of single pairs, at every depth", points, 3))
    shift = 0.5 / max(1, len(trials) - 1)
    for source, (words, style) in _SOURCES.items():
        points = [
            Point(row["depth"] + 0.25 - shift * place, row["perplexity"], _tip(row))
            for place, (_, row) in enumerate(trials.iterrows())
            if row["source"] == source
        ]
        if points:
            series.append(Series(words, points, style, line=False))
    series.append(_the_best(series, trials))
    values = [point.y for one in series for point in one.points]
    depths = [float(value) for value in trials["depth"]] + [row["depth"] for row in way]
    middle = float(trials["perplexity"].median())
    least = min(values)
    y = log_axis(values, "perplexity", end=max([least + 2.5 * (middle - least), *(row["perplexity"] for row in way)]))
    x = layer_axis(int(min(depths)), int(max(depths)), "effective depth")
    title = "Quality against depth"
    above = sum(value > y.high for value in values)
    caption = "Trials are spread sideways in the order in which they ran."
    caption += f" {plural(above, 'point')} above the upper edge (hollow, on it)." if above else ""
    return Chart(draw_chart(series, x, y, title), title, caption, [one.key() for one in series])


def _the_best(series: list[Series], trials: pd.DataFrame) -> Series:
    """The point of the trial that won, once more."""
    best = trials.iloc[int(trials["divergence"].to_numpy().argmin())]
    points = [point for one in series if not one.line for point in one.points if point.tip == _tip(best)]
    return Series("the best, by divergence", points[:1], 4, line=False)


def _by_trial(trials: pd.DataFrame) -> Chart:
    best = trials["divergence"].cummin()
    numbers = [float(place) for place in range(1, len(trials) + 1)]
    every = [
        Point(x, row["divergence"], f"trial {int(row['trial'])}, {_tip(row)}")
        for x, (_, row) in zip(numbers, trials.iterrows(), strict=True)
    ]
    so_far = [Point(x, float(value), "") for x, value in zip(numbers, best, strict=True)]
    series = [Series("trial", every, 7, line=False), Series("best so far", so_far, 1, marks=False)]
    y = log_axis([point.y for point in every], "divergence (nats per token)")
    title = "How the search went"
    svg = draw_chart(series, layer_axis(1, len(trials), "trial"), y, title)
    return Chart(svg, title, "", [one.key() for one in series])


def _pair_damage(damage: list[float]) -> Chart:
    points = [
        Point(float(first), float(value), f"pair {first}+{first + 1}: divergence {number(value)}")
        for first, value in enumerate(damage)
    ]
    y = log_axis([point.y for point in points], "divergence (nats per token)")
    title = "Every single pair alone"
    x = layer_axis(0, len(damage) - 1, "first layer of the pair")
    svg = draw_chart([Series("one pair", points, 0)], x, y, title)
    return Chart(svg, title, "What running just these two layers as an LP pair costs.")


def _best_trials(trials: pd.DataFrame) -> Table:
    best = trials.sort_values("divergence", kind="stable").head(_SHOWN)
    rows = [
        [str(int(row["trial"])), row["pairs"], _SOURCES.get(row["source"], (row["source"], 0))[0], f"{row['depth']:g}",
         number(row["perplexity"]), *with_intervals(row, ["divergence"])]
        for _, row in best.iterrows()
    ]  # fmt: skip
    head = ["trial", "pairs", "from", "depth", "perplexity", *interval_heads(trials, ["divergence"])]
    caption = f"The best {len(best)} of {plural(len(trials), 'trial')}"
    return Table(caption, head, rows, left=frozenset({1, 2}))


def _findings(run: Run) -> Iterator[Finding]:
    trials = run.tables[TRIALS]
    best = trials.iloc[int(trials["divergence"].to_numpy().argmin())]
    known = interval(best.get("divergence_low"), best.get("divergence_high"))
    pairs = best["pairs"].split()
    divergence = f"{number(best['divergence'])}{f' (95%: {known})' if known else ''}"
    text = (
        f"Of {plural(len(trials), 'trial')} at a depth of {best['depth']:g}, the best runs "
        f"{listed(pairs) or 'no layers'} as LP pairs: divergence {divergence}, perplexity {number(best['perplexity'])}."
    )
    windows = trials[(trials["source"] == WINDOW) & (trials["depth"] == best["depth"])]
    if len(windows) and best["source"] != WINDOW:
        least = number(float(windows["divergence"].min()))
        text += f" The best unbroken stretch of as many pairs has a divergence of {least}."
    label = f"perplexity at depth {best['depth']:g}, the best pairs found"
    yield Finding("Searched pairs", text, number(best["perplexity"]), label)


SEARCH = Kind(
    name="search",
    title="Search",
    record="search.json",
    show=lambda run: list(_show(run)),
    tables=(TableFile(TRIALS, ("trial", "depth", "perplexity", "divergence"), ("source", "pairs")),),
    texts=(RECIPE,),
    findings=lambda run: list(_findings(run)),
    without="No search: whether scattered pairs do better than one stretch is not known (surgeon search).",
)
