"""Measurements as a model card shows them."""

from __future__ import annotations

from collections.abc import Iterator

from surgeon.results.card_text import paragraph, table
from surgeon.results.measured import Bench, CardScore, Measured, Speed

MS = 1e3


def measured_parts(measured: Measured, name: str) -> Iterator[str]:
    """The section with all that was measured; nothing if nothing was."""
    if measured.scores:
        yield "## Quality\n"
        yield _quality(measured.scores, name)
        yield paragraph(
            "In brackets: the 95% interval over windows of the text; after ±: the standard error. Divergence is "
            "KL(original || this model) over the full vocabulary."
        )
    if measured.benches:
        yield "## Speed\n"
        for bench in measured.benches:
            yield from _speed(bench, name)


def _quality(scores: tuple[CardScore, ...], name: str) -> str:
    """One row for each number, the unedited model's beside it where it was measured in the same way."""
    found = {(one.key, one.metric, one.edited): one for one in scores}
    rows = dict.fromkeys((one.key, one.metric) for one in scores)
    compared = any(not one.edited for one in scores)
    lines = []
    for key, metric in rows:
        pair = [found.get((key, metric, edited)) for edited in (True, False)]
        on = next(one.on for one in pair if one is not None)
        shown = ["" if one is None else one.shown for one in pair]
        lines.append([f"{metric} ({on})", *shown[: 2 if compared else 1]])
    return table(["", name, "unedited"][: 3 if compared else 2], lines)


def _speed(bench: Bench, name: str) -> Iterator[str]:
    yield paragraph(f"By `surgeon bench` on {bench.place}:")
    head = ["program", "batch", "first token, ms", "per token, ms", "tokens/s", f"{name} is faster by"]
    several = len({one.program for one in bench.speeds}) > 1
    rows = [_row(one, bench, name) for one in bench.speeds]
    yield table(head if several else head[:-1], rows if several else [row[:-1] for row in rows])
    if bench.compression is not None:
        yield paragraph(bench.compression)


def _row(one: Speed, bench: Bench, name: str) -> list[str]:
    own = next((s for s in bench.speeds if s.edited and s.batch == one.batch), None)
    program = f"**{name}**" if one is own else one.program
    per_token = "" if one.per_token is None else f"{one.per_token * MS:.3g}"
    times = "" if own is None or one is own else f"{own.times(one):.2f} times"
    return [program, str(one.batch), f"{one.first_token * MS:.3g}", per_token, f"{one.rate:.3g}", times]
