"""How commands take layers, lists and results of other passes, and how they warn."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from surgeon.errors import shown
from surgeon.findings.result import RunResult
from surgeon.language.operations.base import parse_range
from surgeon.language.program import Program


def as_range(layers: range | str | None) -> range | None:
    """A range of layers, written as Python slices it: "4:30" is layers 4 to 29.

    Raises:
        ValueError: if it is no range, or one that leaves layers out.
    """
    if isinstance(layers, range) and layers.step != 1:
        raise ValueError(f"{layers} leaves layers out; give all from the first to the last, as in range(4, 30)")
    if layers is None or isinstance(layers, range):
        return layers
    if not isinstance(layers, str):
        raise ValueError(f'layers are "4:30" or range(4, 30), for layers 4 to 29, not {shown(layers)}')
    return parse_range(layers)


def as_list(given: str | float | Path | Program | Sequence[Any]) -> list[str]:
    """List as texts what may be given as one, or as several."""
    if isinstance(given, str | float | Path | Program):
        return [str(given)]
    return [str(one) for one in given]


def as_folder(found: str | Path | RunResult) -> Path:
    """The folder of a pass, given by its path or by what the pass has returned.

    Raises:
        ValueError: if it was written to no folder.
    """
    if not isinstance(found, RunResult):
        return Path(found)
    if not found.files:
        raise ValueError(f"{found!r} was written to no folder; give the output folder of a run")
    return found.files[0].parent


def check_counts(**counts: int | None) -> None:
    """Refuse numbers of things that there has to be one of at least; None is a default.

    Raises:
        ValueError: naming the first such number.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")


def warn(notes: Iterable[str]) -> None:
    """Warn of each."""
    for note in notes:
        warnings.warn(note, stacklevel=1)
