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

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.commands import make_parser
from scripts.cost.cases import NOTES, Case, read_cases
from scripts.cost.constants import CONSTANTS, Seconds, Values, fit, speedup
from scripts.cost.models import ASSUMED
from scripts.cost.predictor import Predictor
from scripts.markdown import format_table
from surgeon.findings.drawing import scale

TABLES = Path(__file__).resolve().parents[2] / "docs" / "papers-tables.json"


def compare(
    cases: Sequence[Case], seconds: Seconds, values: Values, crossed: Mapping[str, Values]
) -> pd.DataFrame:
    """Every row predicted, with constants of all papers' fitted rows (`speedup`) and of the other papers' alone.

    `miss` and `crossed_miss` are points above the printed speedup. A `part` is of a layer's time, which is no speed.
    """
    rows = []
    for case in cases:
        found: dict[str, Any] = {"case": case, "paper": case.paper, "group": case.group, "use": case.use}
        found |= {"part": case.run.measure in ("compute", "exchange"), "printed": case.speedup}
        found["seconds"] = seconds(case.run, values)
        if case.baseline is not None:
            found["speedup"] = speedup(case, seconds, values)
            found["crossed"] = speedup(case, seconds, crossed[case.paper])
        rows.append(found)
    table = pd.DataFrame(rows).astype({"printed": float})
    table["miss"] = 100 * (table["speedup"] - table["printed"])
    table["crossed_miss"] = 100 * (table["crossed"] - table["printed"])
    return table


def error_table(rows: pd.DataFrame) -> list[str]:
    """By paper, and of all."""
    checked = rows[(rows["use"] == "check") & ~rows["part"]].dropna(subset="miss")
    named = dict(iter(checked.groupby("paper", sort=False)))
    named |= {"all over a dense baseline": checked[checked["paper"] != "deinfer"], "all": checked}
    columns = ["rows to check", "rows", "mean miss", "median", "cross-validated"]
    lines = []
    for name, some in named.items():
        plain = some["miss"].abs()
        numbers = (plain.mean(), plain.median(), some["crossed_miss"].abs().mean())
        lines.append([name, len(some), *(f"{number:.1f}" for number in numbers)])
    return format_table(columns, lines)


def constant_table(values: Values, crossed: Mapping[str, Values]) -> list[str]:
    """The fitted constants."""
    columns = ["constant", "before", "fitted", *(f"without {paper}" for paper in crossed)]
    fits = [values, *crossed.values()]
    rows = [
        [one.name, f"{one.start:.3g}", *(f"{each[one.name]:.3g}" for each in fits)] for one in CONSTANTS
    ]
    return format_table(columns, rows)


def row_table(rows: pd.DataFrame) -> list[str]:
    """Every row, in the tables' order, with what is said of its table."""
    columns = [
        "row",
        "use",
        "printed",
        "predicted",
        "as speedup",
        "predicted",
        "miss",
        "cross-validated",
    ]
    lines: list[str] = []
    for group, some in rows.groupby("group", sort=False):
        lines += ["", f"### {group}", "", NOTES.get(str(group), ""), ""]
        lines += format_table(columns, map(_row, some.itertuples()), left=(0, 1))
    return lines


def _row(one: Any) -> list[str]:
    case: Case = one.case
    cells = [case.text, case.use, f"{case.printed:g}", _in_unit(case, one.seconds)]
    if case.speedup is None:
        return [*cells, "baseline", "", "", ""]
    printed = f"{case.speedup:.3f}{' (part)' if one.part else ''}"
    return [*cells, printed, f"{one.speedup:.3f}", f"{one.miss:+.1f}", f"{one.crossed_miss:+.1f}"]


def _in_unit(case: Case, seconds: float) -> str:
    """The prediction in the printed unit, where that is a time or a rate."""
    if case.unit == "tokens/s":
        return f"{case.run.batch * case.run.new / seconds:.0f}"
    scale = {"ms": 1e3, "as printed": 1e6}.get(case.unit)
    if scale:
        return f"{seconds * scale:.3g}"
    return ""


def page(rows: pd.DataFrame, values: Values, crossed: Mapping[str, Values]) -> str:
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


def draw(rows: pd.DataFrame, path: Path) -> None:
    """Predicted against printed speedups, by paper; filled: rows to check."""
    figure = Figure(figsize=(6.5, 5.2), layout="constrained", dpi=160)
    axes = figure.subplots()
    speeds = rows[~rows["part"]].dropna(subset="speedup")
    styles = zip(("#33638d", "#f0a04b", "#4aa36c", "#c8553d"), "osD^", strict=True)
    for (paper, some), (colour, mark) in zip(speeds.groupby("paper", sort=False), styles, strict=False):
        for use, face in (("fit", "none"), ("check", colour)):
            own = some[some["use"] == use]
            style = {
                "color": colour,
                "markerfacecolor": face,
                "markersize": 5,
                "label": f"{paper}, {use}",
            }
            axes.plot(own["printed"], own["speedup"], mark, **style)
    ends = (0.9, 6.0)
    axes.plot(ends, ends, color="#999999", linewidth=0.8)
    axes.set(xlabel="printed", ylabel="predicted")
    for which in ("x", "y"):
        scale(axes, which, ends, log=True)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("Times as fast as the baseline of the same table", fontsize=11)
    figure.savefig(path)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("tables", type=Path, nargs="?", default=TABLES, help="the papers' rows, as JSON")
    parser.add_argument("-o", "--output", type=Path, help="a file for the page; printed otherwise")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of least squares; 0 keeps the constants as shipped"
    )
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
