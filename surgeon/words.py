"""Numbers, layers and values as text, the same everywhere."""

from __future__ import annotations

import difflib
import math
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
NO_VALUE = "\N{EN DASH}"
WIDTH = 80  # columns of a terminal
MOST_LAYERS = 10_000  # a number beyond is damage, which would fill the memory
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_TIMES_FROM = 2.0  # from this ratio on, "3.2 times" says more than "+220%"


def number(value: float, digits: int = 4) -> str:
    """Write a number with significant digits; large ones with thousands apart, NaN as a dash."""
    if math.isnan(value):
        return NO_VALUE
    if math.isinf(value):
        if value > 0:
            return "∞"
        return MINUS + "∞"
    rounded = float(f"{value:.{digits}g}")
    if rounded != 0 and not 1e-4 <= abs(rounded) < 1e7:
        mantissa, _, exponent = f"{value:.{max(1, digits - 2)}e}".partition("e")
        return f"{mantissa} {TIMES} 10{str(int(exponent)).translate(_SUPERSCRIPTS)}".replace("-", MINUS)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded)))) if rounded else 0
    return f"{rounded:,.{decimals}f}".replace("-", MINUS)


def cost(value: float) -> str:
    """Write a program's cost: a number, but counts (depths have halves) without further decimals."""
    if float(2 * value).is_integer() and abs(value) < 1e7:
        return f"{value:,.8g}"
    return number(value)


def interval(low: float | None, high: float | None, digits: int = 4) -> str:
    """Write a 95% interval; empty where it is not known."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return ""
    return f"{number(low, digits)} to {number(high, digits)}"


def with_intervals(row: Any, names: Iterable[str] = ("perplexity", "divergence")) -> list[str]:
    """Write columns of a table's row, each followed by its 95% interval, if the table has intervals."""
    texts = []
    for name in names:
        texts.append(number(row[name]))
        if f"{name}_low" in row and f"{name}_high" in row:
            texts.append(interval(row[f"{name}_low"], row[f"{name}_high"]))
    return texts


def value_with_interval(row: Any, name: str) -> str:
    """Write a value with its 95% interval in brackets, if it is known."""
    ends = interval(row.get(f"{name}_low"), row.get(f"{name}_high"))
    return number(math.nan if row[name] is None else float(row[name])) + (
        f" (95%: {ends})" if ends else ""
    )


def change(ratio: float) -> str:
    """Write a value's ratio to its base: +5.3%, the like with a minus, or 3.2 times."""
    if math.isnan(ratio):
        return NO_VALUE
    if ratio >= _TIMES_FROM:
        return f"{number(ratio, 2 if ratio < 1000 else 1)} times"
    percent = 100 * (ratio - 1)
    decimals = 2 if abs(percent) < 0.995 else 1 if abs(percent) < 9.95 else 0
    text = f"{abs(percent):.{decimals}f}"
    if not float(text):
        return "±0%"
    return f"{'+' if percent > 0 else MINUS}{text}%"


def allowance(ratio: float) -> str:
    """Write a tolerance without needless decimals: 1.05 is +5%."""
    return f"+{100 * (ratio - 1):.3g}%"


def tick(value: float, digits: int = 3) -> str:
    """Write a number on an axis."""
    text = number(value, digits)
    if TIMES in text:  # with a digit fewer
        text = number(value, digits + 1)
    mantissa, times, power = text.partition(f" {TIMES}")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return mantissa + times + power


def stretch(first: int, last: int) -> str:
    """Write a stretch of layers, both ends included."""
    if first == last:
        return f"layer {first}"
    return f"layers {first} to {last}"


def layer_list(layers: Iterable[int]) -> str:
    """Write single layers and runs of them: "0, 1 and 5 to 8"."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(layer) for layer in run]
    return join_words(parts)


def join_words(parts: Iterable[str], joining: str = "and") -> str:
    """Join parts of a sentence: "a, b and c"."""
    items = list(parts)
    if items:
        return f" {joining} ".join(filter(None, [", ".join(items[:-1]), items[-1]]))
    return ""


def first_few(names: Sequence[str], most: int) -> str:
    """Join the first names and count the others: "a, b and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def in_words(name: str) -> str:
    """Write a column's name with spaces."""
    return name.replace("_", " ")


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: "1 layer", "12 layers"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def times(value: float) -> str:
    """Write a factor with two decimals; NaN as a dash."""
    if math.isnan(value):
        return "-"
    return f"{value:.2f}"


def align_columns(lines: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Align lines of cells in columns for a terminal, flush left or right.

    Two spaces are between them, one where the terminal would be too narrow for two.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "

    def place(cell: str, column: int) -> str:
        if column in left:
            return cell.ljust(widths[column])
        return cell.rjust(widths[column])

    return "\n".join(gap.join(map(place, line, range(len(widths)))).rstrip() for line in lines)


def hang_indent(start: str, text: str) -> str:
    """Wrap text behind a start for a terminal; further lines begin where its text does."""
    return textwrap.fill(
        text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    )


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """End an error message about an unknown word: the nearest known one, or all of them."""
    choices = list(choices)
    near = difflib.get_close_matches(str(word), choices, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(choices)}"


def show_value(value: object, most: int = 40) -> str:
    """Show a value in an error message, cut if it is long."""
    text = repr(value)
    if len(text) <= most:
        return text
    return text[: most - 3] + "..."


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error; its kind if it has no text."""
    text = str(error).strip()
    if text:
        return text.splitlines()[0]
    return type(error).__name__
