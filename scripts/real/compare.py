"""The comparison that no paper printed: each method on one real model, at the same predicted speeds and sizes.

    python scripts/real/compare.py MODEL -o FOLDER --text NAME=TEXT ... [--scan FOLDER] [--ranks 3]
        [--speedups 1.1,1.25,1.5] [--methods NAME,...] [--goals NAME,...] [--search-tokens N] [--trials N]
        [--tokens N] [--steps N] [--tasks FILE,... --rows N] [--minutes N]

Every method is a space of `surgeon search`, and finds its own best program for every goal: a speed of one text on
H100s (as predicted) with NVLink, the same behind a link of 1 ms, and the size of what is stored. What a method cannot
reach is a row that says so. Each program is measured on every text (perplexity, divergence, acceptance as a draft) and
on tasks; then it is healed towards the original's predictions, all with the same tokens, and measured again.

A text is searched on in its first quarter, judged in its second, healed on in the rest; the first text alone is
searched on. "demo" is judged, and healed on by demo:train. All that is measured goes into FOLDER/compare.csv, a number
a row; what is there already is not measured again, so that the same command goes on, and one with more methods, goals
or tasks adds to it (docs/measured/real.csv, copied there, is such a beginning). scripts/real/page.py makes the page
and the figure of it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import surgeon
from scripts.commands import add_defaults, make_parser
from surgeon.findings.tasks import scores
from surgeon.processes.files import write_table, write_text
from surgeon.quality.sources import DEMO
from surgeon.quality.summary import Quality
from surgeon.training.settings import Distillation, TrainSettings

HARDWARE = "h100-sxm"
METHODS = {  # and their spaces, for speed and for size
    "LP": "pair",
    "ladder": "ladder",
    "attention beside MLP": "fuse",
    "tracks": "tracks",
    "drops": "drop",
    "repeats": "repeat",
    "low rank": "rank",
    "width": "width",
    "mixture": "pair,ladder,fuse,drop",
}
SMALLER = {"mixture": "drop,rank,width", "repeats": "drop:layers,repeat"}
KEYS = ["goal", "method", "stage", "on", "metric"]
COLUMNS = [*KEYS, "value", "low", "high", "count", "reached", "healed_on", "program"]
DENSE = "dense"
NOT = "out of reach"
MARK = "<|endoftext|>"  # between the documents of some texts, which is no token of every model


@dataclass(frozen=True)
class Goal:
    """What a program has to reach: so much faster, or so much smaller.

    Attributes:
        place: where it is to be faster; "size" where it is to be smaller.
    """

    place: str
    times: float

    @property
    def name(self) -> str:
        return f"{self.times:g} {self.place}"

    def budget(self, method: str) -> list[str]:
        if self.place == "size":
            deep = ["depth>=1x"] if method == "repeats" else []  # else leaving layers out would be all
            return [f"params={1 / self.times:.4f}x", *deep]
        return [f"speedup>={self.times:g}@{HARDWARE}"]

    @property
    def link_delay(self) -> str | None:
        return "1ms" if self.place == "1 ms link" else None

    def space(self, method: str) -> str:
        if self.place == "size":
            return SMALLER.get(method, METHODS[method])
        return METHODS[method]


PLACES = ("1 ms link", "NVLink", "size")


@dataclass
class Rows:
    """What has been measured, in a file that is whole after every row."""

    path: Path
    table: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=COLUMNS))

    def __post_init__(self) -> None:
        if self.path.is_file():
            self.table = pd.read_csv(self.path, keep_default_na=False, na_values=["nan"])

    def has(self, goal: str, method: str, stage: str, on: str) -> bool:
        rows = self.table
        known = (
            (rows["goal"] == goal)
            & (rows["method"] == method)
            & (rows["stage"] == stage)
            & (rows["on"] == on)
        )
        return bool(known.any())

    def of_program(self, program: str, stage: str, on: str) -> list[dict[str, Any]]:
        """Rows of the same program, which another goal or method has found."""
        rows = self.table
        same = rows[(rows["program"] == program) & (rows["stage"] == stage) & (rows["on"] == on)]
        first = same.drop_duplicates("metric")
        return [{str(key): value for key, value in row.items()} for row in first.to_dict("records")]

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        added = pd.DataFrame([*rows], columns=COLUMNS)
        self.table = added if self.table.empty else pd.concat([self.table, added], ignore_index=True)
        write_table(self.path, self.table)


@dataclass(frozen=True)
class Texts:
    """The parts of the texts: to search on, to judge by (by name), and to heal on."""

    searched: str
    judged: dict[str, str]
    healed: dict[str, float]

    @classmethod
    def of(cls, given: Mapping[str, str], folder: Path) -> Texts:
        """Cut files into a quarter to search on, one to judge by, and the rest to heal on."""
        judged = {}
        healed = {}
        searched = ""
        for name, text in given.items():
            if text == DEMO:
                judged[name] = DEMO
                healed["demo:train"] = 1.0
                searched = searched or "demo:train"
                continue
            whole = Path(text).read_text(encoding="utf-8").replace(MARK, "\n")
            cut = [whole.find("\n", len(whole) * quarter // 4) + 1 for quarter in (1, 2)]
            parts = {"search": whole[: cut[0]], "judge": whole[cut[0] : cut[1]], "heal": whole[cut[1] :]}
            for use, part in parts.items():
                path = folder / "texts" / f"{name}-{use}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.is_file():
                    write_text(path, part)
            judged[name] = str(folder / "texts" / f"{name}-judge.txt")
            healed[str(folder / "texts" / f"{name}-heal.txt")] = 1.0
            searched = searched or str(folder / "texts" / f"{name}-search.txt")
        return cls(searched, judged, healed)


class Comparison:
    """One run of the script."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = Path(options.output)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.texts = Texts.of(dict(one.split("=", 1) for one in options.text), self.folder)
        self.rows = Rows(self.folder / "compare.csv")
        self.end = time.monotonic() + 60 * options.minutes
        self.model = surgeon.open(options.model)

    @property
    def judges(self) -> list[str]:
        """Names of the texts and tasks that programs are judged by."""
        return [*self.texts.judged, *map(task_name, self.options.tasks)]

    def run(self) -> None:
        self.measure({"goal": DENSE, "method": DENSE, "stage": "edited", "reached": 1.0}, self.model)
        goals = [Goal(place, times) for times in self.options.speedups for place in PLACES]
        for goal in goals:
            for method in self.options.methods:
                if goal.name in self.options.goals or not self.options.goals:
                    self.compare(goal, method)
                if time.monotonic() > self.end:
                    print("the time is over; the same command goes on")
                    return

    def compare(self, goal: Goal, method: str) -> None:
        """Find the method's program for a goal; measure it, heal it, and measure it again."""
        wanted = [
            (stage, on)
            for stage in ("edited", "healed")[: 1 + bool(self.options.steps)]
            for on in self.judges
        ]
        known = all(self.rows.has(goal.name, method, *one) for one in wanted)
        if known or self.rows.has(goal.name, method, "edited", NOT):
            return
        folder = self.folder / "search" / f"{goal.name}-{method}".replace(" ", "-")
        try:
            found = surgeon.search(
                self.model,
                self.texts.searched,
                folder,
                self.options.trials,
                space=goal.space(method),
                budget=goal.budget(method),
                ranks=self.options.ranks,
                link_delay=goal.link_delay,
                **({} if goal.place == "size" else {"prompt": 512, "new": 128}),
                tokens=self.options.search_tokens,
                window=256,
                holdout=0,
                using=self.options.scan or (),
            )
        except ValueError as error:
            if "out of reach" not in str(error) and "no edits of" not in str(error):
                raise
            self.rows.add([{"goal": goal.name, "method": method, "stage": "edited", "on": NOT}])
            print(f"{goal.name}, {method}: {error}", flush=True)
            return
        prices = found.trials.set_index("trial").loc[found.record["best"]["trial"]]
        cost = next(name for name in found.trials.columns if name.startswith(("speedup", "params")))
        program = str(found.program)
        about = {"goal": goal.name, "method": method, "program": program, "reached": float(prices[cost])}
        self.measure(about | {"stage": "edited"}, found.recipe)
        if self.options.steps:
            self.heal(about | {"stage": "healed"}, found.recipe)

    def heal(self, about: Mapping[str, Any], recipe: surgeon.Recipe) -> None:
        if all(self.rows.of_program(about["program"], "healed", on) for on in self.judges):
            self.measure(about, recipe)
            return
        target = self.folder / "healed"
        settings = TrainSettings(
            scope="edited",
            distillation=Distillation(),
            steps=self.options.steps,
            batch=4,
            learning_rate=self.options.learning_rate,
            evaluate_every=self.options.steps,
            save_every=self.options.steps,
        )
        for folder in (target, Path(f"{target}.run")):
            shutil.rmtree(folder, ignore_errors=True)
        surgeon.heal(
            recipe,
            self.texts.healed,
            target,
            window=256,
            eval_tokens=512,
            settings=settings,
            dtype="float32",
        )
        self.measure(about | {"healed_on": self.options.steps * 4 * 256}, target)

    def measure(self, about: Mapping[str, Any], what: Any) -> None:
        """Measure on every text and task that has no row yet."""
        key = (about["goal"], about["method"], about["stage"])
        for on in self.judges:
            if self.rows.has(*key, on):
                continue
            known = self.rows.of_program(about.get("program", ""), about["stage"], on)
            if not known:
                known = [*self.judged(what, about["stage"], on)]
            self.rows.add({**one, **about, "on": on} for one in known)
            values = ", ".join(f"{row['metric']} {row['value']:.4g}" for row in known)
            print(f"{', '.join(key)}, on {on}: {values}", flush=True)

    def judged(self, what: Any, stage: str, on: str) -> Iterable[dict[str, Any]]:
        """What a model comes to on one text, or in one task."""
        if on in self.texts.judged:
            against = self.model if stage == "healed" else None
            tokens = self.options.tokens
            text = self.texts.judged[on]
            return numbers(surgeon.evaluate(what, text, against=against, tokens=tokens, window=256).text)
        task = next(one for one in self.options.tasks if task_name(one) == on)
        return accuracies(surgeon.evaluate(what, tasks=[task], limit=self.options.rows).tasks)


def numbers(found: Quality) -> Iterable[dict[str, Any]]:
    """A row for each number of a text's quality."""
    for metric in ("perplexity", "divergence", "greedy_acceptance"):
        if found.knows(metric):
            ends = [getattr(found, f"{metric}_{end}", float("nan")) for end in ("low", "high")]
            yield {
                "metric": metric,
                "value": getattr(found, metric),
                "low": ends[0],
                "high": ends[1],
                "count": found.tokens,
            }


def accuracies(results: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    """A row for each of a task's accuracies, with twice its standard error to each side."""
    for one in scores(results or {}):
        error = 1.96 * one.stderr if one.stderr is not None else float("nan")
        yield {
            "metric": one.metric,
            "value": one.value,
            "low": one.value - error,
            "high": one.value + error,
            "count": one.rows,
        }


def task_name(task: str) -> str:
    return Path(task).stem


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--text", action="append", metavar="NAME=TEXT", required=True)
    parser.add_argument(
        "--scan", help="a folder of surgeon scan on the same text: what it has is not measured again"
    )
    add_defaults(
        parser,
        ranks=(3, "which divide SmolLM2's nine heads evenly"),
        search_tokens=1024,
        trials=12,
        tokens=(1024, "of each text that is judged by"),
        steps=(0, "to heal each program for, of 1,024 tokens; 0: none"),
        learning_rate=3e-4,
        rows=(100, "of each task"),
    )
    parser.add_argument(
        "--speedups", type=lambda text: [*map(float, text.split(","))], default=[1.25, 1.1, 1.5]
    )
    parser.add_argument("--methods", type=lambda text: text.split(","), default=[*METHODS])
    parser.add_argument("--goals", type=lambda text: text.split(","), default=[])
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=[])
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no further program after so many"
    )
    transformers_logging.disable_progress_bar()
    Comparison(parser.parse_args()).run()


if __name__ == "__main__":
    main()
