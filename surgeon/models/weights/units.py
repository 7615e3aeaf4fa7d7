"""Which KV groups and neurons a narrowed sublayer keeps: an order of each layer's, the most important ones first.

A sublayer of n of them has the first n, as they stand in the layer, so that narrower choices lie within wider ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from surgeon.language.sublayer import ATTENTION, KINDS, Sublayer
from surgeon.models.weights.decompose import TruncatedSVD
from surgeon.models.weights.factors import Factors, FactorSource
from surgeon.models.weights.layers import StoredWeights
from surgeon.models.weights.matrix import WeightMatrix


@runtime_checkable
class UnitSource(Protocol):
    """What knows how important the KV groups and neurons of layers are."""

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        """The numbers of all of a layer's KV groups, or neurons, the most important one first, (units,).

        Args:
            weights: of the model.

        Raises:
            ValueError: if it knows none for this layer.
        """


@dataclass(frozen=True)
class Magnitude:
    """Those first whose weights are largest, all of a unit's matrices together (Frobenius norm)."""

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        """As `UnitSource` has it; equal ones, and those of no numbers, in the order in which they stand."""
        return descending(magnitudes(kind, layer, weights))


@dataclass(frozen=True)
class RandomUnits:
    """Any order, which follows from a seed and from where the layer stands."""

    seed: int = 0

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        place = 2 * layer + KINDS.index(kind)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + place) % 2**63)
        return torch.randperm(weights.stored_width(kind, layer), generator=generator)


@dataclass(frozen=True)
class Untold:
    """What is kept where nothing says it: KV groups of the largest weights, and any neurons.

    Criteria of the weights alone mostly keep worse neurons than chance does (docs/measured-searches.md).
    """

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        source = Magnitude() if kind == ATTENTION else RandomUnits()
        return source.order(kind, layer, weights)


@dataclass(frozen=True)
class ListedUnits:
    """Those that are listed, then the others by their weights."""

    listed: tuple[int, ...]

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        others = Magnitude().order(kind, layer, weights)
        first = torch.tensor(self.listed)
        return torch.cat([first, others[~torch.isin(others, first)]])


@dataclass(frozen=True)
class ScoredUnits:
    """Those first that have the highest scores; of equal ones those that stand first.

    Attributes:
        scores: of each unit of a layer, (units,).
        by: what they are, for those who ask.
    """

    scores: Tensor = field(compare=False, repr=False)
    by: str

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        """As `UnitSource` has it.

        Raises:
            ValueError: if the scores are of another number of units.
        """
        if len(self.scores) != (count := weights.stored_width(kind, layer)):
            raise ValueError(f"there are scores of {len(self.scores)} units of {kind}{layer}, which has {count}")
        return descending(self.scores)


@dataclass(frozen=True)
class UnitsByLayer:
    """A source of units for each of some layers, and what another source has of everything else.

    Attributes:
        units: by kind and layer.
        source: of factors; and of the order of other layers, if it knows one, else as `Untold`.
    """

    units: Mapping[tuple[str, int], UnitSource]
    source: FactorSource = field(default_factory=TruncatedSVD)

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        """As the layer's source has it."""
        return self.units.get((kind, layer), unit_source(self.source)).order(kind, layer, weights)

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        return self.source.factors(sublayer, role, matrix)


def magnitudes(kind: str, layer: int, weights: StoredWeights) -> Tensor:
    """The squared norm of each KV group's or neuron's weights, (units,), in float64, so that all ranks find the same.

    Of a KV group those are its rows of q, k and v and its columns of o; of a neuron its rows of gate and up and its
    column of down. Biases do not count. All are zero of weights that are on the meta device.
    """
    count = weights.stored_width(kind, layer)
    total = torch.zeros(count, dtype=torch.float64)
    for projection in weights.family.spec(kind, layer).projections:
        matrix = weights.layer_matrix(layer, kind, projection, slice(None), 0).whole().detach()
        if matrix.is_meta:
            return total
        norms = torch.linalg.vector_norm(matrix, dim=int(projection.reads_stream), dtype=torch.float64)
        total += norms.cpu().square().view(count, -1).sum(1)
    return total


def descending(scores: Tensor) -> Tensor:
    """The places of scores, (units,), the highest first; of equal ones the first."""
    return scores.argsort(descending=True, stable=True)


def unit_source(source: FactorSource | UnitSource) -> UnitSource:
    """What says which units are kept: the source, if it does."""
    if isinstance(source, UnitSource):
        return source
    return Untold()
