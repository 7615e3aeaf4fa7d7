"""What stopping programs early wins, and how often it stops one that it should not: by test, and by its alpha.

    python scripts/search/race.py [MODEL] [--data demo] [--programs 240] [--orders 20] [--threads N]

A few hundred programs (pairs, forks, drops, late sublayers, mixtures of them) are measured on all windows. Then races
are replayed with the windows in random orders, each program against a best so far that is drawn from the best quarter
of its kind. A stop is false if the program has less divergence on all windows than that best; "near" counts programs
up to 1% worse than it. Work is the share of windows that are run. Blocks are parts of windows of 64 tokens or more;
"alike" has their correlation within a window taken into account, as `surgeon search` does (marked with *).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.search.drawn import drawn, mixture_of, opened
from surgeon.quality.summary import Values
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.race import ROUNDING, Race

NEAR = 1.01
KINDS = {"pair": (8, 4, 2.7), "drop": (8, 5), "ladder": (2,), "par": (4,), "pair,ladder,drop": (3,)}
Test = Callable[[Values, float], bool]  # of differences above what is allowed, at this alpha: is the mean above 0?


def wilcoxon(above: Values, alpha: float) -> bool:
    """Wilcoxon's signed ranks."""
    above = above[above != 0]
    return len(above) > 0 and float(stats.wilcoxon(above, alternative="greater").pvalue) < alpha


def bernstein(above: Values, alpha: float) -> bool:
    """The empirical Bernstein bound (Maurer and Pontil 2009, theorem 4), with the range that was seen."""
    count, log = len(above), np.log(2 / alpha)
    spread = np.sqrt(2 * above.var(ddof=1) * log / count) + 7 * np.ptp(above) * log / (3 * (count - 1))
    return bool(above.mean() > spread)


@dataclass
class Count:
    """What one rule did."""

    races: int = 0
    better: int = 0
    stopped: int = 0
    false: int = 0
    near: int = 0
    work: float = 0.0


@dataclass
class Kind:
    """Programs of one kind, measured on all windows.

    Attributes:
        values: (programs, windows, blocks).
        bests: those that may be the best so far.
    """

    values: Values
    bests: list[int] = field(init=False)

    def __post_init__(self) -> None:
        order = np.argsort(self.mean)
        self.bests = [int(place) for place in order[: max(1, len(order) // 4)]]

    @property
    def mean(self) -> Values:
        mean: Values = self.values.mean((1, 2))
        return mean


def looks(windows: int, first: int, at_once: int) -> Iterator[int]:
    """After how many windows a program is looked at, as `surgeon.analysis.engine.measure` runs them."""
    done = 0
    while (done := done + min(at_once, max(first, done))) < windows:
        yield done


Rule = Callable[[Values, Values, int], bool]  # of a program's values, the best's, and how many a window has


def replay(kinds: list[Kind], is_lost: Rule, cut: bool, orders: int) -> Count:
    """Races of every program, in random orders of the windows."""
    dice, count = np.random.default_rng(0), Count()
    for _ in range(orders):
        for kind in kinds:
            best, order = int(dice.choice(kind.bests)), dice.permutation(kind.values.shape[1])
            values = kind.values[:, order] if cut else kind.values[:, order].mean(2, keepdims=True)
            for program in range(len(values)):
                if program != best:
                    _one(values[program], values[best], is_lost, count, kind.mean[[program, best]])
    return count


def _one(own: Values, best: Values, is_lost: Rule, count: Count, mean: Values) -> None:
    windows = len(own)
    ends = (n for n in looks(windows, 1, 4) if is_lost(own[:n].flatten(), best[:n].flatten(), own.shape[1]))
    stop = next(ends, windows)
    better = bool(mean[0] < mean[1])
    count.races += 1
    count.better += better
    count.work += stop / windows
    if stop < windows:
        count.stopped += 1
        count.false += better
        count.near += not better and bool(mean[0] <= NEAR * mean[1])


def rules() -> Iterator[tuple[str, str, float, Rule]]:
    """The name of each test, what it compares, its alpha, and the rule."""
    margin = Race().margin
    for alpha in (0.05, 0.02, 0.01, 0.001):
        yield "Student", "blocks, alike", alpha, Race(alpha, margin).is_lost
    for alpha in (0.1, 0.05, 0.02, 0.01, 0.001):
        yield "Student", "blocks", alpha, Race(alpha, margin, correlation=0).is_lost
        yield "Student", "windows", alpha, Race(alpha, margin).is_lost
        for name, test in (("Wilcoxon", wilcoxon), ("Bernstein", bernstein)):
            for compared in ("blocks", "windows"):
                yield name, compared, alpha, _rule(test, alpha, margin)


def _rule(test: Test, alpha: float, margin: float) -> Rule:
    return lambda own, best, _: len(own) > 1 and test(own - best * (1 + margin) - ROUNDING, alpha)


def measured(model: str, data: str, tokens: int, programs: int, threads: int | None) -> tuple[list[Kind], str]:
    """The kinds, and a line that says what was measured."""
    subject = opened(model, data, tokens, threads)
    evaluator = Evaluator(subject.model, subject.windows)
    layers, windows = subject.opened.num_layers, len(subject.windows.ids)
    cases = [(spaces, round(layers / part)) for spaces, parts in KINDS.items() for part in parts]
    kinds = []
    for spaces, edits in cases:
        found = drawn(mixture_of(subject, spaces), evaluator, edits, programs // len(cases), seed=edits)
        values = [evaluator.measure([program])[program] for program in found]
        shaped = np.array([value.blocks or value.divergences for value in values]).reshape(len(values), windows, -1)
        kinds.append(Kind(shaped[np.isfinite(shaped).all((1, 2))]))
        print(f"{spaces}, {edits} edits: {len(found)} programs", file=sys.stderr)
    total = sum(len(kind.values) for kind in kinds)
    return kinds, f"{model}: {total} programs on {windows} windows of {subject.windows.ids.shape[1]} tokens of {data}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--programs", type=int, default=240)
    parser.add_argument("--orders", type=int, default=20)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    kinds, title = measured(given.model, given.data, given.tokens, given.programs, given.threads)
    table = Table(title=title, title_justify="left")
    for heading in ("test", "compares", "alpha", "work", "stopped", "better", "false", "near"):
        table.add_column(heading, justify="left" if heading in ("test", "compares") else "right")
    for name, compared, alpha, rule in sorted(rules(), key=lambda rule: rule[:2]):
        count = replay(kinds, rule, compared != "windows", given.orders)
        ours = (compared, alpha) == ("blocks, alike", Race().alpha)
        cells = f"{count.work / count.races:.3f}", f"{count.stopped / count.races:.1%}"
        numbers = f"{count.better:,}", f"{count.false:,}", f"{count.near:,}"
        text = f"{name} *" if ours else name
        table.add_row(text, compared, f"{alpha:g}", *cells, *numbers)
    console = Console(width=80)
    console.print(table)
    console.print(f"{count.races:,} races of each; better: of programs that were better than their best so far")


if __name__ == "__main__":
    main()
