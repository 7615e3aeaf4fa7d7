"""The cost model against every row that the papers print: speedups fitted on some rows, held against the others.

    python scripts/cost/papers.py [TABLES.json] [-o OUT.md] [--rounds 5]

TABLES.json, by default docs/papers-tables.json, has the rows as data: {"rows": [{"paper", "table", "what", "value",
"unit", "use"}, ...]}. Rows of use "fit" choose the constants of `constants.py`, which are pulled towards what the
hardware files ship; rows of use "check" are only compared with. Every row is a speed over a baseline of its own table,
or such a baseline; parts of a layer's time (computing, communicating) are shown, but are no speeds, and not counted.

Printed (with -o written, and drawn beside) are the constants, the mean absolute error of speedups in points (1.15 for
a printed 1.19 misses by 4) of the rows to check, the same with the constants fitted on the other papers only, and every
row predicted against printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.cost.cases import NOTES, Case, read_cases
from scripts.cost.constants import CONSTANTS
from scripts.cost.fit import Seconds, Values, fit, speedup
from scripts.cost.models import ASSUMED
from scripts.cost.predictor import Predictor

TABLES = Path(__file__).resolve().parents[2] / "docs" / "papers-tables.json"


@dataclass(frozen=True)
class Compared:
    """A row, predicted.

    Attributes:
        seconds: that the model says of the row's own run.
        speedup: that it says over the baseline; None for a baseline.
        crossed: the same with constants fitted on the other papers.
    """

    case: Case
    seconds: float
    speedup: float | None
    crossed: float | None

    @property
    def part(self) -> bool:
        """Whether it is a part of a layer's time, which is no speed."""
        return self.case.run.measure in ("compute", "exchange")

    def miss(self, crossed: bool = False) -> float | None:
        """Points above the printed speedup."""
        predicted = self.crossed if crossed else self.speedup
        return None if predicted is None or self.case.speedup is None else 100 * (predicted - self.case.speedup)


def compare(cases: Sequence[Case], seconds: Seconds, values: Values, crossed: Mapping[str, Values]) -> list[Compared]:
    """Every row predicted, with constants of all papers' fitted rows and of the other papers' alone."""
    return [
        Compared(
            case,
            seconds(case.run, values),
            speedup(case, seconds, values) if case.baseline else None,
            speedup(case, seconds, crossed[case.paper]) if case.baseline else None,
        )
        for case in cases
    ]


def errors(rows: Sequence[Compared], crossed: bool = False) -> list[float]:
    """Points by which speeds of rows to check are missed."""
    checked = (one for one in rows if one.case.use == "check" and not one.part)
    return [abs(miss) for one in checked if (miss := one.miss(crossed)) is not None]


def error_table(rows: Sequence[Compared]) -> list[str]:
    """By paper, and of all."""
    lines = ["| rows to check | rows | mean miss | median | cross-validated |", "|:--|--:|--:|--:|--:|"]
    papers = list(dict.fromkeys(one.case.paper for one in rows))
    dense = [one for one in rows if one.case.paper != "deinfer"]
    named = {paper: [one for one in rows if one.case.paper == paper] for paper in papers}
    for name, some in {**named, "all over a dense baseline": dense, "all": list(rows)}.items():
        plain, crossed = errors(some), errors(some, crossed=True)
        if plain:
            lines.append(f"| {name} | {len(plain)} | {fmean(plain):.1f} | {median(plain):.1f} | {fmean(crossed):.1f} |")
    return lines


def constant_table(values: Values, crossed: Mapping[str, Values]) -> list[str]:
    """What was fitted."""
    lines = ["| constant | before | fitted | without " + " | without ".join(crossed) + " |"]
    lines.append("|:--|" + "--:|" * (2 + len(crossed)))
    for one in CONSTANTS:
        others = " | ".join(f"{each[one.name]:.3g}" for each in crossed.values())
        lines.append(f"| {one.name} | {one.start:.3g} | {values[one.name]:.3g} | {others} |")
    return lines


def row_table(rows: Sequence[Compared]) -> list[str]:
    """Every row, in the tables' order, with what is said of its table."""
    lines: list[str] = []
    for group in dict.fromkeys(one.case.group for one in rows):
        lines += ["", f"### {group}", "", NOTES.get(group, ""), ""]
        lines += ["| row | use | printed | predicted | as speedup | predicted | miss | cross-validated |"]
        lines += ["|:--|:--|--:|--:|--:|--:|--:|--:|"]
        lines += [_row(one) for one in rows if one.case.group == group]
    return lines


def _row(one: Compared) -> str:
    case = one.case
    own = _in_unit(one)
    if case.speedup is None or one.speedup is None or one.crossed is None:
        return f"| {case.text} | {case.use} | {case.printed:g} | {own} | baseline | | | |"
    part = " (part)" if one.part else ""
    return (
        f"| {case.text} | {case.use} | {case.printed:g} | {own} | {case.speedup:.3f}{part} | {one.speedup:.3f} | "
        f"{one.miss():+.1f} | {one.miss(crossed=True):+.1f} |"
    )


def _in_unit(one: Compared) -> str:
    """The prediction in the printed unit, where that is a time or a rate."""
    run, unit = one.case.run, one.case.unit
    if unit == "tokens/s":
        return f"{run.batch * run.new / one.seconds:.0f}"
    scale = {"ms": 1e3, "as printed": 1e6}.get(unit)
    return f"{one.seconds * scale:.3g}" if scale else ""


def page(rows: Sequence[Compared], values: Values, crossed: Mapping[str, Values]) -> str:
    """All of it, as markdown."""
    assumed = [f"- {name}: {what}" for name, what in ASSUMED.items()]
    parts = [
        "# The cost model against the papers' tables",
        "\n".join(error_table(rows)),
        "Points are hundredths of the baseline's speed. DeInfer's rows are over its Base: it prints no dense model.",
        "## Constants",
        "\n".join(constant_table(values, crossed)),
        "## Assumed of models",
        "\n".join(assumed),
        "## Rows",
        "\n".join(row_table(rows)),
    ]
    return "\n\n".join(parts) + "\n"


def draw(rows: Sequence[Compared], path: Path) -> None:
    """Predicted against printed speedups, by paper; filled: rows to check."""
    figure = Figure(figsize=(6.5, 5.2), layout="constrained", dpi=160)
    axes = figure.subplots()
    speeds = [one for one in rows if one.speedup is not None and not one.part]
    for paper, colour, mark in zip(
        dict.fromkeys(one.case.paper for one in speeds),
        ("#33638d", "#f0a04b", "#4aa36c", "#c8553d"),
        "osD^",
        strict=False,
    ):
        for use, face in (("fit", "none"), ("check", colour)):
            some = [one for one in speeds if (one.case.paper, one.case.use) == (paper, use)]
            printed, predicted = [one.case.speedup for one in some], [one.speedup for one in some]
            label = f"{paper}, {use}"
            axes.plot(printed, predicted, mark, color=colour, markerfacecolor=face, markersize=5, label=label)
    ends = (0.9, 6.0)
    axes.plot(ends, ends, color="#999999", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="printed", ylabel="predicted")
    ticks = (1, 1.2, 1.5, 2, 3, 4, 5)
    axes.set_xticks(ticks, labels=map(str, ticks))
    axes.set_yticks(ticks, labels=map(str, ticks))
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("Times as fast as the baseline of the same table", fontsize=11)
    figure.savefig(path)


def main() -> None:
    """Read, fit, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="?", default=TABLES, help="the papers' rows, as JSON")
    parser.add_argument("-o", "--output", type=Path, help="a file for the page; printed otherwise")
    parser.add_argument("--rounds", type=int, default=5, help="of least squares; 0 keeps the constants as shipped")
    options = parser.parse_args()
    cases = read_cases(json.loads(options.tables.read_text(encoding="utf-8"))["rows"])
    seconds = Predictor()
    names = list(dict.fromkeys(case.paper for case in cases))
    values, crossed = fit(cases, seconds, options.rounds, names)
    rows = compare(cases, seconds, values, crossed)
    text = page(rows, values, crossed)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")
        draw(rows, options.output.with_suffix(".png"))
        print("\n".join(error_table(rows)))


if __name__ == "__main__":
    main()
