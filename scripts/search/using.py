"""What a search runs with what passes have found at hand, and without; and how good the program is that it finds.

    python scripts/search/using.py [MODEL] [--data demo] [--tokens 2048] [--window 128] [--trials 60] [-o FOLDER]
    python scripts/search/using.py [MODEL] --orders

A scan of LP pairs and of ladders, and a spectrum, are made first, on the search's text. Then every question is searched
twice, with nothing and with the passes. Sublayers are those that single edits and trials of the search run, in passes
over all of the text; what the passes have run themselves is said above the table. Divergences are of the winner, on the
text of the search and on held-out text. Passes that are in FOLDER already are gone on with; searches are made anew.

With `--orders`, what it is worth that similarity and sensitivity, which measure no program, say which edits to measure:
of every kind of more than 8 edits the better half. "At random" measures a half that nothing speaks for, the mean of 3
seeds. Behind what single edits run stands what has run in all when the best program was found that any of the searches
has found, and how many of the searches found it; then the least divergence after so many trials.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import surgeon
from scripts.search.given import try_programs
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.known import Known, KnownPass, read_known
from surgeon.searches.mixture import Mixture
from surgeon.searches.search import Search

SLOW_LINK = {"link_delay": "1ms"}
ROWS: list[tuple[str, str, dict[str, Any]]] = [
    *(("pair", f"depth={depth}", {}) for depth in (14, 12, 10)),
    *(("ladder", f"speedup>={speedup}@cpu-2", SLOW_LINK) for speedup in (1.2, 1.4)),
    *(("rank", f"params={share}x", {}) for share in (0.9, 0.8)),
]
ORDERED = [*(row for row in ROWS if row[0] != "rank"), *(("drop", f"params={share}x", {}) for share in (0.9, 0.8))]
SEEDS = 3
AFTER = (8, 16, 30)  # trials
SAME = 1 + 1e-6  # times another divergence, within which rounding lies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--ranks", default="1/4,1/2", help="of the spectrum")
    parser.add_argument("--only", help="one space")
    parser.add_argument("--orders", action="store_true", help="what orders are worth")
    parser.add_argument("-o", dest="output", type=Path)
    given = parser.parse_args()
    if given.output:
        given.output.mkdir(parents=True, exist_ok=True)
    with nullcontext(given.output) if given.output else tempfile.TemporaryDirectory() as folder:
        (run_orders if given.orders else run)(given, Path(folder))


def run(given: argparse.Namespace, folder: Path) -> None:
    text: dict[str, Any] = {"data": given.data, "tokens": given.tokens, "window": given.window}
    rows = [row for row in ROWS if given.only in (None, row[0])]
    passes: dict[str, Any] = {}
    searches = Path(tempfile.mkdtemp(prefix="searches-", dir=folder))
    if any(space != "rank" for space, *_ in rows):
        scan = surgeon.scan(given.model, output=folder / "scan", operations=["lp", "ladder"], **text)
        print(f"the scan ran {scan.record['sublayers_run']} sublayers")
        passes |= dict.fromkeys(("pair", "ladder"), scan)
    if any(space == "rank" for space, *_ in rows):
        calibrated = {"ranks": given.ranks, "calibration_tokens": 8192}
        passes["rank"] = surgeon.spectrum(given.model, output=folder / "spectrum", **calibrated, **text)
    print("| space | budget | without | with | share | divergence | with | held out | with | taken |")
    print("|:--|:--|--:|--:|--:|--:|--:|--:|--:|:--|")
    for space, budget, more in rows:
        name = f"{space} {budget}".replace(">", "").replace("=", "")
        asked = {"space": space, "budget": budget, "trials": given.trials, **more, **text}
        found = [
            surgeon.search(given.model, output=searches / f"{name} {way}", using=using, **asked)
            for way, using in (("without", ()), ("with", passes[space]))
        ]
        ran = [one.record["sublayers_run"] for one in found]
        seen = [f"{one.record['best']['divergence']:.4f}" for one in found]
        unseen = [f"{one.record['held_out']['searched']['unseen']['divergence']:.4f}" for one in found]
        (taken,) = found[1].record["using"]
        parts = ", ".join(f"{taken[what]} {what}" for what in ("edits", "choices", "trials") if taken[what])
        cells = [space, f"`{budget}`", f"{ran[0]:.0f}", f"{ran[1]:.0f}", f"{ran[1] / ran[0]:.2f}", *seen, *unseen]
        print(f"| {' | '.join(cells)} | {parts} |", flush=True)


@dataclass(frozen=True)
class Course:
    """A search's course.

    Attributes:
        edits: sublayers that single edits ran.
        after: the least divergence within the budget, and the sublayers that had run, after each trial.
    """

    edits: float
    after: list[tuple[float, float]]

    def until(self, divergence: float) -> float:
        """How many sublayers had run when it had found as good a program; NaN if it has not."""
        return next((ran for least, ran in self.after if least <= divergence * SAME), math.nan)

    def least(self, trials: int) -> float:
        return self.after[:trials][-1][0]


def run_orders(given: argparse.Namespace, folder: Path) -> None:
    text: dict[str, Any] = {"data": given.data, "tokens": given.tokens, "window": given.window}
    surgeon.similarity(given.model, output=folder / "similarity", **text)
    surgeon.sensitivity(given.model, output=folder / "sensitivity", **text)
    after = " / ".join(map(str, AFTER))
    print(f"| space | budget | order by | edits | until the best | found by | divergence after {after} trials |")
    print("|:--|:--|:--|--:|--:|--:|:--|")
    for space, budget, more in ORDERED:
        if given.only not in (None, space):
            continue
        asked = {"space": space, "budget": budget, **more, **text}
        by_order = {name: [*courses] for name, courses in orders(given.model, folder, asked, given.trials)}
        every = [course for courses in by_order.values() for course in courses]
        best = min(course.least(given.trials) for course in every)
        for name, courses in by_order.items():
            until = [course.until(best) for course in courses]
            there = [one for one in until if not math.isnan(one)]
            cells = [space, f"`{budget}`", name, f"{np.mean([course.edits for course in courses]):.0f}"]
            cells += [f"{np.mean(there):.0f}" if there else "-", f"{len(there)} of {len(courses)}"]
            means = [np.mean([course.least(trials) for course in courses]) for trials in AFTER]
            print(f"| {' | '.join(cells)} | {' / '.join(f'{mean:.4f}' for mean in means)} |", flush=True)


def orders(model: str, folder: Path, asked: Mapping[str, Any], trials: int) -> Iterator[tuple[str, Iterator[Course]]]:
    """By nothing, by each pass, and at random."""
    problem = surgeon.SearchProblem(model, **asked)
    windows, mixture = problem.evaluator.windows, problem.question.mixture
    yield "nothing: all are measured", iter([course_of(problem, Known(), trials)])
    for name in ("similarity", "sensitivity"):
        known = read_known([folder / name], problem.opened, windows)
        if known.passes[0].foreseen(mixture):
            yield name, iter([course_of(problem, known, trials)])
    blind = [KnownPass("random", folder, missed=missed, removed=removed) for missed, removed in drawn(mixture)]
    yield "at random", (course_of(problem, Known((one,)), trials) for one in blind)


def drawn(mixture: Mixture) -> Iterator[tuple[dict[int, float], dict[tuple[str, int], float]]]:
    """Numbers that say nothing, of layers and of their parts, by seed."""
    layers = mixture.model.num_layers
    for seed in range(SEEDS):
        dice = random.Random(seed)
        missed = {layer: dice.random() for layer in range(layers)}
        yield missed, {(part, layer): dice.random() for part in ("", "attention", "mlp") for layer in range(layers)}


def course_of(problem: surgeon.SearchProblem, known: Known, trials: int) -> Course:
    """Of a search of a problem that begins with nothing but what is known."""
    evaluator = Evaluator(problem.evaluator.model, problem.evaluator.windows)
    evaluator.measure([evaluator.dense])
    evaluator.sublayers = 0.0
    search = Search(problem.question, evaluator, known=known)
    assert len(search.terms.divergence)
    edits, least, after = evaluator.sublayers, math.inf, list[tuple[float, float]]()
    ran: list[float] = []
    for place, trial in enumerate(try_programs(search, trials, tell=lambda _: ran.append(evaluator.sublayers))):
        if trial.measured.whole and search.question.is_met(trial):
            least = min(least, trial.measured.divergence)
        after.append((least, ran[place]))
    return Course(edits, after)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
