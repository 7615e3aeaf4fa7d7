"""Which rows and columns of a checkpoint's tensors a slice of a sublayer consists of, and reading just those.

Heads and neurons are counted from the shapes of the weights, never from the configuration: layers may differ in width
(a fused LP pair is one layer of twice the heads and neurons). However an architecture packs or transposes its
projections, what comes out are matrices by role ("q.weight"), (out_features, in_features).
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon.checkpoint.names import Names
from surgeon.checkpoint.read import Checkpoint
from surgeon.families import Family, Projection, SublayerSpec
from surgeon.families.base import Unit
from surgeon.program import ATTENTION, Sublayer
from surgeon.weights import Tensors, average, unit_features

Bounds = tuple[int, int]


class Source:
    """A checkpoint seen through its family's description.

    Attributes:
        head_dim: the width of one head.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, head_dim: int) -> None:
        self.checkpoint = checkpoint
        self.family = family
        self.names = Names(checkpoint, family)
        self.head_dim = head_dim

    def __contains__(self, path: str) -> bool:
        return self.names.of(path) in self.checkpoint

    def shape(self, path: str) -> tuple[int, ...]:
        """The shape of a tensor, by its path from the causal language model."""
        return self.checkpoint.shape(self.names.of(path))

    def tensor(self, path: str, bounds: Bounds | None = None, dim: int = 0) -> Tensor:
        """A tensor, or a part of it along one dimension."""
        name = self.names.of(path)
        return self.checkpoint.tensor(name) if bounds is None else self.checkpoint.part(name, dim, *bounds)

    def units(self, sublayer: Sublayer) -> dict[Unit, int]:
        """How many heads and KV heads, or neurons, a sublayer's layer has; a layer's shapes say so.

        Raises:
            ValueError: if layers to be averaged differ in shape, or a shape is not a multiple of the head's width.
        """
        counts = [self._layer_units(sublayer.kind, layer) for layer in sublayer.layers]
        if any(count != counts[0] for count in counts):
            raise ValueError(f"{sublayer} averages layers of different widths: {counts}")
        return counts[0]

    def _layer_units(self, kind: str, layer: int) -> dict[Unit, int]:
        units: dict[Unit, int] = {}
        width = self._width(kind)
        # Projections on their own first: what they say is needed to tell packed ones apart.
        for path, packed in sorted(_modules(self.family.spec(kind)).items(), key=lambda item: len(item[1])):
            name = f"{self.family.layers}.{layer}.{path}.weight"
            features = self.shape(name)[packed[0].divided_dim]
            known = sum(units.get(projection.unit, 0) for projection in packed)
            missing = [projection.unit for projection in packed if projection.unit not in units]
            rest = features // width - known
            if features % width or (missing and rest % len(missing)) or (not missing and rest):
                raise ValueError(
                    f"{name} has shape {self.shape(name)}, which does not fit heads of {width} or the other projections"
                )
            units |= dict.fromkeys(missing, rest // len(missing) if missing else 0)
        return units

    def _width(self, kind: str) -> int:
        return self.head_dim if kind == ATTENTION else 1

    def sublayer(self, sublayer: Sublayer, dtype: torch.dtype) -> Tensors:
        """The tensors of one slice of a sublayer; nothing else is read.

        A bias that is added to the stream comes with slice 0 only, so that slices add up.

        Returns:
            Weights (out_features, in_features) and biases of the projections by their roles ("q.weight"), and those of
            the norms before them: "norm.weight", "q_norm.weight" and so on.
        """
        slices = [self._layer_slice(sublayer, layer, dtype) for layer in sublayer.layers]
        return average(slices) if len(slices) > 1 else slices[0]

    def post_norm(self, sublayer: Sublayer, dtype: torch.dtype) -> Tensors:
        """The tensor of the norm behind a sublayer, "post_norm.weight"; nothing where the family has none."""
        path = self.family.spec(sublayer.kind).post_norm
        if path is None:
            return {}
        names = (f"{self.family.layers}.{layer}.{path}.weight" for layer in sublayer.layers)
        return average({"post_norm.weight": self.tensor(name).to(dtype)} for name in names)

    def _layer_slice(self, sublayer: Sublayer, layer: int, dtype: torch.dtype) -> Tensors:
        spec, prefix = self.family.spec(sublayer.kind), f"{self.family.layers}.{layer}."
        found: Tensors = {}
        for role, path in zip(("norm", "q_norm", "k_norm"), (spec.norm, *spec.head_norms), strict=False):
            for part in ("weight", "bias"):
                if part == "weight" or f"{prefix}{path}.{part}" in self:
                    found[f"{role}.{part}"] = self.tensor(f"{prefix}{path}.{part}")
        units, width = self.units(sublayer), self._width(sublayer.kind)
        for norm in ("q_norm.weight", "k_norm.weight"):
            if norm in found and found[norm].dim() == 2:
                found[norm] = _gains_in_turn(found[norm], "heads" if norm[0] == "q" else "kv_heads", units, sublayer)
        for path, packed in _modules(spec).items():
            kept = {}
            for projection in packed:
                first, end = unit_bounds(units[projection.unit], sublayer.piece)
                kept[projection.role] = unit_features(projection, spec, units, width)[first:end].flatten()
            found |= self._projections(f"{prefix}{path}", packed, kept, _has_bias(packed[0], sublayer))
        return {name: tensor.to(dtype) for name, tensor in found.items()}

    def _projections(self, path: str, packed: list[Projection], kept: dict[str, Tensor], with_bias: bool) -> Tensors:
        """The kept features of the projections packed into one module, which is read once."""
        together = torch.cat([kept[projection.role] for projection in packed]).sort().values
        dim = packed[0].divided_dim
        weight, bias = self._features(f"{path}.weight", together, dim), None
        if with_bias and f"{path}.bias" in self:
            divided = packed[0].reads_stream
            bias = self._features(f"{path}.bias", together, 0) if divided else self.tensor(f"{path}.bias")
        found = {}
        for projection in packed:
            places = torch.searchsorted(together, kept[projection.role])
            own = weight if len(packed) == 1 else weight.index_select(dim, places)
            found[f"{projection.role}.weight"] = own.T if projection.transposed else own
            if bias is not None:
                found[f"{projection.role}.bias"] = bias if len(packed) == 1 else bias[places]
        return found

    def _features(self, path: str, indices: Tensor, dim: int) -> Tensor:
        """The elements of a tensor along one dimension that have these ascending indices; nothing between is read."""
        breaks = (indices.diff() != 1).nonzero().flatten() + 1
        runs = indices.tensor_split(breaks)
        return torch.cat([self.tensor(path, (int(run[0]), int(run[-1]) + 1), dim) for run in runs], dim)


def _modules(spec: SublayerSpec) -> dict[str, list[Projection]]:
    """A sublayer's projections by the module they lie in."""
    found: dict[str, list[Projection]] = {}
    for projection in spec.projections:
        found.setdefault(projection.path, []).append(projection)
    return found


def _gains_in_turn(gains: Tensor, unit: Unit, units: dict[Unit, int], sublayer: Sublayer) -> Tensor:
    """A gain for each head of a slice, (heads, head_dim), of a fused layer, in which several layers' heads take turns.

    Args:
        gains: of one KV group of each turn, (turns, head_dim).
    """
    first, end = unit_bounds(units[unit], sublayer.piece)
    per_head = gains.repeat_interleave(units[unit] // units["kv_heads"], dim=0)
    return per_head.repeat(units[unit] // len(per_head), 1)[first:end]


def _has_bias(projection: Projection, sublayer: Sublayer) -> bool:
    return projection.reads_stream or sublayer.piece is None or sublayer.piece[0] == 0


def unit_bounds(size: int, piece: tuple[int, int] | None) -> Bounds:
    """First and end of the units of one slice.

    Where there are more slices than units (KV heads shared by many heads), several slices hold the same one.
    """
    index, count = piece or (0, 1)
    return index * size // count, -(-(index + 1) * size // count)


def indivisible(sublayer: Sublayer, units: dict[Unit, int], replicate: bool) -> str | None:
    """Why a sublayer cannot be cut into the slices its `piece` says; None if it can.

    Args:
        replicate: whether more slices than KV heads are fine (slices then hold copies of a KV head).
    """
    if sublayer.piece is None:
        return None
    count = sublayer.piece[1]

    def divides(unit: Unit, size: int) -> bool:
        return size % count == 0 or (replicate and unit == "kv_heads" and count % size == 0)

    if all(divides(unit, size) for unit, size in units.items()):
        return None
    whole = "~".join(f"{sublayer.kind}{layer}" for layer in sublayer.layers)
    sizes = " and ".join(f"{size} {unit.replace('kv_', 'KV ')}" for unit, size in units.items())
    return f"the {sizes} of {whole} do not divide into {count} slices"
