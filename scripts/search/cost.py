"""What a trial of a search costs: sublayers run, and time, with each of the things that make it cheap.

    python scripts/search/cost.py [MODEL] [--depth 12] [--trials 40] [--from FOLDER] [--threads N]

The same trials are measured in four ways, each with what the ones before it have: every program by itself on all
windows ("naive"); programs of a round together, so that what they begin with in common runs once ("shared"); going on
from states that earlier rounds left ("kept"); stopped when hopelessly worse than the best so far ("raced"). A sublayer
on half of the windows counts one half. The trials are those of a search's trials.csv, or else pairs that bring the
model down to a depth: half of the trials drawn by what each pair does alone, then rounds in which single pairs of the
best so far are moved. Two trials go ahead, so that all others can be raced. Numbers must agree between the ways:
exactly, but for programs that were stopped.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.search.drawn import drawn, mixture_of, moved, opened
from surgeon.analysis.subject import Subject
from surgeon.language.program import Program
from surgeon.quality.references import TextReferences
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.mixture import Mixture
from surgeon.searches.trial import MeasuredProgram

AHEAD = 2  # trials of the first round
Rounds = list[list[Program]]
Found = dict[Program, MeasuredProgram]


@dataclass(frozen=True)
class Way:
    """One line of the table."""

    name: str
    sublayers: float
    seconds: float
    processor: float
    stopped: int


class Cost:
    """The same rounds of programs, measured in different ways."""

    def __init__(self, subject: Subject, singles: list[Program], rounds: Rounds) -> None:
        self.subject, self.singles, self.rounds = subject, singles, rounds
        self.trials = sum(map(len, rounds))
        fresh = self.evaluator(0)
        fresh.measure([fresh.dense])
        self.references: TextReferences = fresh.references
        self.exact: Found = {}

    def evaluator(self, kept: int | None) -> Evaluator:
        self.ran = 0.0
        return Evaluator(self.subject.model, self.subject.windows, ran=self.count, kept=kept)

    def count(self, amount: float) -> None:
        self.ran += amount

    def way(self, name: str, together: bool, kept: int | None, raced: bool) -> Way:
        evaluator = self.evaluator(kept)
        evaluator.references = self.references
        if together:
            evaluator.measure(self.singles)  # a search does so first, in all ways
        found: Found = {}
        self.ran, began, worked = 0.0, time.perf_counter(), time.process_time()
        for programs in self.rounds:
            best = min(found.values(), key=lambda one: one.divergence) if found and raced else None
            for batch in [programs] if together else [[program] for program in programs]:
                found |= evaluator.measure(batch, best)
        seconds, processor = time.perf_counter() - began, time.process_time() - worked
        self.check(name, found)
        return Way(name, self.ran, seconds, processor, sum(not one.whole for one in found.values()))

    def check(self, name: str, found: Found) -> None:
        self.exact = self.exact or found
        for program, one in found.items():
            if one != self.exact[program] and one.whole:
                raise SystemExit(f"{name}: {program} has another divergence ({one.divergence})")
        best, known = (min(one.divergence for one in each.values() if one.whole) for each in (found, self.exact))
        if best != known:
            raise SystemExit(f"{name}: the best program was stopped ({best} instead of {known})")


def rounds_of(mixture: Mixture, evaluator: Evaluator, edits: int, trials: int, together: int) -> Rounds:
    """Half of the trials in two rounds, then moves of the best so far, some at once."""
    choices = dict(list(drawn(mixture, evaluator, edits, 2 * trials, seed=0).items())[: trials // 2])
    rounds, dice = [list(choices)[:AHEAD], list(choices)[AHEAD:]], random.Random(0)
    found = evaluator.measure(choices)
    while len(choices) < trials:
        best_first = sorted(found, key=lambda program: found[program].divergence)
        near = (choice for program in best_first for choice in moved(mixture, choices[program], dice))
        untried = ((mixture.program(choice), choice) for choice in near)
        fresh = dict(islice(((p, c) for p, c in untried if p not in choices), min(together, trials - len(choices))))
        if not fresh:
            break
        choices |= fresh
        found |= evaluator.measure(fresh)
        rounds.append(list(fresh))
    return rounds


def rounds_from(folder: Path, together: int) -> Rounds:
    """The trials of a search, half of them in two rounds."""
    programs = list(dict.fromkeys(map(Program.parse, pd.read_csv(folder / "trials.csv")["program"])))
    half = len(programs) // 2
    return [
        programs[:AHEAD],
        programs[AHEAD:half],
        *(programs[i : i + together] for i in range(half, len(programs), together)),
    ]


def table_of(title: str, ways: list[Way], trials: int) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("way", "sublayers", "of naive", "stopped", "seconds", "on CPU", "of naive"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    naive = ways[0]
    for way in ways:
        sublayers = f"{way.sublayers / trials:.1f}", f"{way.sublayers / naive.sublayers:.1%}"
        processor = f"{way.processor / trials:.2f}", f"{way.processor / naive.processor:.1%}"
        seconds = f"{way.seconds / trials:.2f}", *processor
        table.add_row(way.name, *sublayers, str(way.stopped), *seconds)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--together", type=int, default=4, help="trials of a round after the first")
    parser.add_argument("--from", dest="folder", type=Path, help="a search's output folder: its trials")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    subject = opened(given.model, given.data, given.tokens, given.threads)
    mixture = mixture_of(subject, "pair")
    singles = [mixture.program((edit,)) for edit in mixture.edits]
    if given.folder is not None:
        rounds = rounds_from(given.folder, given.together)
    else:
        edits = subject.opened.num_layers - given.depth
        evaluator = Evaluator(subject.model, subject.windows)
        rounds = rounds_of(mixture, evaluator, edits, given.trials, given.together)
    cost = Cost(subject, singles, rounds)
    ways = [
        cost.way("naive", together=False, kept=0, raced=False),
        cost.way("shared", together=True, kept=0, raced=False),
        cost.way("+ kept", together=True, kept=None, raced=False),
        cost.way("+ raced", together=True, kept=None, raced=True),
    ]
    text = subject.windows
    title = (
        f"{given.model}: {cost.trials} trials in {len(rounds)} rounds, {len(text.ids)} windows of "
        f"{text.ids.shape[1]} tokens; a trial costs"
    )
    Console(width=80).print(table_of(title, ways, cost.trials))


if __name__ == "__main__":
    main()
