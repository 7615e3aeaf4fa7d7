"""What a machine can do at most of a decoding pass: reading all weights once, and matrix products alone.

Products are of the model's own shapes with packed weights, in the order of the model, on all cores, by oneDNN or by the
runtime's own kernels, whichever is faster; of large models as many layers as a few hundred megabytes hold, and the time
of all in proportion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgeon.runtime.model.linear import Product, laid_out

READ_BYTES = 1 << 28
READ_PIECES = 64
WEIGHT_BYTES = 1 << 29
TIMES = 10
TOKENS = 8  # that oneDNN is told to expect; it chooses the same layout for all numbers but 1


def layer_shapes(size: Mapping[str, int]) -> list[tuple[int, int]]:
    """Outputs and inputs of the products of a layer: q, k, v as one, and gate, up as one."""
    hidden = size["hidden_size"]
    wide = size["intermediate_size"]
    head = hidden // size["num_attention_heads"]
    qkv = hidden + 2 * size["num_key_value_heads"] * head
    return [(qkv, hidden), (hidden, hidden), (2 * wide, hidden), (hidden, wide)]


def weight_numbers(size: Mapping[str, int]) -> int:
    """Of all layers and the head."""
    layer = sum(outputs * inputs for outputs, inputs in layer_shapes(size))
    return size["num_hidden_layers"] * layer + size["vocab_size"] * size["hidden_size"]


class Rates(NamedTuple):
    """The most tokens per second.

    Attributes:
        onednn: with products by oneDNN, with packed weights.
        fastest: by oneDNN or by the runtime's own kernels.
    """

    onednn: float
    fastest: float


class Rooflines:
    """The most tokens per second of decoding, measured when asked."""

    def __init__(self, size: Mapping[str, int]) -> None:
        shapes = layer_shapes(size)
        layer_bytes = 4 * sum(outputs * inputs for outputs, inputs in shapes)
        self._layers = max(1, min(size["num_hidden_layers"], WEIGHT_BYTES // layer_bytes))
        self._shapes = shapes * self._layers
        self._own: list[Product] = [laid_out(torch.randn(shape)) for shape in self._shapes]
        self._share = self._layers * layer_bytes / (4 * weight_numbers(size))
        self._bytes = 4 * weight_numbers(size)
        self._read = torch.ones(READ_BYTES // 4)

    def rate(self, batch: int) -> Rates:
        """Tokens per second: as fast as weights can be read for one text, as products alone for more."""
        if batch == 1:
            reading = self.reading() / self._bytes
            return Rates(reading, reading)
        own = self.products(batch)
        onednn = self.products(batch, by_onednn=True)
        return Rates(batch * self._share / onednn, batch * self._share / min(own, onednn))

    def reading(self) -> float:
        """Bytes per second that all threads read."""
        pieces = self._read.split(len(self._read) // READ_PIECES)
        return pieces[0].nbytes / _seconds([lambda piece=piece: piece.sum() for piece in pieces] * TIMES)

    def products(self, tokens: int, by_onednn: bool = False) -> float:
        """Seconds of the products of the layers that are measured, as the runtime makes them, or by oneDNN."""
        inputs: dict[int, Tensor] = {width: torch.randn(tokens, width) for _, width in self._shapes}
        weights = self._onednn if by_onednn else self._own

        def all_products() -> None:
            for (_, width), weight in zip(self._shapes, weights, strict=True):
                weight(inputs[width])

        return _seconds([all_products] * TIMES)

    @cached_property
    def _onednn(self) -> list[Any]:
        """The weights as oneDNN wants them; where it is not, as the runtime does."""
        if not torch.backends.mkldnn.is_available():
            return list(self._own)
        packed = [
            torch.ops.mkldnn._reorder_linear_weight(torch.randn(shape), TOKENS) for shape in self._shapes
        ]
        return [
            lambda x, w=weight: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
            for weight in packed
        ]


@torch.inference_mode()
def _seconds(runs: list[Callable[[], object]]) -> float:
    """The median of what they take."""
    found = []
    for run in runs:
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return median(found)
