"""A stretch of a model as a model of its own, whose stream may come from outside.

It is a stock `transformers` model with fewer layers, edited with the stretch's part of the program. Called with tokens,
as any model is, it goes by them for masks and positions, and takes the stream that it was given in place of the
embedded tokens: so positions, scales and dropout before the first layer, which are in that stream already, are not
added twice, whatever the architecture does there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from surgeon.exports.on_demand import build_empty
from surgeon.language.program import Program
from surgeon.models.edit import edit
from surgeon.models.edited_layers import EditedLayers, ModelMachine
from surgeon.models.families import Family, family_of
from surgeon.models.weights import ModelWeights, NamedTensors, make_room


class StretchLayers(EditedLayers):
    """Edited layers whose stream may be replaced at the start, and is looked at on its way.

    Attributes:
        embeds: whether the stream begins here, with the embedded tokens.
        watched: after how many nodes the stream is looked at; None for all.
        apart: whether what comes after the watched nodes has no gradient for what comes before.
        incoming: the stream of the next pass, (batch, tokens, hidden); None where it begins here.
        outgoing: the stream of the last pass after the watched nodes, without a gradient.
    """

    embeds = True
    watched: int | None = None
    apart = False
    incoming: Tensor | None = None
    outgoing: Tensor | None = None

    def run(self, stream: Tensor, arguments: list[dict[str, Any]]) -> Tensor:
        if self.incoming is not None:
            if self.incoming.shape != stream.shape:
                raise ValueError(
                    f"the stream that comes in is {tuple(self.incoming.shape)}, and the tokens make it "
                    f"{tuple(stream.shape)}: windows, tokens, width"
                )
            stream = self.incoming.to(stream.device)
        elif not self.embeds:
            raise ValueError("this stretch of a model needs the stream of the one before it")
        machine = ModelMachine(self, arguments)
        nodes = self.program.nodes
        middle = self.through(nodes[: self.watched], stream, machine)
        self.outgoing = middle.detach()
        behind = () if self.watched is None else nodes[self.watched :]
        stream = self.outgoing if self.apart else middle
        if behind:
            return self.through(behind, stream, machine)
        return stream


class SilentEmbedding(nn.Module):
    """Stands for an embedding, of tokens or positions, that a stretch further on does not have: it gives zeros."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.zeros: Tensor
        self.register_buffer("zeros", torch.zeros(width, dtype=dtype), persistent=False)

    def forward(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """(batch, tokens, width) for (batch, tokens)."""
        return self.zeros.repeat(*ids.shape, 1)


def build_stretch(
    config: Any, program: Program, tensors: Mapping[str, Tensor], embeds: bool, watched: int | None = None
) -> PreTrainedModel:
    """A model of these tensors, which it takes as they are, without a copy.

    Args:
        config: of the stock model with as many layers as there are tensors of.
        program: over these layers.
        tensors: by the parameters' names; those of the embeddings only if the stream begins here.
        watched: as `StretchLayers` has it.

    Raises:
        ValueError: if a tensor is missing, of another shape, or none of the model's.
    """
    family = family_of(config)
    weights = ModelWeights(NamedTensors(dict(tensors)), family, family.head_dim(config))
    model = build_empty(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    if any(name.startswith(f"{family.layers}.") for name in tensors):
        make_room(model, weights, program)
    if not embeds:
        _silence(model, family, tensors)
    _fill(model, tensors, family)
    edit(model, program, StretchLayers)
    layers = stretch_layers(model)
    layers.embeds = embeds
    layers.watched = watched
    return model


def _silence(model: PreTrainedModel, family: Family, tensors: Mapping[str, Tensor]) -> None:
    """Put stand-ins in the place of the embeddings."""
    dtype = next(iter(tensors.values())).dtype
    for path in filter(None, (family.embedding, family.position_embedding)):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, SilentEmbedding(int(model.config.hidden_size), dtype))


def _fill(model: PreTrainedModel, tensors: Mapping[str, Tensor], family: Family) -> None:
    places = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if name not in places or places[name].shape != tensor.shape:
            if name in places:
                what = f"of shape {tuple(places[name].shape)}"
            else:
                what = "in a model of its configuration"
            raise ValueError(f"there is no tensor {name} {what}; found one of shape {tuple(tensor.shape)}")
    model.load_state_dict(dict(tensors), strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        known = (family.layers, family.embedding, family.position_embedding, family.final_norm, family.head)
        if any(missing[0].startswith(f"{path}.") for path in known):
            raise ValueError(f"the tensor {missing[0]} is missing")
        raise ValueError(
            f"{missing[0]} lies outside the layers, the embeddings, the final norm and the head; a model with such a "
            "tensor cannot be cut by depth"
        )


def stretch_layers(model: nn.Module) -> StretchLayers:
    """The layers of a stretch, whatever is wrapped around its model."""
    found = next((module for module in model.modules() if isinstance(module, StretchLayers)), None)
    assert found is not None
    return found


@contextmanager
def fed(model: nn.Module, stream: Tensor | None) -> Iterator[StretchLayers]:
    """A stretch whose passes take this stream, (batch, tokens, hidden), while inside; None for the embedded tokens."""
    layers = stretch_layers(model)
    layers.incoming = stream
    try:
        yield layers
    finally:
        layers.incoming = layers.outgoing = None
