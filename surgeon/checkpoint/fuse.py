"""The tensors of a checkpoint to be written: their names and shapes at once, their values one at a time when asked for.

A layer that holds the sublayers S_1 ... S_k side by side computes the sum of their outputs:

    rows     q, k, v, gate, up: W = [W_1 diag(g_1); W_2 diag(g_2); ...], where g_i is the gain of S_i's own RMS norm,
             so that the stored layer's norm has gain 1
    columns  o, down: W = [W_1 W_2 ...], and the biases' sum
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.forms import StoredLayer
from surgeon.checkpoint.read import Checkpoint
from surgeon.families import Family, Projection, SublayerSpec
from surgeon.program import Sublayer
from surgeon.weights import average, slice_projection

Read = Callable[[str], Tensor]
IGNORED = "rotary_emb.inv_freq"  # a buffer that early Llama checkpoints store; it follows from the config


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written.

    Attributes:
        dtype: to be stored in.
        rounded: whether storing it may lose digits, because it is computed, or stored more coarsely than it was.
        build: computes its value, in float32 if it is rounded afterwards.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rounded: bool
    build: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorPlanner:
    """Plans the tensors of a checkpoint made of another one's layers.

    Raises:
        ValueError: if the original lacks a tensor that its architecture has, or has one in a layer that is not known.
    """

    def __init__(self, source: Checkpoint, family: Family, config: Any, dtype: torch.dtype | None) -> None:
        self.source = source
        self.family = family
        self.config = config
        self.dtype = dtype
        self.prefix = layer_prefix(source, family)

    def plan(self, layers: tuple[StoredLayer, ...]) -> list[PlannedTensor]:
        """All tensors in the order in which a forward pass needs them."""
        outside = [name for name in self.source.names() if not name.startswith(self.prefix)]
        embeddings = {
            path.rpartition(".")[2] for path in (self.family.embedding, self.family.position_embedding) if path
        }
        first = [name for name in outside if embeddings & set(name.split("."))]
        last = [name for name in outside if name not in first]
        planned = [self._copied(name) for name in first]
        for index, layer in enumerate(layers):
            for sublayers in (layer.attention, layer.feed_forward):
                planned += self._sublayer_tensors(f"{self.prefix}{index}.", sublayers)
        return planned + [self._copied(name) for name in last]

    def _copied(self, name: str) -> PlannedTensor:
        return self._planned(name, lambda read: read(name))

    def _sublayer_tensors(self, prefix: str, sublayers: tuple[Sublayer, ...]) -> list[PlannedTensor]:
        paths = self._paths(sublayers[0])
        for sublayer in sublayers[1:]:
            if set(self._paths(sublayer)) != set(paths):
                raise ValueError(f"{sublayers[0]} and {sublayer} do not have the same tensors; they cannot be combined")
        if len(sublayers) == 1:
            parts = {path: partial(self._part, sublayers[0], path) for path in paths}
        else:
            parts = {path: partial(self._side_by_side, sublayers, path) for path in paths}
        return [self._planned(prefix + path, build) for path, build in parts.items()]

    def _planned(self, name: str, compute: Callable[[Read], Tensor]) -> PlannedTensor:
        read: list[str] = []

        def read_shape(source: str) -> Tensor:
            read.append(source)
            return torch.empty(self.source.shape(source), dtype=self.source.dtype(source), device="meta")

        outline = compute(read_shape)
        original = self.source.dtype(read[0])
        dtype = self.dtype if self.dtype is not None and original.is_floating_point else original
        return PlannedTensor(
            name,
            tuple(outline.shape),
            dtype,
            rounded=torch.promote_types(outline.dtype, dtype) != dtype,
            build=lambda: compute(self.source.tensor),
        )

    def _paths(self, sublayer: Sublayer) -> list[str]:
        """Paths from the layer of the sublayer's tensors."""
        spec = self.family.spec(sublayer.kind)
        prefix = f"{self.prefix}{sublayer.layers[0]}."
        names = [name.removeprefix(prefix) for name in self.source.names() if name.startswith(prefix)]
        known = _roots(self.family.attention) + _roots(self.family.mlp)
        for name in names:
            if not name.startswith(known):
                raise ValueError(
                    f"{prefix}{name} is no tensor of {self.family.name} that surgeon knows; it cannot be exported"
                )
        for path in (spec.norm, *(projection.path for projection in spec.projections)):
            if f"{path}.weight" not in names:
                raise ValueError(
                    f"{self.source.folder} has no tensor {prefix}{path}.weight, which {self.family.name} needs"
                )
        return [name for name in names if name.startswith(_roots(spec)) and not name.endswith(IGNORED)]

    def _part(self, sublayer: Sublayer, path: str, read: Read) -> Tensor:
        """One tensor of one sublayer: read, averaged over its layers, sliced."""
        tensors = [read(f"{self.prefix}{layer}.{path}") for layer in sublayer.layers]
        tensor = tensors[0] if len(tensors) == 1 else average([{path: tensor.float()} for tensor in tensors])[path]
        projection = _projection(self.family.spec(sublayer.kind), path)
        if sublayer.piece is None or projection is None:
            return tensor
        if path.endswith(".bias") and not projection.reads_stream:
            return tensor if sublayer.piece[0] == 0 else torch.zeros_like(tensor)
        return slice_projection(tensor, projection, self.family, self.config, sublayer.piece)

    def _side_by_side(self, sublayers: tuple[Sublayer, ...], path: str, read: Read) -> Tensor:
        """One tensor of a stored layer that holds several sublayers, in float32."""
        spec = self.family.spec(sublayers[0].kind)
        parts = [self._part(sublayer, path, read).float() for sublayer in sublayers]
        projection = _projection(spec, path)
        if projection is None:
            if path != f"{spec.norm}.weight":
                raise ValueError(f"{path} of {self.family.name} cannot be fused")
            return torch.ones_like(parts[0])
        if not projection.reads_stream:
            return torch.cat(parts, dim=1) if path.endswith(".weight") else torch.stack(parts).sum(dim=0)
        if path.endswith(".weight"):
            gains = [self._part(sublayer, f"{spec.norm}.weight", read).float() for sublayer in sublayers]
            parts = [weight * gain for weight, gain in zip(parts, gains, strict=True)]  # a gain per column
        return torch.cat(parts, dim=0)


def _roots(spec: SublayerSpec) -> tuple[str, ...]:
    return tuple(f"{root}." for root in (spec.norm, *spec.modules))


def _projection(spec: SublayerSpec, path: str) -> Projection | None:
    module = path.rpartition(".")[0]
    return next((projection for projection in spec.projections if projection.path == module), None)


def layer_prefix(source: Checkpoint, family: Family) -> str:
    """What the names of the layers' tensors begin with; some checkpoints leave out the model's own name."""
    for path in (family.layers, family.layers.partition(".")[2]):
        if any(name.startswith(f"{path}.") for name in source.names()):
            return f"{path}."
    raise ValueError(
        f"{source.folder} has no tensors named {family.layers}.*, as {family.name} has; is its config.json right?"
    )
