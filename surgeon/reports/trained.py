"""What sections on training runs have in common: their tables, their settings, how long they took."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from surgeon.reports.blocks import Table
from surgeon.reports.runs import Run, TableFile
from surgeon.words import number

TRAINING, HELD_OUT = "training.csv", "held_out.csv"
_INTERVALS = tuple(f"{name}_{end}" for name in ("perplexity", "divergence") for end in ("low", "high"))
TRAINING_TABLES = (
    TableFile(TRAINING, ("step", "tokens", "seconds", "loss", "learning_rate"), may_be_empty=True),
    TableFile(HELD_OUT, ("step", "seconds", "perplexity", "divergence", *_INTERVALS)),
)


def require_ended(run: Run, last: str) -> None:
    """Refuse a run whose record has not its last entry yet.

    Raises:
        ValueError: saying how it goes on.
    """
    if "identity" in run.record and last not in run.record:
        raise ValueError(
            f"{run.file} is of a run that has not ended; give the same surgeon {run.kind.name} command again, which "
            "goes on where it was"
        )


def settings_table(settings: Any) -> Iterator[Table]:
    """How a run was made; nothing where that is not known."""
    rows = [[name, text] for name, text in _flat(settings or {})]
    if rows:
        yield Table("Settings", ["", ""], rows, left=frozenset({1}))


def duration(seconds: float) -> str:
    """A time as people say it: 42 s, 3.5 min, 2.1 h."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _flat(settings: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Settings by name, those inside others behind their names; what is not set is left out."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        elif value is not None and value != []:
            yield f"{before}{name}".replace("_", " "), _setting(value)


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value, 3) if math.isfinite(value) else str(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
