"""A model's weights by layer and role, wherever they are and however their architecture stores them.

Heads and neurons are counted from the shapes of the weights, never from the configuration: layers may differ in width
(a fused LP pair is one layer of twice the heads and neurons). However an architecture packs or transposes its
projections, what comes out are matrices by role ("q"), (out_features, in_features), of a layer, an average or a slice.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from surgeon.families import Family, SublayerSpec
from surgeon.program import ATTENTION, Sublayer
from surgeon.weights.layout import Bounds, Units, holds_output_bias, modules_of, unit_bounds, unit_features
from surgeon.weights.matrix import Averaged, Dense, Matrix, mean, read_features
from surgeon.weights.names import Names
from surgeon.weights.store import Store, Tensors


class ModelWeights:
    """What a store holds, seen through its family's description.

    Attributes:
        head_dim: the width of one head.
    """

    def __init__(self, store: Store, family: Family, head_dim: int) -> None:
        self.store = store
        self.family = family
        self.names = Names(store, family)
        self.head_dim = head_dim

    def __contains__(self, path: str) -> bool:
        return self.names.of(path) in self.store

    def shape(self, path: str) -> tuple[int, ...]:
        """The shape of a tensor, by its path from the causal language model."""
        return self.store.shape(self.names.of(path))

    def tensor(self, path: str, bounds: Bounds | None = None, dim: int = 0) -> Tensor:
        """A tensor, or a part of it along one dimension."""
        name = self.names.of(path)
        return self.store.tensor(name) if bounds is None else self.store.part(name, dim, *bounds)

    def count_layers(self) -> int:
        """How many layers are stored; the configuration of an edited model may count attentions of its program."""
        pattern = re.compile(rf"{re.escape(self.names.layers)}(\d+)\.")
        return 1 + max(int(match[1]) for name in self.store.names() if (match := pattern.match(name)))

    def units(self, sublayer: Sublayer) -> Units:
        """How many heads and KV heads, or neurons, a sublayer's layer has; a layer's shapes say so.

        Raises:
            ValueError: if layers to be averaged differ in width, or a shape is not a multiple of the head's width.
        """
        counts = [self._layer_units(sublayer.kind, layer) for layer in sublayer.layers]
        if any(count != counts[0] for count in counts):
            raise ValueError(f"{sublayer} cannot be averaged: its layers differ in width ({counts})")
        return counts[0]

    def matrix(self, sublayer: Sublayer, role: str) -> Matrix:
        """One matrix of a sublayer, not read yet: of its layer, the average of its layers, or a slice of either."""
        spec = self.family.spec(sublayer.kind)
        projection, kept = spec.projection(role), self._kept(sublayer, role)
        names = [self.names.of(f"{self._layer(layer)}{projection.path}.weight") for layer in sublayer.layers]
        dim = projection.divided_dim
        features = None if len(kept) == self.store.shape(names[0])[dim] else kept
        parts = tuple(Dense(self.store, name, dim, features, projection.transposed) for name in names)
        return parts[0] if len(parts) == 1 else Averaged(parts)

    def bias(self, sublayer: Sublayer, role: str, dtype: torch.dtype | None = None) -> Tensor | None:
        """The bias behind a matrix; None where there is none, or where another slice holds it.

        Args:
            dtype: to average layers in and to return; by default as it is stored.
        """
        projection = self.family.spec(sublayer.kind).projection(role)
        paths = [f"{self._layer(layer)}{projection.path}.bias" for layer in sublayer.layers]
        if paths[0] not in self or not (projection.reads_stream or holds_output_bias(sublayer)):
            return None
        if not projection.reads_stream:
            return mean((self.tensor(path) for path in paths), dtype)
        kept = self._kept(sublayer, role)
        return mean((read_features(self.store, self.names.of(path), kept, 0) for path in paths), dtype)

    def norms(self, sublayer: Sublayer, dtype: torch.dtype | None = None) -> Tensors:
        """Its norms by what they are for: "norm.weight", "norm.bias", "q_norm.weight", "post_norm.weight".

        Args:
            dtype: as in `bias`.
        """
        found = {}
        for what, path in norm_paths(self.family.spec(sublayer.kind)).items():
            for part in ("weight", "bias"):
                paths = [f"{self._layer(layer)}{path}.{part}" for layer in sublayer.layers]
                if part == "weight" or paths[0] in self:
                    found[f"{what}.{part}"] = mean((self.tensor(path) for path in paths), dtype)
        return found

    def sublayer(self, sublayer: Sublayer, dtype: torch.dtype | None = None) -> Tensors:
        """All that it takes to compute a sublayer, or a slice of one; nothing else is read.

        A bias that is added to the stream comes with slice 0 only, so that slices add up. The norm behind a sublayer is
        of its whole output, and comes with every slice. Where layers' heads take turns (in the fused form), gains of
        heads are there for each head, (heads, head_dim); else they are (head_dim,).

        Args:
            dtype: as in `bias`.

        Returns:
            Matrices (out_features, in_features) and biases by their roles ("q.weight", "q.bias"), norms as in `norms`.
        """
        found = self.by_role(sublayer, dtype)
        for name, role in (("q_norm.weight", "q"), ("k_norm.weight", "k")):
            if name in found and found[name].dim() == 2:
                found[name] = self._gains_in_turn(found[name], sublayer, role)
        return found

    def by_role(self, sublayer: Sublayer, dtype: torch.dtype | None = None) -> Tensors:
        """The same, with gains of heads as they are stored."""
        found = self.norms(sublayer, dtype)
        for projection in self.family.spec(sublayer.kind).projections:
            role = projection.role
            found[f"{role}.weight"] = self.matrix(sublayer, role).whole(dtype)
            bias = self.bias(sublayer, role, dtype)
            if bias is not None:
                found[f"{role}.bias"] = bias
        return found

    def _gains_in_turn(self, gains: Tensor, sublayer: Sublayer, role: str) -> Tensor:
        """A gain for each head of a slice of a fused layer, of gains for one KV group of each turn."""
        units = self.units(sublayer)
        count = units[self.family.spec(sublayer.kind).projection(role).unit]
        first, end = unit_bounds(count, sublayer.piece)
        per_head = gains.repeat_interleave(count // units["kv_heads"], dim=0)
        return per_head.repeat(count // len(per_head), 1)[first:end]

    def _layer(self, layer: int) -> str:
        return f"{self.family.layers}.{layer}."

    def width(self, kind: str) -> int:
        """How many features a head of an attention, or a neuron of a feed-forward, has."""
        return self.head_dim if kind == ATTENTION else 1

    def _layer_units(self, kind: str, layer: int) -> Units:
        units: Units = {}
        width = self.width(kind)
        # Projections on their own first: what they say is needed to tell packed ones apart.
        for path, packed in sorted(modules_of(self.family.spec(kind)).items(), key=lambda item: len(item[1])):
            name = f"{self._layer(layer)}{path}.weight"
            count = self.shape(name)[packed[0].divided_dim]
            known = sum(units.get(projection.unit, 0) for projection in packed)
            missing = [projection.unit for projection in packed if projection.unit not in units]
            rest = count // width - known
            if count % width or (missing and rest % len(missing)) or (not missing and rest):
                raise ValueError(
                    f"{name} has shape {self.shape(name)}, which does not fit heads of {width} or the other projections"
                )
            units |= dict.fromkeys(missing, rest // len(missing) if missing else 0)
        return units

    def _kept(self, sublayer: Sublayer, role: str) -> Tensor:
        """The indices in its module of the features that a sublayer has of a projection."""
        spec, units = self.family.spec(sublayer.kind), self.units(sublayer)
        projection = spec.projection(role)
        first, end = unit_bounds(units[projection.unit], sublayer.piece)
        return unit_features(projection, spec, units, self.width(sublayer.kind))[first:end].flatten()


def norm_paths(spec: SublayerSpec) -> dict[str, str]:
    """Paths of a sublayer's norms from its layer, by what they are for."""
    paths = dict(zip(("norm", "q_norm", "k_norm"), (spec.norm, *spec.head_norms), strict=False))
    return paths if spec.post_norm is None else paths | {"post_norm": spec.post_norm}
