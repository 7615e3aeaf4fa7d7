"""Which rows and columns of a checkpoint's tensors a slice of a sublayer consists of, and reading just those.

Heads and neurons are counted from the shapes of the weights, never from the configuration: layers may differ in width
(a fused LP pair is one layer of twice the heads and neurons).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from surgeon.checkpoint.read import Checkpoint
from surgeon.families import Family, Projection
from surgeon.families.base import Unit
from surgeon.program import ATTENTION, Sublayer
from surgeon.weights import Tensors, average

Bounds = tuple[int, int]


class Source:
    """A checkpoint seen through its family's description.

    Attributes:
        head_dim: the width of one head.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, head_dim: int) -> None:
        self.checkpoint = checkpoint
        self.family = family
        self.head_dim = head_dim

    @cached_property
    def _root(self) -> str:
        """What tensor names leave out: checkpoints of bare decoders lack the causal language model's own prefix."""
        name = f"{self.family.embedding}.weight"
        root = self.family.embedding.partition(".")[0] + "."
        return root if name not in self.checkpoint and name.removeprefix(root) in self.checkpoint else ""

    def _name(self, path: str) -> str:
        return path.removeprefix(self._root) if self._root else path

    def __contains__(self, path: str) -> bool:
        return self._name(path) in self.checkpoint

    def shape(self, path: str) -> tuple[int, ...]:
        """The shape of a tensor, by its path from the causal language model."""
        return self.checkpoint.shape(self._name(path))

    def dtype(self, path: str) -> torch.dtype:
        """The dtype a tensor is stored in."""
        return self.checkpoint.dtype(self._name(path))

    def tensor(self, path: str, bounds: Bounds | None = None, dim: int = 0) -> Tensor:
        """A tensor, or a part of it along one dimension."""
        name = self._name(path)
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
        for projection in self.family.spec(kind).projections:
            path = f"{self.family.layers}.{layer}.{projection.path}.weight"
            features = self.shape(path)[0 if projection.reads_stream else 1]
            width = self.head_dim if kind == ATTENTION else 1
            if features % width or units.setdefault(projection.unit, features // width) != features // width:
                raise ValueError(
                    f"{path} has shape {self.shape(path)}, which does not fit heads of {width} or the other projections"
                )
        return units

    def sublayer(self, sublayer: Sublayer, dtype: torch.dtype) -> Tensors:
        """The tensors of one slice of a sublayer, by path from the layer; nothing else is read.

        A bias that is added to the stream comes with slice 0 only, so that slices add up.
        """
        slices = [self._layer_slice(sublayer, layer, dtype) for layer in sublayer.layers]
        return average(slices) if len(slices) > 1 else slices[0]

    def _layer_slice(self, sublayer: Sublayer, layer: int, dtype: torch.dtype) -> Tensors:
        spec, units = self.family.spec(sublayer.kind), self.units(sublayer)
        width = self.head_dim if sublayer.kind == ATTENTION else 1
        prefix = f"{self.family.layers}.{layer}."
        bounds: dict[str, tuple[Bounds | None, int]] = {}
        for norm in (spec.norm, *spec.head_norms):
            bounds[f"{norm}.weight"] = bounds[f"{norm}.bias"] = (None, 0)
        for projection in spec.projections:
            first, end = unit_bounds(units[projection.unit], sublayer.piece)
            rows_or_columns = (first * width, end * width)
            bounds[f"{projection.path}.weight"] = (rows_or_columns, 0 if projection.reads_stream else 1)
            if _has_bias(projection, sublayer):
                bounds[f"{projection.path}.bias"] = (rows_or_columns if projection.reads_stream else None, 0)
        return {
            path: self.tensor(prefix + path, part, dim).to(dtype)
            for path, (part, dim) in bounds.items()
            if path.endswith(".weight") or prefix + path in self
        }


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
