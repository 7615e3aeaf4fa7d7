"""Averages of layers that grow by a layer at a time, as the cells of a merge map ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surgeon.language.program import Sublayer
from surgeon.models.weights import ModelWeights, Tensors, stored_tensors


@dataclass
class _Sum:
    layers: tuple[int, ...]
    tensors: Tensors  # by path from the layer, in float32 or wider
    dtypes: dict[str, torch.dtype]


class RunningAverages:
    """Averages of whole sublayers, each made of the sum that the last one of its kind left, where that goes on from it.

    The sums are those that `surgeon.models.weights.mean` makes, layer by layer in order, so the averages are the same
    to the last bit. One sum for each kind of sublayer is kept; the weights must stay as they are meanwhile.
    """

    def __init__(self, weights: ModelWeights) -> None:
        self.weights = weights
        self._sums: dict[str, _Sum] = {}

    def tensors(self, sublayer: Sublayer) -> Tensors:
        """An average's tensors by path from the layer, as the layers store theirs, in memory of their own.

        Args:
            sublayer: of several layers, whole, without ranks.

        Raises:
            ValueError: if its layers differ in width.
        """
        self.weights.units(sublayer)
        total = self._sums.get(sublayer.kind)
        if total is None or total.layers != sublayer.layers[: len(total.layers)]:
            total = self._sums[sublayer.kind] = self._begun(Sublayer(sublayer.kind, sublayer.layers[:1]))
        for layer in sublayer.layers[len(total.layers) :]:
            for path, summed in total.tensors.items():
                part = self.weights.tensor(f"{self.weights.family.layers}.{layer}.{path}")
                summed.add_(part.to(summed.device, total.dtypes[path]))
        total.layers = sublayer.layers
        count = len(sublayer.layers)
        return {path: (summed / count).to(total.dtypes[path]) for path, summed in total.tensors.items()}

    def _begun(self, first: Sublayer) -> _Sum:
        stored = stored_tensors(first, self.weights)
        wide = {path: one.to(torch.promote_types(one.dtype, torch.float32)) for path, one in stored.items()}
        return _Sum(first.layers, wide, {path: one.dtype for path, one in stored.items()})
