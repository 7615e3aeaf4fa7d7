"""Factors made once and then read from a folder: making them costs much more.

A folder holds one safetensors file for each matrix of each sublayer, "A4.q64.safetensors", with the tensors "first"
and "second". A file gets its name when it is complete, so that killed work goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from surgeon.checkpoint.tensor_file import read_header
from surgeon.language.sublayer import Sublayer
from surgeon.models.weights import Factors, FactorSource, WeightMatrix, unit_source
from surgeon.models.weights.layers import StoredWeights
from surgeon.processes.files import whole_file


@dataclass(eq=False)
class FactorCache:
    """Factors of another source, made once.

    Attributes:
        folder: where to keep them; without one they are made on every call.
    """

    source: FactorSource
    folder: Path | None = None
    # So that threads that want the same factors make them once.
    _making: Lock = field(default_factory=Lock, init=False, repr=False)

    @contextmanager
    def inside(self, folder: Path) -> Iterator[None]:
        """Keep them in another folder while in the block."""
        before = self.folder
        self.folder = folder
        try:
            yield
        finally:
            self.folder = before

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        """Read them from the folder, or make them."""
        if self.folder is None:
            return self.source.factors(sublayer, role, matrix)
        path = self.folder / file_name(sublayer, role)
        with self._making:
            if not path.exists():
                write_factors(path, self.source.factors(sublayer, role, matrix))
        if set(read_header(path)) != set(Factors._fields):
            raise ValueError(
                f"{path} does not hold the two factors of a matrix; remove it, and they are made again"
            )
        with safe_open(path, framework="pt") as file:
            return Factors(*map(file.get_tensor, Factors._fields))

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        return unit_source(self.source).order(kind, layer, weights)


def file_name(sublayer: Sublayer, role: str) -> str:
    """Name the file of one matrix's factors as programs name the matrix."""
    alone = replace(
        sublayer, piece=None, ranks=tuple(entry for entry in sublayer.ranks if entry[0] == role)
    )
    return f"{str(alone).replace('@', '.')}.safetensors"


def write_factors(path: Path, factors: Factors) -> None:
    """Write one file of a folder, whole or not at all."""
    with whole_file(path) as beside:
        save_file({name: tensor.contiguous() for name, tensor in factors._asdict().items()}, beside)
