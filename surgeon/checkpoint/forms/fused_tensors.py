"""The tensors of the fused form.

A layer that holds the sublayers S_1 ... S_k side by side computes the sum of their outputs. With g_i and s_i the gain
and the shift of S_i's own norm, the stored layer's norm multiplies by 1 and has shift 0, and

    rows     q, k, v, gate, up: W = [W_1 diag(g_1); W_2 diag(g_2); ...], b = [b_1 + W_1 s_1; b_2 + W_2 s_2; ...]
    columns  o, down: W = [W_1 W_2 ...], and the biases' sum

where heads do not lie one layer after the other but take turns, one KV group of each layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from surgeon.checkpoint.forms.planning import (
    Compute,
    Computed,
    PlannedTensor,
    TensorPlanner,
    averaging_dtype,
    known_modules,
    of_parts,
)
from surgeon.checkpoint.forms.stored_layers import StoredLayer
from surgeon.checkpoint.stored import StoredModel
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, Sublayer
from surgeon.models.families import Projection
from surgeon.models.families.fused import FUSED, POSITIONS, PROJECTIONS
from surgeon.models.weights import Dense, FactorSource, ModelWeights
from surgeon.models.weights.quantised import stacked

ROWS = 64  # that are computed at a time: they stay in the second cache, and the heap keeps them for the next ones


class FusedPlanner(TensorPlanner):
    """Plans the tensors of the fused form: every family's under the same names, each projection on its own.

    Attributes:
        biases: whether the written projections have a bias, by role. They have where any layer's has, or where a
            norm's shift has to go somewhere; layers without one get zeros.
    """

    def __init__(self, original: StoredModel, dtype: torch.dtype | None, factors: FactorSource | None = None) -> None:
        super().__init__(original, dtype, factors)
        stored = [name for name in self.source.names() if name.startswith(self.prefix)]
        self.biases = {
            projection.role: (projection.reads_stream and self.family.norm_kind == "layer")
            or any(name.endswith(f".{projection.path}.bias") for name in stored)
            for spec in (self.family.attention, self.family.mlp)
            for projection in spec.projections
        }

    def plan(self, layers: tuple[StoredLayer, ...]) -> list[PlannedTensor]:
        planned = self._moved(f"{FUSED.embedding}.weight", self.family.embedding)
        if self.family.position_embedding is not None:
            planned += self._moved(f"{POSITIONS}.weight", self.family.position_embedding)
        for index, layer in enumerate(layers):
            for kind, sublayers in ((ATTENTION, layer.attention), (FEED_FORWARD, layer.feed_forward)):
                for sublayer in sublayers:  # whose tensors none may be left behind
                    known = known_modules(self.family.spec(kind))
                    for path in self.paths(sublayer):
                        if path.rpartition(".")[0] not in known:
                            raise ValueError(f"{path} of {self.family.name} cannot be stored in the fused form")
                tensors = self._norms(kind, sublayers) | self._projections(kind, sublayers) if sublayers else {}
                for path, compute in tensors.items():
                    name = f"{FUSED.layers}.{index}.{path}"
                    planned += self._side_by_side(name, sublayers) or self.planned(name, compute)
        for part in self.family.norm_parts:
            planned += self._moved(f"{FUSED.final_norm}.{part}", self.family.final_norm, part)
        return planned + self._head()

    def _head(self) -> list[PlannedTensor]:
        tied = self.config.tie_word_embeddings
        planned = list[PlannedTensor]()
        planned += [] if tied else self._moved(f"{FUSED.head}.weight", self.family.head)
        planned += self._moved(f"{FUSED.head}.bias", self.family.head, "bias") if self.family.head_bias else []
        return planned

    def _moved(self, name: str, path: str, part: str = "weight") -> list[PlannedTensor]:
        whole = f"{path}.{part}"
        if whole not in self.weights:
            stored = self.weights.names.of(whole)
            raise ValueError(f"{self.source.folder} has no tensor {stored}, which {self.family.name} needs")
        return self.planned(name, lambda weights: weights.tensor(whole))

    def _norms(self, kind: str, sublayers: tuple[Sublayer, ...]) -> dict[str, Compute]:
        """The norm before a sublayer, which does no more than norm where several lie side by side; and head norms."""
        own = self.family.spec(kind)
        written = FUSED.spec(kind)
        gain = torch.zeros_like if self.family.unit_offset else torch.ones_like
        tensors: dict[str, Compute] = {}
        for part in self.family.norm_parts:
            compute = partial(self.part, sublayers[0], f"{own.norm}.{part}")
            if len(sublayers) > 1:  # the gains and shifts of all of them are folded into what follows
                compute = partial(_as, gain if part == "weight" else torch.zeros_like, compute)
            tensors[f"{written.norm}.{part}"] = compute
        for path in own.head_norms:
            tensors[f"{path}.weight"] = partial(self._head_gains, sublayers, f"{path}.weight")
        return tensors

    def _projections(self, kind: str, sublayers: tuple[Sublayer, ...]) -> dict[str, Compute]:
        tensors: dict[str, Compute] = {}
        for projection in self.family.spec(kind).projections:
            path = PROJECTIONS[projection.role].path
            tensors[f"{path}.weight"] = partial(self._weight, sublayers, projection)
            if self.biases[projection.role]:
                tensors[f"{path}.bias"] = partial(self._bias, sublayers, projection)
        return tensors

    def _weight(self, sublayers: tuple[Sublayer, ...], projection: Projection, weights: ModelWeights) -> Computed:
        """(out_features, in_features) of all sublayers; float32 where several have their norms' gains folded in."""
        matrices = [self._matrix(sublayer, projection, weights) for sublayer in sublayers]
        if len(matrices) == 1:
            return matrices[0]
        if not projection.reads_stream:
            # Rows that have the columns of all matrices.
            parts = zip(*(matrix.split(ROWS) for matrix in matrices), strict=True)
            return (self._in_turn(list(rows), sublayers, dim=1) for rows in parts)
        if not self.family.norm_parts:
            return self._in_turn(matrices, sublayers, dim=0)
        offset = int(self.family.unit_offset)
        gains = [offset + self._norm_part(sublayer, "weight", weights).float() for sublayer in sublayers]
        return self._folded(matrices, gains, sublayers)

    def _side_by_side(self, name: str, sublayers: tuple[Sublayer, ...]) -> list[PlannedTensor]:
        """What holds quantised matrices as columns of one, codes and scales as they are; nothing if that is not exact.

        Args:
            name: of the matrix.
        """
        projections = self.family.spec(sublayers[0].kind).projections
        written = (one for one in projections if not one.reads_stream)
        projection = next((one for one in written if name.endswith(f".{PROJECTIONS[one.role].path}.weight")), None)
        if projection is None or len(sublayers) < 2 or self.dtype is not None:
            return []
        found = [self.weights.matrix(sublayer, projection.role) for sublayer in sublayers]
        whole = [one.name for one in found if isinstance(one, Dense) and one.features is None and not one.transposed]
        matrices = [self.source.quantised[one] for one in whole if one in self.source.quantised]
        if len(matrices) < len(sublayers):
            return []
        return of_parts(name, matrices[0], stacked(matrices, 1, self._blocks(sublayers)) or {})

    def _folded(self, matrices: list[Tensor], gains: list[Tensor], sublayers: tuple[Sublayer, ...]) -> Iterator[Tensor]:
        """Rows of all matrices, a block of each in turn, multiplied with a gain per column."""
        blocks = self._blocks(sublayers)
        for turn in range(blocks):
            for matrix, gain in zip(matrices, gains, strict=True):
                for rows in matrix.unflatten(0, (blocks, -1))[turn].split(ROWS):
                    yield rows.to(torch.float32, copy=True).mul_(gain)  # one new tensor, not two

    def _bias(self, sublayers: tuple[Sublayer, ...], projection: Projection, weights: ModelWeights) -> Tensor:
        """(out_features,) of all sublayers; float32 if there are several."""
        biases = []
        for sublayer in sublayers:
            bias = weights.bias(sublayer, projection.role, averaging_dtype(sublayer))
            if bias is None:
                matrix = self._matrix(sublayer, projection, weights)
                bias = matrix.new_zeros(matrix.shape[0])
            biases.append(bias)
        if len(biases) == 1:
            return biases[0]
        biases = [bias.float() for bias in biases]
        if not projection.reads_stream:
            return torch.stack(biases).sum(dim=0)
        if self.family.norm_kind == "layer":
            for index, sublayer in enumerate(sublayers):
                shift = self._norm_part(sublayer, "bias", weights).float()
                biases[index] = biases[index] + self._matrix(sublayer, projection, weights).float() @ shift
        return self._in_turn(biases, sublayers, dim=0)

    def _matrix(self, sublayer: Sublayer, projection: Projection, weights: ModelWeights) -> Tensor:
        """A sublayer's own weight for one projection, (out_features, in_features)."""
        return weights.matrix(sublayer, projection.role).whole(averaging_dtype(sublayer))

    def _head_gains(self, sublayers: tuple[Sublayer, ...], path: str, weights: ModelWeights) -> Tensor:
        """Gains of the norms of heads, (turns, head_dim), in the order in which the sublayers' heads take turns."""
        blocks = self._blocks(sublayers)
        groups = groups_of(sublayers, self.family.units(self.config)["kv_heads"])
        turns = [count // blocks for count in groups]
        gains = [self.part(sublayer, path, weights) for sublayer in sublayers]
        return torch.cat([gain.expand(times, -1) for gain, times in zip(gains, turns, strict=True)])

    def _norm_part(self, sublayer: Sublayer, part: str, weights: ModelWeights) -> Tensor:
        return self.part(sublayer, f"{self.family.spec(sublayer.kind, sublayer.layers[0]).norm}.{part}", weights)

    def _in_turn(self, parts: list[Tensor], sublayers: tuple[Sublayer, ...], dim: int) -> Tensor:
        """Heads (or neurons) of several sublayers along one dimension, a block of each in turn."""
        blocks = self._blocks(sublayers)
        return torch.cat([part.unflatten(dim, (blocks, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)

    def _blocks(self, sublayers: tuple[Sublayer, ...]) -> int:
        """How many times all sublayers' heads take turns: as often as each has whole KV groups for it.

        So every tensor-parallel rank that gets whole turns has heads of each layer in the same order, and norms of
        heads need one gain per turn, whichever the rank.
        """
        if sublayers[0].kind == FEED_FORWARD:
            return 1
        return math.gcd(*groups_of(sublayers, self.family.units(self.config)["kv_heads"]))


def groups_of(sublayers: tuple[Sublayer, ...], units: int) -> list[int]:
    """How many KV heads, or neurons, each of several sublayers has; a whole one so many."""
    widths = [units if sublayer.width is None else sublayer.width for sublayer in sublayers]
    return [width // (one.piece[1] if one.piece else 1) for width, one in zip(widths, sublayers, strict=True)]


def _as(like: Callable[[Tensor], Tensor], compute: Callable[[ModelWeights], Tensor], weights: ModelWeights) -> Tensor:
    return like(compute(weights))
