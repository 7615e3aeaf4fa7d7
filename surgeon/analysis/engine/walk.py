"""Walking through an unedited model layer by layer, keeping what each sublayer adds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.engine.machine import PlanMachine
from surgeon.checkpoint.streamed import streamed_layers
from surgeon.language.program import ATTENTION, FEED_FORWARD, KINDS, Sublayer
from surgeon.models.families import family_of
from surgeon.models.weights import FactorSource

HEAD_NOT_FINITE = "the unedited model's predictions are not finite: check the final norm and the output head"


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
        factors: as `PlanMachine` takes them.

    Attributes:
        ids: those windows, on the model's device.
        start: the embedded stream, (windows, tokens, hidden).

    Raises:
        ValueError: if the embedded stream is not finite.
    """

    def __init__(
        self, model: PreTrainedModel, ids: Tensor, like: Walk | None = None, factors: FactorSource | None = None
    ) -> None:
        self.ids = ids.to(model.device)
        machine = PlanMachine(model, self.ids, kept_bytes(model), factors)
        self.start = machine.stream
        self.machine: PlanMachine = machine if like is None else like.machine
        self.reads_same = family_of(model.config).steps_per_layer == 1
        if not self.start.isfinite().all():
            raise ValueError("the unedited model's embedded tokens are not finite; check the embedding's weights")

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
                raise not_finite(f"{kind}{layer}")
        return passed


def walks(model: PreTrainedModel, ids: Tensor, at_once: int, factors: FactorSource | None = None) -> Iterator[Walk]:
    """Walks over all windows, so many at a time; masks and positions are made once for each shape."""
    first: dict[torch.Size, Walk] = {}
    for chunk in torch.split(ids, at_once):
        walk = Walk(model, chunk, first.get(chunk.shape), factors)
        first.setdefault(chunk.shape, walk)
        yield walk


def not_finite(where: object) -> ValueError:
    """The error for an unedited model that computes NaN or infinity, first in this sublayer or step."""
    return ValueError(
        f"the unedited model's numbers are not finite: NaN or infinity appears first in {where}; "
        "check that layer's weights"
    )


@torch.inference_mode()
def raise_not_finite(model: PreTrainedModel, ids: Tensor) -> NoReturn:
    """Say where numbers stop being finite in an unedited model whose predictions on these windows are not.

    Raises:
        ValueError: in any case.
    """
    walk = Walk(model, ids)
    stream = walk.start
    for layer in range(model.config.num_hidden_layers):
        stream = walk.dense_layer(layer, stream).after
    raise ValueError(HEAD_NOT_FINITE)


def kept_bytes(model: PreTrainedModel) -> int:
    """What a walk keeps of weights that are read when needed: two neighbouring layers, used again and again."""
    streamed = streamed_layers(model)
    if streamed is None:
        return 0
    family = family_of(model.config)
    return 2 * sum(streamed.sublayer_bytes(family.spec(kind)) for kind in KINDS)
