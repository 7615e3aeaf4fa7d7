"""What a spectrum has measured so far: singular values of each matrix, and the damage of each truncation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surgeon.analysis.factors.matrices import Matrix
from surgeon.processes.journal import Journal, read_journal
from surgeon.provenance import FORMAT

JOURNAL = "journal.jsonl"
Values = NDArray[np.float64]
ByWindow = dict[str, Values]  # nll and divergence from the original, nats per token, (windows,) each


@dataclass(frozen=True)
class SingularValues:
    """The singular values of one matrix.

    Attributes:
        size: (out_features, in_features).
        plain: of W, largest first.
        whitened: of W S, likewise.
        factor: how S was made, as in `Whitening.how`.
        input_rank: the rank of S.
    """

    size: tuple[int, int]
    plain: Values
    whitened: Values
    factor: str
    input_rank: int


@dataclass(frozen=True)
class Truncation:
    """One matrix cut down to a rank."""

    matrix: Matrix
    method: str
    rank: int


class SpectrumJournal(Journal):
    """Everything that a spectrum has measured, kept in a folder as it is measured.

    Attributes:
        base_nll: the unedited model's negative log-likelihood by window, once it is known.
        spectra: by matrix.
        damage: by truncation.

    Args:
        folder: made if it is not there; None to keep nothing.
        identity: what the numbers depend on.

    Raises:
        ValueError, OSError: as `Journal`.
    """

    def __init__(self, folder: Path | None, identity: dict[str, Any] | None = None) -> None:
        self.base_nll: Values | None = None
        self.spectra: dict[Matrix, SingularValues] = {}
        self.damage: dict[Truncation, ByWindow] = {}
        if folder is None:
            super().__init__(None, "spectrum")
        else:
            super().__init__(folder / JOURNAL, "spectrum", {"format": FORMAT} | (identity or {}))

    def take(self, line: Any) -> None:
        if "base" in line:
            self.base_nll = np.array(line["base"], dtype=np.float64)
            return
        matrix = Matrix.of(line["layer"], line["weight"])
        if "rank" in line:
            numbers = {name: np.array(line[name], dtype=np.float64) for name in ("nll", "divergence")}
            self.damage[Truncation(matrix, line["method"], line["rank"])] = numbers
            return
        plain, whitened = (np.array(line[name], dtype=np.float64) for name in ("plain", "whitened"))
        out_features, in_features = line["size"]
        found = SingularValues((out_features, in_features), plain, whitened, line["factor"], line["input_rank"])
        self.spectra[matrix] = found

    def lacks_damage(self, truncations: Iterable[Truncation]) -> bool:
        return any(truncation not in self.damage for truncation in truncations)


def read_findings(folder: Path) -> tuple[dict[str, Any], SpectrumJournal]:
    """What a folder's numbers depend on, and what it holds.

    Raises:
        FileNotFoundError, ValueError: as `read_journal`.
    """
    identity, lines = read_journal(folder / JOURNAL, "spectrum")
    found = SpectrumJournal(None)
    try:
        for line in lines:
            found.take(line)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / JOURNAL} is damaged; run surgeon spectrum again on its folder") from error
    return identity, found
