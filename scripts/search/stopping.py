"""Whether searches lose the optimum by what they leave out, and what that spares them.

    python scripts/search/stopping.py demo=demo MODEL=TEXT ... [--texts 2] [--tokens 2048] [--trials 60] [-o FILE.csv]

Two rules leave something out. A race stops a trial before all windows are run, when a paired test (Student's t, one
sided, `surgeon.searches.race`) says at one of the looks that it is worse than the best so far. And where a scan has
measured stretches of edits, choices that the regression predicts so many standard deviations above the best are not
tried at all, once there are 8 trials.

Of every question all choices that have no edit too many are measured on all of the text, so that the optimum is known;
questions with more than 2,000 of them are left out. Each is searched with both rules set so and so, on several texts,
one behind the other in the data. In a row: questions times texts; in how many the optimum was found; trials; sublayers
that these ran, in passes over all of the text, as a share of those of the first row of the same kind; trials that were
stopped; and "better" ones among them, which on all of the text are better than what the search found. Of all choices,
tried or not, the last columns say how many the second rule rules out after the first 8 trials, how many of these are
better than the best of the 8, and how many of all are further below their prediction than the rule expects.

"Races of the optimum" needs no search: it sets the optimum against every other choice as the best so far, and counts in
how many of these races it is stopped.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.search.given import try_programs
from scripts.search.race import looks
from surgeon.analysis.engine.sharing import simplify
from surgeon.analysis.subject import Subject, open_subject
from surgeon.language.program import Program
from surgeon.results.edit import Choice, as_choice
from surgeon.searches.evaluate import FIRST_TOKENS, Evaluator
from surgeon.searches.goals import PricedQuestion
from surgeon.searches.known import Known, KnownPass
from surgeon.searches.mixture import Mixture
from surgeon.searches.question import Question
from surgeon.searches.race import Race
from surgeon.searches.search import Search
from surgeon.searches.terms import Terms, measure_terms
from surgeon.searches.trial import MeasuredProgram, Trial

NEVER = 1e-12  # an alpha by which none is stopped
QUESTIONS = {
    "pair": ("depth=0.875x", "depth=0.75x", "depth=0.625x"),
    "drop:layers": ("depth=0.875x", "depth=0.8x"),
    "pair,drop:layers": ("depth=0.8x", "depth=0.65x"),
    "drop": ("params=0.9x", "params=0.8x"),
    "pair,ladder,fuse": ("speedup>=1.2@cpu-2", "speedup>=1.4@cpu-2"),
}
MOST = 2000  # choices of a question
KEPT = 256 << 20  # bytes of states
TOGETHER = 256  # programs measured in one call
UNSURE = 8  # trials, before which nothing is ruled out
SAME = 1 + 1e-6  # times another divergence, within which rounding lies


@dataclass(frozen=True)
class Way:
    """How trials are left out.

    Attributes:
        alpha: of the race's test; None: no trial is stopped.
        scan: whether stretches of edits are known.
        sure: by how many standard deviations choices are ruled out then; None: none is.
    """

    name: str
    alpha: float | None
    scan: bool = False
    sure: float | None = None


WAYS = (
    Way("every trial on all of the text", None),
    Way("race, alpha 0.01 *", 0.01),
    Way("race, alpha 0.1", 0.1),
    Way("a scan, nothing ruled out", 0.01, scan=True),
    Way("a scan, 3 deviations *", 0.01, scan=True, sure=3.0),
    Way("a scan, 2 deviations", 0.01, scan=True, sure=2.0),
    Way("a scan, 1 deviation", 0.01, scan=True, sure=1.0),
)


@dataclass(frozen=True)
class Text:
    """A model on some windows, and what is known of its programs there, by their text."""

    subject: Subject
    known: dict[str, MeasuredProgram]

    def evaluator(self, alpha: float = 0.01) -> Evaluator:
        """A new one, which has run the original only, and does not count that."""
        found = Evaluator(self.subject.model, self.subject.windows, kept=KEPT, race=Race(alpha))
        found.measure([found.dense])
        found.sublayers = 0.0
        return found

    @cached_property
    def own(self) -> Evaluator:
        return self.evaluator()

    def measured(self, programs: Sequence[Program]) -> list[MeasuredProgram]:
        """Each on all windows, once and for all."""
        fresh = [program for program in dict.fromkeys(programs) if str(program) not in self.known]
        for start in range(0, len(fresh), TOGETHER):
            found = self.own.measure(fresh[start : start + TOGETHER])
            self.known.update({str(program): measured for program, measured in found.items()})
        return [self.known[str(program)] for program in programs]


@dataclass(frozen=True)
class Asked:
    """A question of a text, all choices of which are measured."""

    text: Text
    question: PricedQuestion
    terms: Terms
    scan: Known
    choices: Mapping[Choice, MeasuredProgram]

    @property
    def optimum(self) -> MeasuredProgram:
        return min(self.choices.values(), key=lambda measured: measured.divergence)

    def searched(self, way: Way, trials: int) -> dict[str, float]:
        """What a search in some way comes to."""
        evaluator = self.text.evaluator(way.alpha or NEVER)
        known = self.scan if way.scan else Known()
        search = Search(self.question, evaluator, None if way.scan else self.terms, known)
        search.sure = way.sure
        assert len(search.terms.divergence)
        evaluator.sublayers = 0.0
        found = try_programs(search, trials)
        best = min(trial.measured.divergence for trial in found if trial.measured.whole)
        stopped = [trial for trial in found if not trial.measured.whole]
        better = [one.divergence * SAME < best for one in self.text.measured([trial.program for trial in stopped])]
        return {
            "found": best <= self.optimum.divergence * SAME,
            "worse by": best / self.optimum.divergence - 1,
            "trials": len(found),
            "sublayers": evaluator.sublayers,
            "stopped": len(stopped),
            "better": sum(better),
        } | ({} if way.sure is None else self.judged(search, found, way.sure))

    def judged(self, search: Search, trials: Sequence[Trial], sure: float) -> dict[str, int]:
        """Of all choices, what is ruled out once there are a few trials, and how often that is wrong."""
        proposer = next(iter(search.strands.values()))
        number = {edit: place for place, edit in enumerate(proposer.mixture.edits)}
        first = trials[:UNSURE]
        surrogate = proposer.surrogate(first)
        numbers = [[number[edit] for edit in choice] for choice in self.choices]
        predicted = np.array([surrogate.corrected.of(one) for one in numbers])
        lowest = predicted - sure * surrogate.uncertainty(numbers)
        true = np.array([measured.divergence for measured in self.choices.values()])
        least = min(trial.measured.divergence for trial in first if trial.measured.whole)
        ruled_out = lowest > least
        wrong = ruled_out & (true * SAME < least)
        return {"ruled out": int(ruled_out.sum()), "wrongly": int(wrong.sum()), "lower": int((true < lowest).sum())}

    def races(self) -> tuple[int, int]:
        """Of the optimum against every other choice: how many, and how many it loses."""
        window, best, race = self.text.subject.windows.ids.shape[1], self.optimum, Race()
        others = [one for one in self.choices.values() if one.divergence > best.divergence * SAME]
        blocks, own = self.text.own.blocks, np.array(best.blocks or best.divergences)
        windows = len(best.divergences)
        after = [*looks(windows, max(1, FIRST_TOKENS["cpu"] // window), windows)]
        lost = 0
        for other in others:
            rival = np.array(other.blocks or other.divergences)
            lost += any(race.is_lost(own[: n * blocks], rival[: n * blocks], blocks) for n in after)
        return len(others), lost


def asked(text: Text, spaces: str, budget: str) -> Asked | None:
    """A question, and all of its choices; None where they are too many, or nothing can be left out."""
    opened = text.subject.opened
    if budget.startswith("depth="):  # a share of the layers, in whole ones
        budget = f"depth={round(opened.num_layers * float(budget[6:-1]))}"
    settings = Question(spaces, budget, link_delay="1ms", prompt=128, new=64)
    mixture = settings.mixture(opened)
    dense = mixture.model.program
    question = PricedQuestion(settings, mixture, settings.priced(mixture), text.measured([dense])[0])
    programs = {mixture.program(choice): choice for choice in _every_choice(question, (), 0)}
    if not len(mixture.edits) < len(programs) <= MOST:
        return None
    terms = measure_terms(text.own, Search(question, text.own).terms_plan)
    choices = dict(zip(programs.values(), text.measured([*programs]), strict=True))
    return Asked(text, question, terms, _scan(text, mixture), choices)


def _every_choice(question: PricedQuestion, chosen: Choice, start: int) -> Iterator[Choice]:
    """Those that keep the budget, and no longer do without their last edit; too many are not all."""
    mixture, count = question.mixture, 0
    for place in range(start, len(mixture.edits)):
        if mixture.is_free(chosen, mixture.edits[place]):
            more = as_choice((*chosen, mixture.edits[place]))
            if any(question.budget.shortfalls(mixture.program(more))):
                found: Iterator[Choice] = _every_choice(question, more, place + 1)
            else:
                found = iter((more,))
            for choice in found:
                yield choice
                count += 1
                if count > MOST:
                    return


def _scan(text: Text, mixture: Mixture) -> Known:
    """What a scan would know: all unbroken stretches of edits of a space."""
    stretches = {as_choice(one[:length]): None for one in mixture.stretches() for length in range(1, len(one) + 1)}
    programs = [simplify(mixture.program(choice)) for choice in stretches if mixture.allows(choice)]
    measured = dict(zip(map(str, programs), text.measured(programs), strict=True))
    return Known((KnownPass("scan", Path("scan"), measured, {key: one.divergence for key, one in measured.items()}),))


def texts_of(model: str, data: str, tokens: int, count: int, window: int | None) -> Iterator[Text]:
    """Texts that lie one behind the other."""
    subject = open_subject(model, data, tokens * count, window)
    each = len(subject.windows.ids) // count
    for start in range(0, each * count, each):
        windows = replace(subject.windows, ids=subject.windows.ids[start : start + each])
        yield Text(replace(subject, windows=windows), {})


def rows_of(model: str, data: str, given: argparse.Namespace) -> Iterator[Mapping[str, object]]:
    """Of every question, text and way."""
    for number, text in enumerate(texts_of(model, data, given.tokens, given.texts, given.window)):
        for spaces, budgets in QUESTIONS.items():
            for budget in budgets:
                one = asked(text, spaces, budget)
                if one is None:
                    continue
                named = {"model": text.subject.opened.label, "space": spaces, "budget": str(one.question.budget)}
                races, lost = one.races()
                named |= {"text": number, "choices": len(one.choices), "races": races, "lost": lost}
                for way in WAYS:
                    yield named | {"way": way.name} | one.searched(way, given.trials)


def table_of(rows: pd.DataFrame) -> str:
    """A line for each model and way, in Markdown."""
    sums = ["found", "trials", "stopped", "better", "ruled out", "wrongly", "lower"]
    lines = [f"| model | questions | choices | way | sublayers | {' | '.join(sums)} |"]
    lines += [f"|:--|--:|--:|:--|{'--:|' * (1 + len(sums))}"]
    for model, own in rows.groupby("model", sort=False):
        for way in WAYS:
            row, first = own[own["way"] == way.name], next(one for one in WAYS if one.scan == way.scan)
            share = row["sublayers"].sum() / own[own["way"] == first.name]["sublayers"].sum()
            counts = ["" if row[name].isna().all() else str(int(row[name].sum())) for name in sums]
            cells = [str(model), str(len(row)), f"{row['choices'].sum():,}", way.name, f"{share:.2f}", *counts]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL=TEXT")
    parser.add_argument("--tokens", type=int, default=2048, help="of each text")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--window", type=int)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("-o", "--output", type=Path, help="a CSV file, of every search")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[Mapping[str, object]] = []
    for model, _, data in (text.partition("=") for text in given.models):
        for row in rows_of(model, data, given):
            print(*row.values(), flush=True)
            rows.append(row)
            if given.output:
                pd.DataFrame(rows).to_csv(given.output, index=False)
    print(table_of(pd.DataFrame(rows)))
    every = pd.DataFrame(rows).drop_duplicates(["model", "space", "budget", "text"])
    print(f"races of the optimum: {every['races'].sum():,}, of which it loses {every['lost'].sum():,}")


if __name__ == "__main__":
    main()
