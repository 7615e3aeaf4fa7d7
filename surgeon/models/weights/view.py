"""A model's weights: matrices by role ("q"), (out_features, in_features), of a layer, an average or a slice."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, ROLES, Sublayer, require_experts
from surgeon.models.families import Family, Projection, SublayerSpec
from surgeon.models.families.specs import Bounds, Units, unit_bounds
from surgeon.models.weights.decompose import TruncatedSVD
from surgeon.models.weights.layers import (
    Kept,
    StoredWeights,
    holds_output_bias,
    modules_of,
    narrow_units,
    require_parts,
    units_in,
)
from surgeon.models.weights.store import (
    Averaged,
    Factored,
    Factorised,
    FactorSource,
    Store,
    Tensors,
    WeightMatrix,
    mean,
    read_features,
)
from surgeon.models.weights.units import unit_source


class ModelWeights(StoredWeights):
    """Stored weights by sublayers: of single layers and their averages, narrowed, sliced and factorised.

    Attributes:
        factors: source of factors that a sublayer has and its layer does not; and, if it is a `UnitSource`, of the
            heads and neurons of a narrowed one.
    """

    def __init__(
        self, store: Store, family: Family, head_dim: int, factors: FactorSource | None = None
    ) -> None:
        super().__init__(store, family, head_dim)
        self.factors = factors or TruncatedSVD()
        self._known_orders: dict[tuple[str, int], Tensor] = {}

    def units(self, sublayer: Sublayer) -> Units:
        """Count heads and KV heads, or neurons, of a sublayer before it is sliced, by its layer's shapes.

        Raises:
            ValueError: if layers to be averaged differ in width or are mixtures, a shape is not a multiple of the
                head's width, or the sublayer is to have more of them, or other experts, than its layer; as `spec`.
        """
        self.spec(sublayer)  # refuses parts of what is kept as it is
        if sublayer.kind == FEED_FORWARD:
            counts_of = (self.stored_experts(layer) for layer in sublayer.layers)
            require_experts(sublayer, next((count for count in counts_of if count is not None), None))
        counts = [self.stored_units(sublayer.kind, layer) for layer in sublayer.layers]
        if any(count != counts[0] for count in counts):
            raise ValueError(f"{sublayer} cannot be averaged: its layers differ in width ({counts})")
        return narrow_units(sublayer, counts[0])

    def each_expert(self, sublayer: Sublayer) -> tuple[Sublayer, ...]:
        """Return a mixture's experts one by one, as sublayers that have one each.

        Raises:
            ValueError: if it is no mixture, an average of some, or has experts that its layer does not have.
        """
        stored = self.stored_experts(sublayer.layers[0])
        if stored is None:
            raise ValueError(f"{sublayer} is no mixture of experts")
        require_experts(sublayer, stored)
        chosen = range(stored) if sublayer.experts is None else sublayer.experts
        return tuple(replace(sublayer, experts=(expert,)) for expert in chosen)

    def matrix(self, sublayer: Sublayer, role: str) -> WeightMatrix | Factored | Factorised:
        """Return one matrix of a sublayer, not read yet: of its layer, the average of its layers, or a slice of either.

        Where the sublayer has a rank of the role, it is `Factored` if its layer is stored so, else `Factorised`. A
        mixture has one of each expert, and is asked for those of `each_expert`.
        """
        projection = self.spec(sublayer).projection(role)
        if projection.stacked and len(sublayer.experts or ()) != 1:
            raise ValueError(
                f"{sublayer} has one {role} for each of its experts; name one of them (F4!e0)"
            )
        rank = sublayer.rank(role)
        if rank is None or (len(sublayer.layers) == 1 and rank == self.stored_rank(sublayer, role)):
            kept = self._kept_features(sublayer, projection)
            (expert,) = sublayer.experts if projection.stacked and sublayer.experts else (0,)
            parts = tuple(
                self.layer_matrix(layer, sublayer.kind, projection, kept, expert)
                for layer in sublayer.layers
            )
            if len(parts) == 1:
                return parts[0]
            return Averaged(parts)
        of = self.matrix(replace(sublayer, piece=None, ranks=()), role)
        features = None if sublayer.piece is None else torch.arange(*self._bounds(sublayer, projection))
        return Factorised(self.factors, sublayer, role, of, features, not projection.reads_stream)

    def stored_rank(self, sublayer: Sublayer, role: str) -> int | None:
        """Return the rank of the two factors that a layer stores in place of a matrix; None where it is whole."""
        projection = self.spec(sublayer).projection(role)
        own = self.own_matrix(sublayer.layers[0], sublayer.kind, projection)
        if isinstance(own, Factored):
            return own.rank
        return None

    def stored_ranks(self, sublayer: Sublayer) -> tuple[tuple[str, int], ...]:
        """Return all ranks of a sublayer's (first) layer, as a sublayer has them."""
        has = [projection.role for projection in self.spec(sublayer).projections]
        ranks = (
            (role, self.stored_rank(sublayer, role)) for role in ROLES[sublayer.kind] if role in has
        )
        return tuple((role, rank) for role, rank in ranks if rank is not None)

    def bias(self, sublayer: Sublayer, role: str, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the bias behind a matrix; None where there is none, or where another slice holds it.

        Args:
            dtype: to average layers in and to return; by default as it is stored.
        """
        projection = self.spec(sublayer).projection(role)
        (expert,) = sublayer.experts if projection.stacked and sublayer.experts else (0,)
        paths = [self.bias_path(layer, sublayer.kind, projection, expert) for layer in sublayer.layers]
        if paths[0] not in self or not (projection.reads_stream or holds_output_bias(sublayer)):
            return None
        stacked = expert if len(self.shape(paths[0])) == 2 else None
        if not projection.reads_stream:
            return mean((self.one_of(path, stacked) for path in paths), dtype)
        kept = self._kept_features(sublayer, projection)
        places = (self.places(layer, sublayer.kind, projection)[kept] for layer in sublayer.layers)
        found = (
            read_features(self.store, self.names.stored_name(path), at, 0)
            if stacked is None
            else self.one_of(path, stacked)[at]
            for path, at in zip(paths, places, strict=True)
        )
        return mean(found, dtype)

    def stored_part(self, sublayer: Sublayer, path: str) -> Tensor:
        """Return a tensor of a layer as that stores it, by its path from the layer; of a narrowed sublayer, its part.

        Args:
            sublayer: of one layer, unsliced.
        """
        spec = self.spec(sublayer)
        (layer,) = sublayer.layers
        whole = f"{self.prefix(layer)}{path}"
        module, _, what = path.rpartition(".")
        packed = modules_of(spec).get(module, [])
        if module in spec.feature_norms:
            packed = [spec.projection(spec.feature_norms[module])]
        is_whole = sublayer.width in (None, self.stored_width(sublayer.kind, layer))
        if path == spec.sinks and not is_whole:
            return self.tensor(whole)[self._heads(sublayer, "q")]
        if spec.head_norm.gains == "each" and module in spec.feature_norms and not is_whole:
            return self.tensor(whole)[self._heads(sublayer, spec.feature_norms[module])]
        if is_whole or not packed or (what == "bias" and not packed[0].reads_stream):
            return self.tensor(whole)
        # Heads and neurons lie in the same order, whichever of them there are, also where projections are packed.
        kept = [
            self.places(layer, sublayer.kind, one)[self._kept_features(sublayer, one)] for one in packed
        ]
        dim = packed[0].divided_dim if what == "weight" and module == packed[0].path else 0
        return read_features(
            self.store, self.names.stored_name(whole), torch.cat(kept).sort().values, dim
        )

    def norms(self, sublayer: Sublayer, dtype: torch.dtype | None = None) -> Tensors:
        """Return norms by name: "norm.weight", "norm.bias", "q_norm.weight", "post_norm.weight".

        Args:
            dtype: as in `bias`.
        """
        found = {}
        spec = self.spec(sublayer)
        for what, path in spec.norms.items():
            needed = self.family.norms.parts[:1] if what in spec.stream_norms else ("weight",)
            for part in ("weight", "bias"):
                paths = [f"{self.prefix(layer)}{path}.{part}" for layer in sublayer.layers]
                if part in needed or paths[0] in self:
                    found[f"{what}.{part}"] = mean((self.tensor(path) for path in paths), dtype)
            if path in spec.feature_norms:
                role = spec.feature_norms[path]
                gain = f"{what}.weight"
                by_head = spec.head_norm.gains == "each"
                kept = (
                    self._heads(sublayer, role)
                    if by_head
                    else self._kept_features(sublayer, spec.projection(role))
                )
                found[gain] = found[gain][kept]
        return found

    def sublayer(self, sublayer: Sublayer, dtype: torch.dtype | None = None) -> Tensors:
        """Return the tensors of a sublayer, or of a slice of one; nothing else is read.

        A mixture's matrices and biases are stacked, (experts, out, in) and (experts, out), two factors as well; its
        router has a row for each expert that the sublayer has ("router.weight", "router.bias", "router.correction").

        A bias that is added to the stream comes with slice 0 only, so that slices add up. The norm behind a sublayer
        comes with every slice. Where layers' heads take turns (in the fused form), gains of heads are (heads,
        head_dim); else (head_dim,).

        Args:
            dtype: as in `bias`.

        Returns:
            Matrices (out_features, in_features) and biases by their roles ("q.weight", "q.bias"), norms as in `norms`.
            In place of a matrix of low rank there are its factors ("q.first.weight", "q.second.weight").
        """
        found = self.by_role(sublayer, dtype)
        for name, role in (("q_norm.weight", "q"), ("k_norm.weight", "k")):
            spec = self.spec(sublayer)
            if name in found and spec.head_norm.gains == "turns":
                # One for each head of the slice, of those for one KV group of each turn.
                units = self.units(sublayer)
                count = units[spec.projection(role).unit]
                first, end = unit_bounds(units, spec.projection(role).unit, sublayer.piece)
                per_head = found[name].repeat_interleave(count // units["kv_heads"], dim=0)
                found[name] = per_head.repeat(count // len(per_head), 1)[first:end]
        return found

    def by_role(
        self, sublayer: Sublayer, dtype: torch.dtype | None = None, experts: Sublayer | None = None
    ) -> Tensors:
        """Return them with gains of heads as they are stored.

        Args:
            experts: a mixture with fewer experts than its router knows, whose matrices are taken where ranks divide
                them.
        """
        found = self.norms(sublayer, dtype) | self.router(sublayer, dtype)
        spec = self.spec(sublayer)
        prefixes = [self.prefix(layer) for layer in sublayer.layers]
        for path in (path for path in spec.beside if f"{prefixes[0]}{path}" in self):
            found[path] = mean((self.tensor(f"{prefix}{path}") for prefix in prefixes), dtype)
        if spec.sinks is not None:
            sinks = mean((self.tensor(f"{prefix}{spec.sinks}") for prefix in prefixes), dtype)
            found["sinks"] = sinks[self._heads(sublayer, "q")]
        for projection in spec.projections:
            of = experts if experts is not None and projection.stacked else sublayer
            found |= self._projection_tensors(of, projection, dtype)
        return found

    def written_part(self, sublayer: Sublayer, dtype: torch.dtype | None = None) -> Tensors:
        """Return the part of `by_role` that writes to the stream."""
        found: Tensors = {}
        for projection in self.spec(sublayer).projections:
            if not projection.reads_stream:
                found |= self._projection_tensors(sublayer, projection, dtype)
        return found

    def spec(self, sublayer: Sublayer) -> SublayerSpec:
        """Return the description of a sublayer.

        Raises:
            ValueError: if it is an average of attentions of different kinds; as `require_parts`.
        """
        own = self.family.spec(sublayer.kind, sublayer.layers[0])
        require_parts(sublayer, own, self.family)
        if sublayer.kind == ATTENTION and any(
            self.family.spec(ATTENTION, layer) != own for layer in sublayer.layers
        ):
            raise ValueError(
                f"{sublayer} cannot be averaged: its layers have attentions of different kinds"
            )
        return own

    def router(self, sublayer: Sublayer, dtype: torch.dtype | None = None) -> Tensors:
        """Return the rows, or numbers, of a mixture's router for the experts that the sublayer has."""
        mixture = self.spec(sublayer).mixture
        found = {}
        if mixture is None:
            return {}
        chosen = [one.experts[0] for one in self.each_expert(sublayer) if one.experts]
        for name, path in mixture.whole.items():
            if (place := f"{self.prefix(sublayer.layers[0])}{path}") in self:
                tensor = self.tensor(place) if name.startswith("shared") else self.tensor(place)[chosen]
                found[name] = tensor if dtype is None else tensor.to(dtype)
        return found

    def _projection_tensors(
        self, sublayer: Sublayer, projection: Projection, dtype: torch.dtype | None
    ) -> Tensors:
        if not projection.stacked:
            return self.matrix_tensors(sublayer, projection.role, dtype)
        each = [self.matrix_tensors(one, projection.role, dtype) for one in self.each_expert(sublayer)]
        return {name: torch.stack([one[name] for one in each]) for name in each[0]}

    def matrix_tensors(self, sublayer: Sublayer, role: str, dtype: torch.dtype | None) -> Tensors:
        """Return a matrix or its two factors, and its bias, by role; of a mixture, of one of `each_expert`."""
        matrix = self.matrix(sublayer, role)
        if sublayer.rank(role) is None:
            found = {f"{role}.weight": matrix.whole(dtype)}
        else:
            assert isinstance(matrix, Factored | Factorised)
            first, second = matrix.factors()
            kept = dtype or matrix.dtype
            found = {f"{role}.first.weight": first.to(kept), f"{role}.second.weight": second.to(kept)}
        bias = self.bias(sublayer, role, dtype)
        if bias is None:
            return found
        return found | {f"{role}.bias": bias}

    def _bounds(self, sublayer: Sublayer, projection: Projection) -> Bounds:
        """Return first and end of a slice's features of a projection, among those of the whole sublayer."""
        width = self.unit_width(sublayer.kind)
        first, end = unit_bounds(self.units(sublayer), projection.unit, sublayer.piece, sublayer.span)
        return first * width, end * width

    def _kept_features(self, sublayer: Sublayer, projection: Projection) -> Kept:
        """Index a sublayer's features of a projection, among all of its layer, ascending."""
        inside = slice(*self._bounds(sublayer, projection))
        units = self.stored_units(sublayer.kind, sublayer.layers[0])
        if sublayer.width in (None, units_in(sublayer.kind, units)):
            return inside
        features = (
            units[projection.unit] // units_in(sublayer.kind, units) * self.unit_width(sublayer.kind)
        )
        return (self.kept_units(sublayer)[:, None] * features + torch.arange(features)).flatten()[inside]

    def _heads(self, attention: Sublayer, role: str) -> Tensor:
        """Number the heads of queries, or keys, that an attention, or a slice, has of its layer."""
        projection = self.spec(attention).projection(role)
        heads = self.stored_units(attention.kind, attention.layers[0])[projection.unit]
        features = torch.arange(heads * self.head_dim)[self._kept_features(attention, projection)]
        return features[:: self.head_dim] // self.head_dim

    def kept_units(self, sublayer: Sublayer) -> Tensor:
        """Return a narrowed sublayer's KV groups, or neurons, of its layer: the first of their order, ascending.

        Raises:
            ValueError: as the source of the order does; and if heads of several layers take turns in one (fused).
        """
        (layer,) = sublayer.layers
        key = sublayer.kind, layer
        if key not in self._known_orders:
            norm = self.spec(sublayer).head_norm
            if norm.gains == "turns":
                turns, _ = self.shape(f"{self.prefix(layer)}{norm.queries}.weight")
                if turns > 1:
                    raise ValueError(
                        f"{sublayer}: its layer holds heads of several layers, which cannot be narrowed"
                    )
            self._known_orders[key] = unit_source(self.factors).order(*key, self).cpu()
        return self._known_orders[key][: sublayer.width].sort().values
