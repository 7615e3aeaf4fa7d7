"""Walking through an unedited model layer by layer, keeping what each sublayer adds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.machine import PlanMachine
from surgeon.analysis.measure import TOKENS_AT_ONCE
from surgeon.checkpoint.streamed import streamed_layers
from surgeon.families import family_of
from surgeon.program import ATTENTION, FEED_FORWARD, KINDS, Sublayer


@dataclass(frozen=True)
class LayerPass:
    """One layer's pass over a stream, each tensor (windows, tokens, hidden).

    Attributes:
        before: the stream that the attention reads.
        attention: what the attention adds.
        middle: the stream that the feed-forward reads; `before` itself where both read the same (GPT-NeoX).
        mlp: what the feed-forward adds.
    """

    before: Tensor
    attention: Tensor
    middle: Tensor
    mlp: Tensor

    @property
    def update(self) -> Tensor:
        """What the layer adds in all."""
        return self.attention + self.mlp

    @property
    def after(self) -> Tensor:
        """The stream after the layer."""
        return self.before + self.attention + self.mlp


class Walk:
    """Some windows of text on an unedited model: runs any layer's sublayers on any stream of their shape.

    Args:
        ids: (windows, tokens), all of them real tokens.
        like: a walk over windows of the same shape, whose masks and positions serve here as well.

    Attributes:
        start: the embedded stream, (windows, tokens, hidden).

    Raises:
        ValueError: if the embedded stream is not finite.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, like: Walk | None = None) -> None:
        machine = PlanMachine(model, ids.to(model.device), _kept_bytes(model))
        self.start = machine.stream
        self.machine: PlanMachine = machine if like is None else like.machine
        self.reads_same = family_of(model.config).steps_per_layer == 1
        if not self.start.isfinite().all():
            raise ValueError(
                "the unedited model's streams are not finite: NaN or infinity in the embedded tokens; "
                "check the embedding's weights"
            )

    def attention(self, layer: int, stream: Tensor) -> Tensor:
        """What the attention of a layer adds to this stream, its norm included."""
        return self.machine.sublayer(Sublayer(ATTENTION, (layer,)), stream)

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        """What the feed-forward of a layer adds to this stream, its norm included."""
        return self.machine.sublayer(Sublayer(FEED_FORWARD, (layer,)), stream)

    def layer(self, layer: int, stream: Tensor) -> LayerPass:
        """A layer's pass over a stream, whatever comes out."""
        attention = self.attention(layer, stream)
        middle = stream if self.reads_same else stream + attention
        return LayerPass(stream, attention, middle, self.mlp(layer, middle))

    def dense_layer(self, layer: int, stream: Tensor) -> LayerPass:
        """A layer's pass over the stream that the unedited model gives it.

        Raises:
            ValueError: naming the sublayer whose output is not finite.
        """
        passed = self.layer(layer, stream)
        for kind, output in ((ATTENTION, passed.attention), (FEED_FORWARD, passed.mlp)):
            if not output.isfinite().all():
                raise ValueError(
                    f"the unedited model's streams are not finite: NaN or infinity appears first in {kind}{layer}; "
                    "check that layer's weights"
                )
        return passed


def _kept_bytes(model: PreTrainedModel) -> int:
    """Where weights are read when they are needed: those of two neighbouring layers, which are used again and again."""
    streamed = streamed_layers(model)
    if streamed is None:
        return 0
    family = family_of(model.config)
    return 2 * sum(streamed.sublayer_bytes(family.spec(kind)) for kind in KINDS)


def batches(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """The windows in parts that run together fast on the model's device."""
    tokens = TOKENS_AT_ONCE.get(model.device.type, TOKENS_AT_ONCE["cpu"])
    return list(torch.split(ids, max(1, tokens // ids.shape[1])))
