"""A folder of factors: what it holds of each matrix, and what there is to know of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.analysis.factors.matrices import Matrix
from surgeon.checkpoint.factor_cache import FactorCache, file_name
from surgeon.checkpoint.header import read_header
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.weights import Factors, WeightMatrix
from surgeon.processes.journal import Journal

JOURNAL = "journal.jsonl"
RECORD = "factors.json"
GRADIENTS = "gradients.safetensors"


@dataclass(frozen=True)
class FactorFacts:
    """What is known of the factors of one matrix.

    Attributes:
        rank: theirs.
        full_rank: the matrix's.
        features: its inputs.
        reached: how many directions of its outputs the inputs have an order for.
        samples: tokens that it was calibrated on; 0 for a method that needs none.
        loss: the error of the outputs on these tokens, as a share of their size; None where it is not known.
    """

    rank: int
    full_rank: int
    features: int
    reached: int
    samples: int
    loss: float | None


@dataclass(frozen=True)
class FactorFolder:
    """The result of `make_factors`.

    Attributes:
        source: of the factors.
        facts: by matrix.
        notes: what the user should know, one line each.
    """

    source: FactorCache
    facts: Mapping[Matrix, FactorFacts]
    notes: tuple[str, ...]


class FactorJournal(Journal):
    """What a folder of factors holds.

    Attributes:
        identity: what the factors depend on, as JSON values.
        facts: by matrix.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        self.identity = identity
        self.facts: dict[Matrix, FactorFacts] = {}
        super().__init__(folder / JOURNAL, "factors", identity)

    def file(self, matrix: Matrix) -> Path:
        """Where its factors lie."""
        return self.folder / file_name(matrix.sublayer, matrix.role)

    def has(self, matrix: Matrix) -> bool:
        """Whether they are there; those that should be and are not, or are damaged, are told of."""
        if matrix not in self.facts:
            return False
        try:
            read_header(self.file(matrix))
        except (FileNotFoundError, ValueError) as error:
            what = "is gone" if isinstance(error, FileNotFoundError) else "is damaged"
            warnings.warn(f"{self.file(matrix)} {what}; it is made again", stacklevel=2)
            return False
        return True

    def add(self, matrix: Matrix, facts: FactorFacts) -> None:
        """Keep what is known of factors that are written."""
        self.keep({"sublayer": str(matrix.sublayer), "role": matrix.role, "made": vars(facts)})

    def take(self, line: Any) -> None:
        (sublayer,) = Program.parse(line["sublayer"]).sublayers()
        self.facts[Matrix(sublayer, line["role"])] = FactorFacts(**line["made"])


class NoSource:
    """The source of factors that are read before they are made."""

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:  # noqa: ARG002
        raise ValueError(f"there are no factors of {role} of {sublayer} in the folder; make them again")


def notes_on(facts: Mapping[Matrix, FactorFacts]) -> Iterator[str]:
    """What a user should know of the text that factors were calibrated on, one line each."""
    calibrated = {matrix: found for matrix, found in facts.items() if found.samples}

    def others(count: int) -> str:
        if count == 1:
            return ""
        return f" (and likewise of {count - 1} more)"

    short = {matrix: found for matrix, found in calibrated.items() if found.samples < found.features}
    if short:
        matrix, found = max(short.items(), key=lambda item: item[1].features)
        yield (
            f"the calibration text has {found.samples} tokens, fewer than the {found.features} inputs of {matrix}"
            f"{others(len(short))}: it says nothing of some of them; give more tokens"
        )
    singular = {matrix: found for matrix, found in calibrated.items() if found.reached < found.full_rank}
    if singular:
        matrix, found = min(singular.items(), key=lambda item: item[1].reached / item[1].full_rank)
        yield (
            f"the inputs of {matrix} reach {found.reached} of {found.full_rank} directions of its outputs"
            f"{others(len(singular))}: beyond these it is truncated as without a text"
        )
