"""Modules that stand for a decoder's own: for its layers, its projections, its mixtures' experts.

They travel inside checkpoints, too, in the modeling file of the program form: nothing here needs more than torch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

# What releases of transformers and their architectures call the keys and values of tokens before.
CACHES = ("cache", "past_key_values", "layer_past")


class LayerSlots(nn.Module):
    """Stands for a decoder's list of layers, whose parameters keep their names.

    The decoder iterates over it and calls what it gets with the arguments that it has for that layer (its kind of mask,
    say). It gets one slot per attention of the program, each with a cache of its own; the last one runs the program.

    Args:
        arguments: names of what the decoder hands a layer by position after the stream.
        returns_tuple: whether a layer returns (stream, attention weights).
    """

    gradient_checkpointing = False

    def __init__(self, layers: nn.ModuleList, arguments: tuple[str, ...], returns_tuple: bool) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)
        self.argument_names = arguments
        # Layers without attention weights to return, as GPT-J's from transformers 5.24 on, return the stream alone.
        asked = signature(type(layers[0]).forward).parameters
        self.returns_tuple = returns_tuple and "output_attentions" in asked
        self.slot_layers: list[int] = []
        self.counts_apart = False

    def give_slots(self, attended: list[int], counts_apart: bool) -> None:
        """Make a slot for each attention, by the number of its layer.

        One more counts tokens in the cache where no attention does.
        """
        self.counts_apart = counts_apart
        self.slot_layers = [*attended, *(attended[:1] or [0])] if counts_apart else attended

    def __len__(self) -> int:
        return len(self.slot_layers)

    def __iter__(self) -> Iterator[Any]:
        arguments: list[dict[str, Any]] = []
        return iter([partial(self.slot, arguments) for _ in self.slot_layers])

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def slot(
        self, arguments: list[dict[str, Any]], stream: Tensor, *by_position: Any, **by_name: Any
    ) -> Any:
        """Stand for a layer: all slots keep their arguments, the last one runs the program."""
        arguments.append(dict(zip(self.argument_names, by_position, strict=False)) | by_name)
        if len(arguments) == len(self):
            cache = next((arguments[-1][name] for name in CACHES if name in arguments[-1]), None)
            # The decoder asks this cache at which position the next token stands.
            if self.counts_apart and cache is not None:
                nothing = stream.new_zeros(len(stream), 1, stream.shape[1], 1)
                cache.update(nothing, nothing, len(self) - 1)
            stream = self.run(stream, arguments)
        if self.returns_tuple:
            return (stream, None)
        return stream

    def run(self, stream: Tensor, arguments: list[dict[str, Any]]) -> Tensor:
        """Run the program on a stream, (batch, tokens, hidden).

        Args:
            arguments: the decoder's, for each slot.
        """
        raise NotImplementedError


def through_stages(
    layer: nn.Module,
    stages: tuple[str, ...],
    module: str,
    slot: tuple[str, int] | None,
    arguments: dict[str, Any],
    stream: Tensor,
) -> Tensor:
    """Call a sublayer's norms and modules one after the other.

    Args:
        module: path of the one that gets the decoder's arguments.
        slot: of an attention: path of the attribute with the number of its entry in the cache, and that number.
    """
    if slot is not None:
        set_at(layer, *slot)
    x: Any = stream
    for path in stages:
        x = layer.get_submodule(path)(x, **(arguments if path == module else {}))
        # An attention may give its weights, too, a mixture its router's choice, and tokens without their texts.
        x = x[0].view(stream.shape) if isinstance(x, tuple) else x
    output: Tensor = x
    return output


def set_at(root: Any, path: str, value: Any) -> None:
    """Set the attribute at a path of names."""
    parent, _, name = path.rpartition(".")
    owner = attrgetter(parent)(root) if parent else root
    if name in getattr(owner, "_parameters", ()) and not isinstance(value, nn.Parameter):
        vars(owner)[name] = value  # is found before the parameter, until that is set again
    else:
        setattr(owner, name, value)


def part(
    features: Tensor, piece: tuple[int, int], shares: tuple[int, ...] = (1,), dim: int = -1
) -> Tensor:
    """Return a slice's features of projections that lie side by side, whose widths are to each other as shares."""
    index, count = piece
    width = features.shape[dim] // sum(shares)
    parts = [
        each.chunk(count, dim)[index]
        for each in features.split([width * share for share in shares], dim)
    ]
    joined: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return joined


class FactoredLinear(nn.Module):
    """A linear map by two factors, (..., in) to (..., out)."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    @property
    def weight(self) -> Tensor:
        """The product of the factors, (out, in): stock classes ask linear maps for their weight."""
        first, second = (module.get_parameter("weight") for module in (self.first, self.second))
        return second @ first

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x))
        return output


class TakenApart(nn.Module):
    """Projections that their architecture packs into one module, each in one of its own.

    Args:
        parts: by role, in the order in which they are packed.
        head_dim: the width of one head where they are packed head by head, or KV group by KV group; else None.
    """

    def __init__(self, parts: Mapping[str, nn.Module], head_dim: int | None) -> None:
        super().__init__()
        for role, projection in parts.items():
            self.add_module(role, projection)
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        """Give the packed module's output, (..., all out_features)."""
        outputs = [projection(x) for projection in self.children()]
        if self.head_dim is None:
            return torch.cat(outputs, -1)
        groups = min(output.shape[-1] for output in outputs) // self.head_dim
        return torch.cat([output.unflatten(-1, (groups, -1)) for output in outputs], -1).flatten(-2)


class ReplacementExperts(nn.Module):
    """Stands for a mixture's experts: with matrices of their own, by two factors in place of some, or a slice of each.

    Args:
        whole: the architecture's own module, whose gate and activation it has, or another one of this class.
        mixture: "roles", each with the name of its parameter, "transposed" and "turns", as config.json has them.
        maps: of the experts, by role; without them it has no weights, and takes those of the module it stands for.
        piece: (index, count) of a slice.
    """

    def __init__(
        self,
        whole: nn.Module,
        mixture: dict[str, Any],
        maps: Mapping[str, ExpertMaps] | None = None,
        piece: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.mixture = mixture
        self.piece = piece
        bare = copy.copy(whole)
        if maps is not None:
            bare._parameters = {}  # its matrices are not kept alive
            for role, own in maps.items():
                self.add_module(role, own)
        self.whole = [bare]  # in a list, so that it is not registered

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
    ) -> Tensor:
        """Weigh and sum outputs of the chosen experts, (tokens, hidden).

        Args:
            hidden_states: (tokens, hidden).
            top_k_index, top_k_weights: (tokens, chosen). Without them, `hidden_states` are as many tokens of each
                expert, one expert after the other, and so is the output.
        """
        if top_k_index is None or top_k_weights is None:
            own = hidden_states.view(self.count(), -1, hidden_states.shape[-1])
            return torch.cat([self.expert(expert, tokens) for expert, tokens in enumerate(own)])
        total = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, place = torch.where(top_k_index == expert)
            output = self.expert(expert, hidden_states[tokens]) * top_k_weights[tokens, place, None]
            total = total.index_add(0, tokens, output.to(total.dtype))
        return total

    def count(self) -> int:
        """Number of experts."""
        if not self._modules and isinstance(self.whole[0], ReplacementExperts):
            return self.whole[0].count()
        return len(next((self if self._modules else self.whole[0]).parameters()))

    def expert(self, expert: int, x: Tensor) -> Tensor:
        """Compute one expert's output of tokens, (tokens, hidden)."""
        *reading, writing = (role for role, _ in self.mixture["roles"])
        read = []
        for role in reading:
            *before, (weight, bias) = self.maps(role, expert)
            if self.piece is not None:
                weight = part(weight, self.piece, dim=0)
                bias = None if bias is None else part(bias, self.piece)
            inner = nn.functional.linear(x, before[0][0]) if before else x
            read.append(nn.functional.linear(inner, weight, bias))
        together = torch.stack(read, -1).flatten(-2) if self.mixture["turns"] else torch.cat(read, -1)
        output = self.apply_gate(together)
        first, *second = self.maps(writing, expert)
        if self.piece is not None:
            first = (part(first[0], self.piece), first[1])
        for weight, bias in (first, *second):
            is_elsewhere = self.piece is not None and self.piece[0] > 0  # it belongs to slice 0
            output = nn.functional.linear(output, weight, None if is_elsewhere else bias)
        return output

    def maps(self, role: str, expert: int) -> list[tuple[Tensor, Tensor | None]]:
        """Return an expert's map, or two maps one after the other: matrices (out, in), biases."""
        own = self._modules.get(role)
        if isinstance(own, ExpertMaps):
            return own.maps(expert)
        whole = self.whole[0]
        if isinstance(whole, ReplacementExperts):
            return whole.maps(role, expert)
        return [stock_map(whole, self.mixture, role, expert)]

    def apply_gate(self, both: Tensor) -> Tensor:
        """Apply the architecture's function of gates and values, which lie as it packs them."""
        whole: Any = self.whole[0]
        if isinstance(whole, ReplacementExperts):
            return whole.apply_gate(both)
        if hasattr(whole, "_apply_gate"):
            combined: Tensor = whole._apply_gate(both)
        else:
            gates, values = both.chunk(2, -1)
            combined = values * whole.act_fn(gates)
        return combined


class ExpertMaps(nn.Module):
    """One linear map for each expert: a stacked matrix, (experts, out, in), or two stacked factors; a stacked bias."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        if "first.weight" in tensors:
            self.first = ExpertMaps({"weight": tensors["first.weight"]})
            self.second = ExpertMaps(
                {
                    name.removeprefix("second."): one
                    for name, one in tensors.items()
                    if "first" not in name
                }
            )
        else:
            self.weight = nn.Parameter(tensors["weight"])
            self.bias = nn.Parameter(tensors["bias"]) if "bias" in tensors else None

    def maps(self, expert: int) -> list[tuple[Tensor, Tensor | None]]:
        """Return an expert's map, or two maps one after the other: matrices (out, in), biases."""
        if hasattr(self, "first"):
            return self.first.maps(expert) + self.second.maps(expert)
        return [(self.weight[expert], None if self.bias is None else self.bias[expert])]


def stock_map(
    whole: Any, mixture: dict[str, Any], role: str, which: Any
) -> tuple[Tensor, Tensor | None]:
    """Return a matrix (out, in) and a bias of an expert, or of all, as the stock module has them."""
    name = dict(mixture["roles"])[role]
    packed = [one for one, place in mixture["roles"] if place == name]
    weight = getattr(whole, name)[which]
    bias = getattr(whole, f"{name}_bias", None)
    weight = weight.mT if mixture["transposed"] else weight
    bias = None if bias is None else bias[which]
    if len(packed) == 1:
        return weight, bias
    count = len(packed)
    place = packed.index(role)
    if mixture["turns"]:
        return weight[..., place::count, :], None if bias is None else bias[..., place::count]
    return weight.chunk(count, -2)[place], None if bias is None else bias.chunk(count, -1)[place]
