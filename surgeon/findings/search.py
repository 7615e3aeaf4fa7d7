"""Search: its trials, single edits, its front, the layers that good trials change, the held-out winner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.colors import Normalize

from surgeon.findings.drawing import WIDE, Drawing, Legend, Map, Picture
from surgeon.findings.measured import winner_unseen
from surgeon.findings.program import program_figure
from surgeon.findings.result import Block, Code, Finding, Record, RunResult, Table, read_text, table_file
from surgeon.findings.trials import (
    BY,
    DRAFT_TIME,
    TrialTable,
    edit_chart,
    front_charts,
    history_chart,
    objectives_of,
    quality_chart,
)
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe, parse_recipe
from surgeon.words import (
    MOST_LAYERS,
    cost,
    first_few,
    in_words,
    interval,
    number,
    plural,
    value_with_interval,
    with_intervals,
)

RECIPE_FILE = "recipe.yaml"
_SHOWN = 10  # rows in a table
_EDITS_NAMED = 12


@dataclass(frozen=True, repr=False)
class SearchResult(RunResult):
    """The result of `search`.

    Attributes:
        trials: one row per trial, in the order they were asked for, as in `trials.csv`.
        terms: damage of each edit alone, as in `terms.csv`.
        front: the programs that no other is better than, as in `front.csv`; empty with one objective.
        quality: the least divergence at every cost along which the search went, of each space alone and of all
            together, as in `quality.csv`.
        recipe_text: the winner's recipe, with measurements in comments.
        question: the spaces on the model, the budget, the objectives; this and the following are of a search just made.
        winner: the best trial, with it and its runners-up on held-out text.
        curves: quality against each cost along which the search went.
    """

    COMMAND = "search"
    RECORD = "search.json"
    TITLE = "Search"
    WITHOUT = (
        "No search: whether scattered edits do better than one stretch is not known (surgeon search)."
    )

    trials: pd.DataFrame = table_file(
        "trials.csv",
        ("trial", "depth", "perplexity", "divergence", "level"),
        ("source", "edits", "whole", "within", "program"),
        missing="",
    )
    terms: pd.DataFrame = table_file(
        "terms.csv", ("divergence",), ("edit", "space"), ("first", "last"), optional=True, missing=""
    )
    front: pd.DataFrame = table_file(
        "front.csv",
        ("point", "trial", "divergence"),
        ("edits",),
        optional=True,
        may_be_empty=True,
        missing="",
    )
    quality: pd.DataFrame = table_file(
        "quality.csv", ("cost", "divergence"), ("along", "space", "edits"), optional=True, missing=""
    )
    recipe_text: str = ""
    question: Any = None
    winner: Any = None
    curves: Sequence[Any] = ()

    @classmethod
    def facts(cls, record: Record, file: Path) -> Record:  # noqa: ARG003
        recipe = file.parent / RECIPE_FILE
        return {"recipe_text": read_text(recipe)} if recipe.is_file() else {}

    @property
    def program(self) -> Program:
        return Program.parse(self.record["best"]["program"])

    @property
    def recipe(self) -> Recipe:
        return parse_recipe(self.recipe_text, RECIPE_FILE)

    @cached_property
    def trial_table(self) -> TrialTable:
        trials = self.trials
        objectives = str(self.record.get("objective") or BY[0]).split(",")
        if objectives[0].partition("@")[0] == "draft":  # those of all levels compare
            return TrialTable(trials.assign(level=math.nan), DRAFT_TIME)
        return TrialTable(trials, next((name for name in objectives if name in BY), BY[0]))

    def pictures(self) -> dict[str, Picture]:
        """`search`, every trial and the best so far; `quality-against-COST`; `front`; `layers`."""
        found = super().pictures()
        if len(self.front):
            found["front"] = Picture(list(front_charts(self.front, self.trial_table)))
        return found

    @property
    def by_cost(self) -> dict[str, pd.DataFrame]:
        if self.quality.empty:
            return {}
        return {str(along): rows for along, rows in self.quality.groupby("along", sort=False)}

    def section(self) -> Iterator[Block]:
        trials = self.trial_table
        held = self.record.get("held_out")
        if held and held["overturned"]:
            yield held["sentences"][-1] + "."
        charts = [
            history_chart(trials),
            *(quality_chart(along, rows) for along, rows in self.by_cost.items()),
        ]
        if len(self.front):
            by_divergence = objectives_of(self.front)[0] == "divergence"
            charts += front_charts(self.front, trials, without=self.by_cost if by_divergence else ())
        yield Picture(charts)
        best = self.record.get("best")
        if best and self.record.get("num_layers") and self.record.get("steps_per_layer"):
            title = f"The winner, trial {best['trial']}"
            program = Program.parse(best["program"])
            shape = int(self.record["num_layers"]), int(self.record["steps_per_layer"])
            yield Drawing(
                program_figure(program, *shape), title, f"{best['why']}.", f"{title}: {program}"
            )
        if self.recipe_text:
            yield Code("The recipe that was found (recipe.yaml)", self.recipe_text)
        if held:
            yield _on_held_out_text(held)
        if self.record.get("healing"):
            healing = self.record["healing"]
            shown = [(by, when) for by in ("divergence", "perplexity") for when in ("before", "after")]
            healed = [
                [str(one["trial"]), *(_value(one[when], by) for by, when in shown)]
                for one in healing["candidates"]
            ]
            heads = ["trial", "divergence", "healed", "perplexity", "healed"]
            marked = [
                (row, 0)
                for row, one in enumerate(healing["candidates"])
                if one["trial"] == healing["winner"]
            ]
            note = (
                ". ".join(healing["sentences"])
                + ". Numbers are of held-out text; the winner's are marked."
            )
            yield Table("The best trials before and after healing", heads, healed, note, marked=marked)
        if len(self.front):
            yield _front_table(self.front, trials)
        else:
            yield _best_trials(trials)
        if any(trials.choices):
            reached = max(edit.stop for choice in trials.choices for edit in choice)
            yield _layers_touched(trials, max(int(self.record["num_layers"]), reached))
        if len(self.terms):
            of_spaces = self.terms.groupby("space", sort=False)
            charts = [edit_chart(str(space), own, self.terms) for space, own in of_spaces]
            yield Picture(charts, heading="What single edits do")

    def summary(self) -> Iterator[Finding]:
        best = self.record.get("best")
        if not best:
            return
        trials = self.trial_table
        held = self.record.get("held_out")
        texts = [self._what_won(best, held)]
        figure = _value(best, "perplexity")
        label = f"perplexity of the best of {plural(len(trials), 'trial')}"
        if held:
            figure = _value(winner_unseen(self.record), "perplexity")
            label = "perplexity of the search's winner, held-out text"
            if held["sentences"][1:] and not held["overturned"]:
                texts.append(f"On held-out text {'; '.join(held['sentences'][1:])}.")
        if self.record.get("work"):
            texts.append(f"Single edits and trials ran {self.record['work']['sentence']}.")
        yield Finding("Search", " ".join(filter(None, texts)), figure, label)
        if held and held["overturned"]:
            yield Finding("The search is overturned", held["sentences"][-1] + ".")
        if self.record.get("draft"):
            yield Finding("As a draft", f"{'; '.join(self.record['draft']['sentences'])}.")
        if self.record.get("healing"):
            yield Finding("Healing", self.record["healing"]["sentences"][-1] + ".")
        knees = self.record.get("knees") or []
        if knees:
            title = "Where quality ends"
            if "depth" in self.by_cost:
                title = "How deep it really is"
            yield Finding(title, f"By {'; '.join(knees)}.")

    def _what_won(self, best: Record, held: Record | None) -> str:
        trials = self.trial_table
        rows = trials.table[trials.table["trial"] == best["trial"]]
        if rows.empty:
            raise ValueError(
                f"{self.files[0].parent / 'trials.csv'} has no trial {best['trial']}, which its record calls the best"
            )
        trial = rows.iloc[0]
        why = best["why"]
        edits = first_few((trial["edits"] or "no edits").split("; "), _EDITS_NAMED)
        said = (
            f"Of {plural(len(trials), 'trial')} the winner is trial {best['trial']} ({why[:1].lower() + why[1:]}), "
            f"at depth {trial['depth']:g}: {edits}. Its divergence is {value_with_interval(best, 'divergence')} on "
            "the text of the search"
        )
        if held is None:
            original = self.record.get("original") or {"perplexity": None}
            return f"{said}, where the unedited model's perplexity is {_value(original, 'perplexity')}."
        unseen = winner_unseen(self.record)
        return f"{said} and {value_with_interval(unseen, 'divergence')} on held-out text."


def _on_held_out_text(held: Record) -> Table:
    by = held["by"]
    first = held["searched"]
    others = held["runners_up"]
    rows = [[str(first["trial"]), *_both(first, by), "", "the search's winner"]]
    for one in others:
        ends = interval(one["low"], one["high"], 3) or "no interval"
        verdict = one["verdict"].replace("apart", "apart from it")
        difference = f"{number(one['difference'], 3)} ({ends})"
        rows.append(
            [str(one["trial"]), *_both(one, by), difference, f"trial {first['trial']} is {verdict}"]
        )
    marked = [(row, 5) for row, one in enumerate(others, 1) if one["verdict"] != "not told apart"]
    of_what = "in nats per token"
    if by == DRAFT_TIME:
        of_what = "in parts of the time of a token without drafts"
    together = ""
    if len(others) > 1:
        together = f" The {len(others)} intervals hold together with 95%."
    won = f"trial {held['winner']} is the winner"
    original = (
        f"The unedited model's perplexity on this text is {_value(held['original'], 'perplexity')}"
    )
    note = (
        f"Differences are of trial {first['trial']} less the other, window by window, {of_what}.{together} "
        f"Where one holds 0, the two are not told apart; {won}. {original}."
    )
    head = [
        "trial",
        in_words(by),
        f"{in_words(by)}, held out",
        "95% interval",
        "difference",
        "which says",
    ]
    caption = f"The best trials on {int(first['unseen']['tokens']):,} tokens that the search did not see"
    if not others:
        return Table(caption, head[:4], [rows[0][:4]], f"{original}.")
    return Table(caption, head, rows, note, left=(5,), marked=marked)


def _both(one: Record, by: str) -> list[str]:
    unseen = one["unseen"]
    ends = interval(unseen.get(f"{by}_low"), unseen.get(f"{by}_high"))
    return [_value(one["seen"], by), _value(unseen, by), ends]


def _value(values: Record, by: str) -> str:
    return number(float("nan") if values[by] is None else float(values[by]))


def _best_trials(trials: TrialTable) -> Table:
    rows = trials.best_of_levels
    if not trials.has_levels:
        rows = trials.by_rank[:_SHOWN]
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
    head = ["trial", "edits", "from", *map(in_words, costs), "perplexity", "divergence"]
    if {"divergence_low", "divergence_high"} <= {*trials.table}:
        head.append("95% interval")
    what = "The best trial of every level"
    if not trials.has_levels:
        what = f"The best {len(rows)}"
    caption = f"{what} of {plural(len(trials), 'trial')}, on the text of the search"
    note = "No trial is within the budget."
    if rows:
        note = ""
    return Table(caption, head, cells, note, left=(1, 2))


def _front_table(front: pd.DataFrame, trials: TrialTable) -> Table:
    names = objectives_of(front)
    places = {int(trial): row for row, trial in enumerate(trials.table["trial"])}
    rows = [
        [f"{row['point']:g}", *(cost(row[name]) for name in names), f"{row['trial']:g}",
         trials.short_edits(places[int(row["trial"])])]
        for _, row in front.iterrows()
    ]  # fmt: skip
    caption = f"The front: {plural(len(front), 'program')}"
    marked = []
    if "within" in front:
        marked = [(row, 0) for row, flag in enumerate(front["within"]) if str(flag) == "True"]
    if len(marked) == len(front):  # which says nothing
        marked = []
    note = "Each has a recipe in the folder front." + (
        " Those that keep the budget are marked." if marked else ""
    )
    head = ["point", *names, "trial", "edits"]
    return Table(caption, head, rows, note, left=(len(names) + 2,), marked=marked)


def _layers_touched(trials: TrialTable, layers: int) -> Map:
    if layers > MOST_LAYERS:
        raise ValueError(f"edits of {layers} layers are more than any model has")
    shares = [
        pd.DataFrame(
            {
                "space": space,
                "layer": range(layers),
                "good": trials.count_touched(space, layers, trials.good),
                "all": trials.count_touched(space, layers, range(len(trials))),
            }
        )
        for space in trials.spaces()
    ]
    title = "Which layers the good trials change"
    of_each = ""
    if trials.has_levels:
        of_each = "of each level "
    caption = (
        f"Share of the best tenth of trials {of_each}({len(trials.good)} of {len(trials)}) "
        "that have an edit of this space on the layer."
    )
    fields = {"good": "share of the good trials", "all": "share of all trials"}
    legend = Legend(Normalize(0, 1), "Colours: share of the good trials")
    table = pd.concat(shares)
    return Map(title, table, "space", "layer", fields, legend, caption, "layers", flat=WIDE)
