"""What the functions of the library have in common: how they take layers, and warn."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from surgeon.language.operations.base import parse_range


def as_range(layers: range | str | None) -> range | None:
    """A range of layers, written as Python slices it: "4:30" is layers 4 to 29.

    Raises:
        ValueError: if a text is no range.
    """
    return parse_range(layers) if isinstance(layers, str) else layers


def warn(notes: Iterable[str]) -> None:
    """Warn of each."""
    for note in notes:
        warnings.warn(note, stacklevel=1)
