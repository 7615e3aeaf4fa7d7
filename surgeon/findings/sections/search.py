"""Searches: how they went, what the best programs have in common, and the winner on text that was held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize

from surgeon.findings.blocks import Block, Code, Finding, Gallery, Heading, Legend, Map, Paragraph, Table
from surgeon.findings.drawing import Chart
from surgeon.findings.page_maps import WIDE, cell_table, legend_figure, map_cells, map_figure
from surgeon.findings.program import program_figure
from surgeon.findings.runs import Kind, Run
from surgeon.findings.search import (
    SearchRun,
    edit_charts,
    front_charts,
    history_chart,
    objectives_of,
    quality_chart,
)
from surgeon.findings.trials import DRAFT_TIME, TrialTable
from surgeon.language.program import Program
from surgeon.words import (
    cost,
    first_few,
    in_words,
    interval,
    interval_heads,
    known,
    number,
    plural,
    with_intervals,
)

_SHOWN = 10  # rows in a table
_EDITS_NAMED = 12
_EARLIER = (
    "This search was made by an earlier version of surgeon, whose table of trials says less; run surgeon search again, "
    "with another output folder, to see what it found."
)


def _show(run: Run[SearchRun]) -> Iterator[Block]:
    if run.found.is_earlier:
        yield Paragraph(_EARLIER)
        return
    found, trials, held = run.found, run.found.trial_table, run.record.get("held_out")
    if held and held["overturned"]:
        yield Paragraph(held["sentences"][-1] + ".")
    charts = [history_chart(trials), *(quality_chart(along, rows) for along, rows in found.by_cost.items())]
    if len(found.front):
        by_divergence = objectives_of(found.front)[0] == "divergence"
        charts += front_charts(found.front, trials, without=found.by_cost if by_divergence else ())
    yield Gallery(charts)
    yield from _winner(run)
    if held:
        yield _on_held_out_text(held)
    if run.record.get("healing"):
        yield _healed(run.record["healing"])
    yield _front_table(found.front, trials) if len(found.front) else _best_trials(trials)
    if any(trials.choices):
        yield _layers_touched(trials, found.layers)
    if len(found.terms):
        yield Heading("What single edits do")
        yield Gallery(edit_charts(found.terms))
    yield from _what_goes_with_edits(trials, found.terms)
    if run.record.get("using"):
        yield _taken(run.record["using"])


def _winner(run: Run[SearchRun]) -> Iterator[Block]:
    """The program that won, drawn, and its recipe."""
    best, record = run.record.get("best"), run.record
    if best and record.get("num_layers") and record.get("steps_per_layer"):
        title = f"The winner, trial {best['trial']}"
        program = Program.parse(best["program"])
        figure = program_figure(program, int(record["num_layers"]), int(record["steps_per_layer"]))
        yield Chart(figure, title, f"{best['why']}.", described=f"{title}: {program}", wide=True, themed=False)
    if run.found.recipe_text:
        yield Code("The recipe that was found (recipe.yaml)", run.found.recipe_text)


def _on_held_out_text(held: dict[str, Any]) -> Table:
    """The search's winner and the runners-up on text that the search did not see."""
    by, first, others = held["by"], held["searched"], held["runners_up"]
    rows = [[str(first["trial"]), *_both(first, by), "", "the search's winner"]]
    rows += [
        [str(one["trial"]), *_both(one, by), _difference(one), f"trial {first['trial']} is {_VERDICTS[one['verdict']]}"]
        for one in others
    ]
    marked = frozenset((row, 5) for row, one in enumerate(others, 1) if one["verdict"] != "not told apart")
    together = f" The {len(others)} intervals hold together with 95%." if len(others) > 1 else ""
    won = f"trial {held['winner']} is the winner"
    original = f"The unedited model's perplexity on this text is {_value(held['original'], 'perplexity')}"
    note = (
        f"Differences are of trial {first['trial']} less the other, window by window, {_OF_WHAT[by]}.{together} "
        f"Where one holds 0, the two are not told apart; {won}. {original}."
    )
    head = ["trial", in_words(by), f"{in_words(by)}, held out", "95% interval", "difference", "which says"]
    caption = f"The best trials on {int(first['unseen']['tokens']):,} tokens that the search did not see"
    if not others:
        return Table(caption, head[:4], [rows[0][:4]], f"{original}.")
    return Table(caption, head, rows, note, left=frozenset({5}), marked=marked)


def _healed(healing: dict[str, Any]) -> Table:
    """The candidates before and after they were trained briefly."""
    shown = [(by, when) for by in ("divergence", "perplexity") for when in ("before", "after")]
    rows = [[str(one["trial"]), *(_value(one[when], by) for by, when in shown)] for one in healing["candidates"]]
    head = ["trial", "divergence", "healed", "perplexity", "healed"]
    marked = frozenset((row, 0) for row, one in enumerate(healing["candidates"]) if one["trial"] == healing["winner"])
    note = ". ".join(healing["sentences"]) + ". Numbers are of held-out text; the winner's are marked."
    return Table("The best trials before and after healing", head, rows, note, marked=marked)


_OF_WHAT = dict.fromkeys(("divergence", "perplexity"), "in nats per token")
_OF_WHAT[DRAFT_TIME] = "in parts of the time of a token without drafts"
_VERDICTS = {"better": "better", "worse": "worse", "not told apart": "not told apart from it"}


def _both(one: dict[str, Any], by: str) -> list[str]:
    unseen = one["unseen"]
    known = interval(unseen.get(f"{by}_low"), unseen.get(f"{by}_high"))
    return [_value(one["seen"], by), _value(unseen, by), known]


def _value(values: dict[str, Any], by: str) -> str:
    return number(float("nan") if values[by] is None else float(values[by]))


def _difference(one: dict[str, Any]) -> str:
    if one["low"] is None or one["high"] is None:
        return f"{number(one['difference'], 3)} (no interval)"
    return f"{number(one['difference'], 3)} ({interval(one['low'], one['high'], 3)})"


def _best_trials(trials: TrialTable) -> Table:
    """The best trials, or along a cost the best of every level, on the text of the search."""
    rows = trials.best_of_levels if trials.has_levels else trials.ranked[:_SHOWN]
    columns = list(trials.table.columns)
    costs = columns[columns.index("edits") + 1 : columns.index("divergence")]  # what programs cost
    if trials.by == DRAFT_TIME:
        costs += columns[columns.index(DRAFT_TIME) : columns.index("program")]
        costs += [name for name in columns if name.endswith("_acceptance")]
    cells = []
    for row in rows:
        trial = trials.table.iloc[row]
        cells.append(
            [str(int(trial["trial"])), trials.short_edits(row), trials.sources[row],
             *(cost(trial[name]) for name in costs), number(trial["perplexity"]),
             *with_intervals(trial, ["divergence"])]
        )  # fmt: skip
    head = [
        "trial",
        "edits",
        "from",
        *map(in_words, costs),
        "perplexity",
        *interval_heads(trials.table, ["divergence"]),
    ]
    what = "The best trial of every level" if trials.has_levels else f"The best {len(rows)}"
    caption = f"{what} of {plural(len(trials), 'trial')}, on the text of the search"
    note = "" if rows else "No trial is within the budget."
    return Table(caption, head, cells, note, left=frozenset({1, 2}))


def _front_table(front: pd.DataFrame, trials: TrialTable) -> Table:
    names, places = objectives_of(front), {int(trial): row for row, trial in enumerate(trials.table["trial"])}
    rows = [
        [f"{row['point']:g}", *(cost(row[name]) for name in names), f"{row['trial']:g}",
         trials.short_edits(places[int(row["trial"])])]
        for _, row in front.iterrows()
    ]  # fmt: skip
    caption = f"The front: {plural(len(front), 'program')}"
    kept = [] if "within" not in front else [row for row, flag in enumerate(front["within"]) if str(flag) == "True"]
    marked = frozenset((row, 0) for row in kept) if len(kept) < len(front) else frozenset()
    note = "Each has a recipe in the folder front." + (" Those that keep the budget are marked." if marked else "")
    return Table(caption, ["point", *names, "trial", "edits"], rows, note, frozenset({len(names) + 2}), marked=marked)


def _layers_touched(trials: TrialTable, layers: int) -> Map:
    """Which layers the good trials change: a strip for each space."""
    values = trials.shares(layers)
    every = [trials.touched(space, layers, range(len(trials))) for space in values.index]
    down, across = np.repeat(values.index, layers), [*range(layers)] * len(values)
    shares = pd.DataFrame({"good": values.to_numpy().ravel(), "all": np.ravel(every)})
    title = "Which layers the good trials change"
    of_each = "of each level " if trials.has_levels else ""
    caption = (
        f"Share of the best tenth of trials {of_each}({len(trials.good)} of {len(trials)}) "
        "that have an edit of this space on the layer."
    )
    fields = {"good": "of the good trials", "all": "of all trials"}
    cells = map_cells(values, down, across, shares, fields, "{row}, layer {column}")
    scale_ = Normalize(0, 1)
    legend = Legend(legend_figure(scale_), "Colours: share of the good trials")
    table = cell_table(f"{title}: shares", "space", values)
    return Map(map_figure(values, scale_, ("layer", ""), flat=WIDE), title, caption, cells, table, legend, wide=True)


def _what_goes_with_edits(trials: TrialTable, terms: pd.DataFrame) -> Iterator[Block]:
    effects = trials.effects()[:_SHOWN]
    if not effects:
        return
    alone = {} if terms.empty else dict(zip(terms["edit"], terms["divergence"], strict=True))
    rows = [
        [str(one.edit), str(one.trials), number(alone.get(str(one.edit), float("nan"))), number(one.ratio, 3),
         interval(one.low, one.high, 3)]
        for one in effects
    ]  # fmt: skip
    of_level = " of the same level" if trials.has_levels else ""
    note = (
        f"The ratio is of geometric means of {trials.by}: of trials with the edit to those{of_level} without, with the "
        "95% interval of Welch's t for each row by itself; shaded where it excludes 1. Trials are those that the "
        "search chose to run, so that this is what goes with an edit, not what it does."
    )
    head = ["edit", "trials with it", "divergence alone", "with it / without", "95% interval"]
    marked = frozenset((row, 3) for row, one in enumerate(effects) if one.excludes_one)
    yield Table(f"Importance: what goes with single edits among {len(trials)} trials", head, rows, note, marked=marked)


def _taken(using: Sequence[dict[str, Any]]) -> Table:
    """What the search did not measure itself."""
    counts = ("edits", "choices", "trials", "foreseen")
    rows = [
        [one["pass"], Path(one["folder"]).name, "the search's" if one["same_text"] else "another",
         *(str(one[name]) for name in counts)]
        for one in using
    ]  # fmt: skip
    note = (
        "Single edits and trials of the passes were not measured again; choices of several edits taught the "
        "regression; foreseen edits were measured where they looked best by the pass, and estimated elsewhere."
    )
    head = ["pass", "folder", "its text", "single edits", "choices", "trials", "foreseen"]
    return Table("What was taken from passes", head, rows, note, left=frozenset({0, 1, 2}))


def _findings(run: Run[SearchRun]) -> Iterator[Finding]:
    best = run.record.get("best")
    if run.found.is_earlier or not best:
        return
    trials, held = run.found.trial_table, run.record.get("held_out")
    texts = [_what_won(run, trials, best, held)]
    figure, label = _value(best, "perplexity"), f"perplexity of the best of {plural(len(trials), 'trial')}"
    if held:
        winner = _finalist(run, held)
        figure, label = _value(winner["unseen"], "perplexity"), "perplexity of the search's winner, held-out text"
        texts.append(_told_apart(held))
    if run.record.get("work"):
        texts.append(f"Single edits and trials ran {run.record['work']['sentence']}.")
    yield Finding("Search", " ".join(filter(None, texts)), figure, label)
    if held and held["overturned"]:
        yield Finding("The search is overturned", held["sentences"][-1] + ".")
    if run.record.get("draft"):
        yield Finding("As a draft", f"{'; '.join(run.record['draft']['sentences'])}.")
    if run.record.get("healing"):
        yield Finding("Healing", run.record["healing"]["sentences"][-1] + ".")
    knees = run.record.get("knees") or []
    if knees:
        title = "How deep it really is" if "depth" in run.found.by_cost else "Where quality ends"
        yield Finding(title, f"By {'; '.join(knees)}.")


def _what_won(run: Run[SearchRun], trials: TrialTable, best: dict[str, Any], held: dict[str, Any] | None) -> str:
    rows = trials.table[trials.table["trial"] == best["trial"]]
    if rows.empty:
        raise ValueError(f"{run.folder / 'trials.csv'} has no trial {best['trial']}, which its record calls the best")
    trial, why = rows.iloc[0], best["why"]
    edits = first_few((trial["edits"] or "no edits").split("; "), _EDITS_NAMED)
    said = (
        f"Of {plural(len(trials), 'trial')} the winner is trial {best['trial']} ({why[:1].lower() + why[1:]}), "
        f"at depth {trial['depth']:g}: {edits}. Its divergence is {known(best, 'divergence')} on the text of the search"
    )
    original = run.record.get("original") if held is None else held["original"]
    against = "" if original is None else f" and the original's {_value(original, 'perplexity')}"
    if held is None:
        return f"{said}, its perplexity {_value(best, 'perplexity')}{against}."
    unseen = _finalist(run, held)["unseen"]
    said += f" and {known(unseen, 'divergence')} on held-out text"
    return f"{said}, where its perplexity is {_value(unseen, 'perplexity')}{against}."


def _finalist(run: Run[SearchRun], held: dict[str, Any]) -> dict[str, Any]:
    """The winner on held-out text, as it is before any healing."""
    chosen = run.record.get("healing", held)["winner"]
    found: dict[str, Any] = next(one for one in [held["searched"], *held["runners_up"]] if one["trial"] == chosen)
    return found


def _told_apart(held: dict[str, Any]) -> str:
    """What held-out text says of the search's winner and the runners-up; better only where an interval excludes 0."""
    verdicts = [one["verdict"] for one in held["runners_up"]]
    if not verdicts or held["overturned"]:
        return ""
    better, alike = verdicts.count("better"), verdicts.count("not told apart")
    first = held["searched"]["trial"]
    if not better:
        return f"On held-out text trial {first} is not told apart from {_of(alike, verdicts)}."
    rest = f", and not told apart from {alike}" if alike else ""
    return f"On held-out text trial {first} is better than {_of(better, verdicts)}{rest}."


def _of(count: int, verdicts: Sequence[str]) -> str:
    if len(verdicts) == 1:
        return "the runner-up"
    return f"any of the {count} runners-up" if count == len(verdicts) else f"{count} of {len(verdicts)} runners-up"


SEARCH = Kind(
    SearchRun,
    "Search",
    _show,
    _findings,
    without="No search: whether scattered edits do better than one stretch is not known (surgeon search).",
)
