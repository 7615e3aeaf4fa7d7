"""What sections on training runs have in common: their settings, and how long they took."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from surgeon.findings.blocks import Table
from surgeon.words import number


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
