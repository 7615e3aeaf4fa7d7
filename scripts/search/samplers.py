"""What samplers find with so many trials: ours, Optuna's, evolution, dynamic programming, and the optimum.

    python scripts/search/samplers.py demo=demo MODEL=TEXT ... -o runs/samplers

Every cell of the table is a model, spaces and a budget. In it stands the least divergence among trials within the
budget, after 30, 60 and 120 trials: of `surgeon search --sampler NAME`, of those that are random the mean over seeds.
"evolution" is EvoPress' (Sieberling et al. 2024): of one parent 16 offspring with one to three edits exchanged, run on
a quarter of the text, the best 4 on half of it, the best 2 on all; so many tokens count as one trial as the text has.
"additive" is the choice with the least sum of what edits do alone, by dynamic programming, as ZipLM (Kurtic et al.
2023) chooses.
"optimum" is the best of all choices where there are few enough to measure them. What programs come to is kept
in a file for all of them, so that the command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.search.given import to_search_cells, try_programs
from surgeon.analysis.subject import open_subject
from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.results.edit import ADDITIVE, Choice, Edit, as_choice
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.goals import PricedQuestion
from surgeon.searches.question import Question
from surgeon.searches.search import MIXTURE, Search
from surgeon.searches.terms import Terms, measure_terms
from surgeon.searches.trial import MeasuredProgram

AFTER = (30, 60, 120)
CELLS = (
    ("pair", "depth=0.7x"),
    ("drop", "params=0.8x"),
    ("pair,drop:layers", "depth=0.65x"),
    ("drop,rank", "params=0.7x"),
    ("pair,ladder,fuse", "speedup>=1.4@cpu-2"),
)
SAMPLERS = ("surgeon", "tpe", "nsga2", "random", "cmaes", "gp")
SLOW = {"gp": 60}  # trials, of one seed: a proposal takes seconds
FEW = 2000  # choices that are enumerated
OFFSPRING, SURVIVORS = 16, 4
KEPT = 256 << 20  # bytes of states


class KnownPrograms:
    """Measures programs as `Evaluator` does, each once and for all, in a file.

    Args:
        file: JSON lines: a model, a text, a program, its divergence by window.
    """

    def __init__(self, model: str, data: str, tokens: int, window: int, file: Path) -> None:
        self.subject = open_subject(model, data, tokens=tokens, window=window)
        self.evaluator = Evaluator(self.subject.model, self.subject.windows, kept=KEPT)
        self.file = file
        self.identity = f"{self.subject.opened.hash} {self.subject.windows.digest}"
        lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
        self.known: dict[str, list[float]] = {line[1]: line[2] for line in lines if line[0] == self.identity}

    @property
    def model(self) -> Model:
        return self.subject.opened

    @property
    def windows(self) -> int:
        return len(self.subject.windows.ids)

    @property
    def sublayers(self) -> float:
        return self.evaluator.sublayers

    def measure(self, programs: Iterable[Program], _: MeasuredProgram | None = None) -> dict[Program, MeasuredProgram]:
        """All on all of the text."""
        wanted = list(dict.fromkeys(programs))
        fresh = [program for program in wanted if str(program) not in self.known]
        if fresh:
            with self.file.open("a") as file:
                for program, found in self.evaluator.measure(fresh).items():
                    values = [float(f"{value:.9g}") for value in found.divergences]
                    self.known[str(program)] = values
                    file.write(json.dumps([self.identity, str(program), values]) + "\n")
        return {program: self._measured(self.known[str(program)]) for program in wanted}

    def divergence(self, program: Program, windows: int) -> float:
        """On the first windows, of a program that was measured."""
        return math.fsum(self.known[str(program)][:windows]) / windows

    def _measured(self, values: Sequence[float]) -> MeasuredProgram:
        mean = math.fsum(values) / len(values)
        return MeasuredProgram(math.nan, mean, math.nan, math.nan, 0, tuple(values), tuple(values))


@dataclass(frozen=True)
class Cell:
    """A question of a model."""

    known: KnownPrograms
    spaces: str
    budget: str

    def search(self, terms: Terms | None = None) -> Search:
        model = self.known.model
        budget = self.budget
        if budget.startswith("depth="):  # a share of the layers, in whole ones
            budget = f"depth={round(model.num_layers * float(budget[6:-1]))}"
        settings = Question(self.spaces, budget, link_delay="1ms", prompt=128, new=64)
        mixture = settings.mixture(model)
        dense = mixture.model.program
        question = PricedQuestion(settings, mixture, settings.priced(mixture), self.known.measure([dense])[dense])
        return Search(question, self.known, terms)  # type: ignore[arg-type]


def cells_of(given: argparse.Namespace) -> Iterator[Cell]:
    """What is asked of which models, as `to_search_cells` reads it."""
    warnings.simplefilter("ignore")
    given.output.mkdir(parents=True, exist_ok=True)
    for number in given.cells:
        for model, _, data in (text.partition("=") for text in given.models):
            known = KnownPrograms(model, data, given.tokens, given.window, given.output / "programs.jsonl")
            yield Cell(known, *CELLS[number])


def history(search: Search, sampler: str, seed: int, trials: int) -> list[float]:
    """The least divergence within the budget after each trial."""
    best, found = math.inf, []
    for trial in try_programs(search, trials, sampler, seed):
        best = min(best, trial.measured.divergence) if search.question.is_met(trial) else best
        found.append(best)
    return found + [best] * (trials - len(found))


class Evolution:
    """EvoPress' on choices of edits.

    Args:
        known: measures programs on all windows; what they do on the first ones counts as so much.
    """

    def __init__(self, search: Search, seed: int, known: KnownPrograms) -> None:
        self.search, self.dice, self.known, self.windows = search, random.Random(seed), known, known.windows
        self.mixture, self.meets = search.question.mixture, self._meets
        self.spent, self.best, self.after = 0.0, math.inf, [math.inf]

    def run(self, trials: int) -> list[float]:
        """The least divergence after each trial's worth of tokens."""
        parents = [self._completed(()) for _ in range(OFFSPRING)]
        parent = self._selected(parents)
        while len(self.after) <= trials:
            parent = self._selected([self._mutated(parent) for _ in range(OFFSPRING)], parent)
        return self.after[1 : trials + 1]

    def _selected(self, offspring: Sequence[Choice], parent: Choice | None = None) -> Choice:
        self.known.measure(map(self.mixture.program, offspring))
        quarter, half = max(1, self.windows // 4), max(1, self.windows // 2)
        few = sorted(dict.fromkeys(offspring), key=lambda each: self._value(each, quarter))[:SURVIVORS]
        last = sorted(few, key=lambda each: self._value(each, half))[: SURVIVORS // 2]
        return min([*([parent] if parent else []), *last], key=lambda each: self._value(each, self.windows))

    def _value(self, choice: Choice, windows: int) -> float:
        value = self.known.divergence(self.mixture.program(choice), windows)
        self.spent += windows / self.windows
        if windows == self.windows:
            self.best = min(self.best, value)
        self.after += [self.best] * (int(self.spent) - len(self.after) + 1)
        return value

    def _mutated(self, choice: Choice) -> Choice:
        kept = list(choice)
        for _ in range(min(self.dice.randint(1, 3), self.dice.randint(1, 3), len(kept))):
            kept.remove(self.dice.choice(kept))
        return self._completed(kept)

    def _completed(self, kept: Iterable[Edit]) -> Choice:
        """With random edits until the budget is kept, and without those that it then does not need."""
        chosen, edits = list(kept), [*self.mixture.edits]
        self.dice.shuffle(edits)
        for edit in edits:
            if self.meets(as_choice(chosen)):
                break
            if self.mixture.is_free(chosen, edit):
                chosen.append(edit)
        if not self.meets(as_choice(chosen)):
            return self._completed(())
        for edit in self.dice.sample(chosen, len(chosen)):
            rest = as_choice(other for other in chosen if other != edit)
            if rest and self.meets(rest):
                chosen.remove(edit)
        return as_choice(chosen)

    def _meets(self, choice: Choice) -> bool:
        return bool(choice) and not any(self.search.question.budget.shortfalls(self.mixture.program(choice)))


def optimum(search: Search, known: KnownPrograms) -> float:
    """The best of all choices; NaN where they are too many."""
    mixture, found = search.question.mixture, dict[Program, None]()
    for number, choice in enumerate(every_choice(search)):
        if number > 100 * FEW or len(found) > FEW:
            return math.nan
        program = mixture.program(choice)
        if not any(search.question.budget.shortfalls(program)):
            found[program] = None
    return min(measured.divergence for measured in known.measure(found).values())


def every_choice(search: Search, chosen: Choice = (), start: int = 0) -> Iterator[Choice]:
    mixture = search.question.mixture
    for place in range(start, len(mixture.edits)):
        if mixture.is_free(chosen, mixture.edits[place]):
            more = (*chosen, mixture.edits[place])
            yield more
            yield from every_choice(search, more, place + 1)


def rows_of(cell: Cell, samplers: Sequence[str], seeds: int) -> Iterator[Mapping[str, object]]:
    """One for each method, seed and number of trials."""
    search = cell.search()
    terms = measure_terms(cell.known.evaluator, search.terms_plan)
    named = {"model": cell.known.model.label, "space": cell.spaces, "budget": str(search.question.budget)}

    def rows(method: str, seed: int, found: Sequence[float], seconds: float) -> Iterator[Mapping[str, object]]:
        for after in AFTER:
            if after <= len(found):
                row = {"method": method, "seed": seed, "trials": after, "divergence": found[after - 1]}
                yield named | row | {"seconds": round(seconds, 1)}

    for name in samplers:
        for seed in range(1 if name in ("surgeon", *SLOW) else seeds):
            begun = time.monotonic()
            found = history(cell.search(terms), name, seed, SLOW.get(name, AFTER[-1]))
            yield from rows(name, seed, found, time.monotonic() - begun)
    for seed in range(seeds):
        evolved = Evolution(search, seed, cell.known).run(AFTER[-1])
        yield from rows("evolution", seed, evolved, 0.0)
    asking = cell.search(terms)
    first = asking.strands.get(MIXTURE, next(iter(asking.strands.values()))).first_round(3)
    choice = next((one.choice for one in first if one.source == ADDITIVE), None)
    if choice is not None:
        program = search.question.mixture.program(choice)
        alone = cell.known.measure([program])[program].divergence
        yield from rows("additive", 0, [alone] * AFTER[-1], 0.0)
    yield from rows("optimum", 0, [optimum(search, cell.known)] * AFTER[-1], 0.0)


def table_of(found: pd.DataFrame) -> str:
    """A line for each cell, in Markdown: ours after each number of trials, the others after the most."""
    cells = (
        found.groupby(["model", "space", "budget", "method", "trials"], sort=False)["divergence"].mean().reset_index()
    )
    methods = [name for name in cells["method"].unique() if name != "surgeon"]
    lines = ["| model, `--space`, `--budget` | surgeon " + " | ".join(["", *methods]) + " |"]
    lines += ["|:--|" + ":--|" * (1 + len(methods))]
    for (model, space, budget), rows in cells.groupby(["model", "space", "budget"], sort=False):
        values = {str(name): each.set_index("trials")["divergence"] for name, each in rows.groupby("method")}
        own = [values.get(name, pd.Series(dtype=float)) for name in ("surgeon", *methods)]
        texts = [" / ".join(_shown(each.get(after)) for after in AFTER) for each in own]
        lines.append(f"| {model}, `{space}`, `{budget}` | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else "none" if math.isinf(value) else f"{value:.4f}"


def main() -> None:
    parser = to_search_cells(__doc__, len(CELLS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    given = parser.parse_args()
    rows: list[Mapping[str, object]] = []
    for cell in cells_of(given):
        for row in rows_of(cell, given.samplers.split(","), given.seeds):
            print(*row.values(), flush=True)
            rows.append(row)
        pd.DataFrame(rows).to_csv(given.output / "samplers.csv", index=False)
    print(table_of(pd.DataFrame(rows)))


if __name__ == "__main__":
    main()
