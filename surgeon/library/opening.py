"""What the functions that measure have in common: they open a model and a text, and warn of what to know of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

from surgeon.analysis.subject import Subject, open_subject
from surgeon.language.operations.base import parse_range
from surgeon.memory import parse_size
from surgeon.opened import Model
from surgeon.quality.data import DEFAULT_TOKENS


def open_measured(
    model: str | Path | Model,
    data: str | Path,
    *,
    tokens: int = DEFAULT_TOKENS,
    window: int | None = None,
    separator: str | None = None,
    memory: int | str | None = None,
    elsewhere: bool = False,
) -> Subject:
    """Open what is measured, and warn of what there is to know of its text; arguments as `open_subject` takes them.

    Args:
        memory: a limit in bytes, or as one writes it ("2GB").

    Raises:
        FileNotFoundError, ValueError: as `open_subject`; and if the limit is no amount of memory.
    """
    limit = parse_size(memory) if isinstance(memory, str) else memory
    named = model if isinstance(model, Model) else str(model)
    subject = open_subject(named, str(data), tokens, window, separator, limit, elsewhere)
    warn(subject.windows.notes)
    return subject


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
