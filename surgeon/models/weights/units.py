"""Orders of a layer's KV groups and neurons, of which a narrowed sublayer keeps the first.

They stay as they stand in the layer, and narrower choices lie within wider ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from surgeon.language.sublayer import ATTENTION, KINDS, Sublayer
from surgeon.models.weights.decompose import TruncatedSVD
from surgeon.models.weights.layers import StoredWeights
from surgeon.models.weights.store import Factors, FactorSource, WeightMatrix


@runtime_checkable
class UnitSource(Protocol):
    """Orders the KV groups and neurons of layers."""

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        """Return the numbers of all of a layer's KV groups, or neurons, the most important one first, (units,).

        Args:
            weights: of the model.

        Raises:
            ValueError: if it knows none for this layer.
        """


@dataclass(frozen=True)
class Magnitude:
    """The largest weights first, all of a unit's matrices together (Frobenius norm)."""

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        """Order units; equal ones, and those of no numbers, stay in order.

        A KV group has its rows of q, k and v and its columns of o; a neuron its rows of gate and up and its column of
        down. Biases do not count. Numbers are summed in float64, so that all ranks agree.
        """
        count = weights.stored_width(kind, layer)
        total = torch.zeros(count, dtype=torch.float64)
        for projection in weights.family.spec(kind, layer).projections:
            matrix = weights.layer_matrix(layer, kind, projection, slice(None), 0).whole().detach()
            if matrix.is_meta:
                break
            norms = torch.linalg.vector_norm(
                matrix, dim=int(projection.reads_stream), dtype=torch.float64
            )
            total += norms.cpu().square().view(count, -1).sum(1)
        return rank_scores(total)


@dataclass(frozen=True)
class RandomUnits:
    """Any order, by a seed and the layer's place."""

    seed: int = 0

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        place = 2 * layer + KINDS.index(kind)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + place) % 2**63)
        return torch.randperm(weights.stored_width(kind, layer), generator=generator)


@dataclass(frozen=True)
class Untold:
    """The default: KV groups of the largest weights, and any neurons.

    Criteria of the weights alone mostly keep worse neurons than chance does (docs/measured-searches.md).
    """

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        if kind == ATTENTION:
            return Magnitude().order(kind, layer, weights)
        return RandomUnits().order(kind, layer, weights)


@dataclass(frozen=True)
class ListedUnits:
    """Listed ones, then the others by their weights."""

    listed: tuple[int, ...]

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        others = Magnitude().order(kind, layer, weights)
        first = torch.tensor(self.listed)
        return torch.cat([first, others[~torch.isin(others, first)]])


@dataclass(frozen=True)
class ScoredUnits:
    """The highest scores first; equal ones stay in order.

    Attributes:
        scores: of each unit of a layer, (units,).
        by: name of the scores.
    """

    scores: Tensor = field(compare=False, repr=False)
    by: str

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        """Order units, or raise ValueError if the scores are of another number of units."""
        if len(self.scores) != (count := weights.stored_width(kind, layer)):
            raise ValueError(
                f"there are scores of {len(self.scores)} units of {kind}{layer}, which has {count}"
            )
        return rank_scores(self.scores)


@dataclass(frozen=True)
class UnitsByLayer:
    """A source of units for each of some layers, and another source of everything else.

    Attributes:
        units: by kind and layer.
        source: of factors; and of the order of other layers, if it knows one, else as `Untold`.
    """

    units: Mapping[tuple[str, int], UnitSource]
    source: FactorSource = field(default_factory=TruncatedSVD)

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        return self.units.get((kind, layer), unit_source(self.source)).order(kind, layer, weights)

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        return self.source.factors(sublayer, role, matrix)


def rank_scores(scores: Tensor) -> Tensor:
    """Return the places of scores, (units,), the highest first; equal ones stay in order."""
    return scores.argsort(descending=True, stable=True)


def unit_source(source: FactorSource | UnitSource) -> UnitSource:
    """Return the source, if it orders units, or the default."""
    if isinstance(source, UnitSource):
        return source
    return Untold()
