"""Modules that stand for a decoder's own: for its layers, its projections, its mixtures' experts.

They travel inside checkpoints, too: the modeling file of the program form is written with this text in it (see
`checkpoint/forms/base.py`), so that nothing here may need more than torch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# What releases of transformers and their architectures call the keys and values of tokens before.
CACHES = ("cache", "past_key_values", "layer_past")


class FamilyEntry(NamedTuple):
    """Entry `surgeon_family` of config.json: where layers have their sublayers (paths), how the decoder calls them."""

    # Each kind of attention: "called", norms and modules in order; "module", the one that gets the decoder's arguments;
    # "slot", the attribute with the number of its entry in the cache; "renamed", arguments under another name, or
    # (null) without one; "counted_by", the entry of lists to count tokens by, where its own counts none.
    attentions: tuple[dict[str, Any], ...]
    feed_forward: tuple[str, ...]  # norms and modules, in order
    reads: tuple[str, ...]  # projections of the normed stream: a slice has some of their output features
    writes: tuple[str, ...]  # projections to the stream: a slice has some of their input features
    # A projection's name in programs, and its path; those of one path are packed in this order.
    roles: tuple[list[str], ...]
    # Width of a head, by path, of projections packed head by head or KV group by KV group.
    turns: dict[str, int]
    packed: dict[str, list[int]]  # several in one: how wide each is, in proportion
    groups: int  # KV heads of a layer
    # Norms of queries and keys with a gain for each head, or for each of its features.
    feature_norms: tuple[str, ...]
    sinks: str | None  # a parameter with a number for each head
    # A layer's mixture of experts: "experts", the module of their matrices, "roles", the names of these in programs and
    # their parameters, "rows", tensors with a row of each expert, "counts" and "top_k".
    mixture: dict[str, Any] | None
    counts: tuple[str, ...]  # attributes that count heads or their features: less in a slice
    # Config attributes with an item per layer that says something of its attention.
    layer_lists: tuple[str, ...]
    dropout: str | None  # the config's probability of dropping sublayer outputs while training
    output_scale: float | None  # what sublayer outputs are multiplied by
    arguments: tuple[str, ...]  # what the decoder hands a layer by position after the stream
    returns_tuple: bool  # whether a layer returns (stream, attention weights)
    # Steps of a layer of the unedited model: 2, or 1 where attention and feed-forward read the same stream.
    steps: int
    # The config's entry and the path of a text decoder inside another model.
    inside: tuple[str, str] | None


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


def linear_slice(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    piece: tuple[int, int] | None,
    dim: int | None,
    shares: tuple[int, ...] = (1,),
) -> Tensor:
    """Apply a linear map, or a slice of it, whose bias, where its outputs are whole, belongs to slice 0.

    Args:
        weight: (out, in).
        dim: of the weight, which a slice has a part of: 0 for outputs, 1 for inputs; None where it has it whole.
    """
    if piece is not None and dim is not None:
        weight = part(weight, piece, shares, dim)
    if piece is not None and bias is not None:
        if dim == 0:
            bias = part(bias, piece, shares)
        elif piece[0]:
            bias = None
    return nn.functional.linear(x, weight, bias)


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
        outputs = [self.project(x, role, expert, self.piece, 0) for role in reading]
        if self.mixture["turns"]:
            together = torch.stack(outputs, -1).flatten(-2)
        else:
            together = torch.cat(outputs, -1)
        return self.project(self.apply_gate(together), writing, expert, self.piece, 1)

    def project(
        self, x: Tensor, role: str, expert: int, piece: tuple[int, int] | None, dim: int
    ) -> Tensor:
        """Apply an expert's map, or a slice of it, as `linear_slice` does."""
        whole = self.whole[0]
        if role in self._modules:
            output: Tensor = self._modules[role](x, expert, piece, dim)  # type: ignore[misc]
        elif isinstance(whole, ReplacementExperts):
            output = whole.project(x, role, expert, piece, dim)
        else:
            output = linear_slice(x, *stock_map(whole, self.mixture, role, expert), piece, dim)
        return output

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

    def forward(
        self, x: Tensor, expert: int, piece: tuple[int, int] | None = None, dim: int | None = None
    ) -> Tensor:
        """Apply an expert's map, or a slice of it, as `linear_slice` does."""
        if not hasattr(self, "first"):
            bias = None if self.bias is None else self.bias[expert]
            return linear_slice(x, self.weight[expert], bias, piece, dim)
        inner = self.first(x, expert, piece, 1) if dim == 1 else self.first(x, expert)
        output: Tensor = self.second(inner, expert, piece, None if dim == 1 else dim)
        return output


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


def leave_experts(layer: nn.Module, mixture: dict[str, Any], count: int) -> None:
    """Give a layer the modules that hold so many experts, and have it count those."""
    whole: Any = layer.get_submodule(mixture["experts"])
    if len(next(whole.parameters())) == count:
        return
    names = [f"{mixture['experts']}.{name}" for name, _ in whole.named_parameters()]
    for path in (*names, *(path for path in mixture["rows"] if has(layer, path))):
        old = attrgetter(path)(layer)
        new = old.detach()[:count].clone()
        set_at(layer, path, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
    recount_experts(layer, mixture["counts"], mixture["top_k"], count)


def recount_experts(layer: nn.Module, counts: Sequence[str], top_k: Sequence[str], experts: int) -> None:
    """Have a mixture's modules count so many experts, and choose no more; those taken apart count nothing."""
    for path in (path for path in (*counts, *top_k) if has(layer, path)):
        set_at(layer, path, min(attrgetter(path)(layer), experts) if path in top_k else experts)


def has(layer: nn.Module, path: str) -> bool:
    """Tell whether there is something at a path; layers may differ (a dense one among mixtures)."""
    try:
        return attrgetter(path)(layer) is not None
    except AttributeError:
        return False


def attention_in(layer: nn.Module, family: FamilyEntry) -> dict[str, Any]:
    """Return a layer's kind of attention; the first one if it has none."""
    return next((one for one in family.attentions if has(layer, one["module"])), family.attentions[0])


def called_in(layer: nn.Module, family: FamilyEntry, kind: str) -> tuple[str, ...]:
    """The norms and modules that a layer's attention or feed-forward calls one after the other."""
    if kind == "A":
        return tuple(attention_in(layer, family)["called"])
    return family.feed_forward


def narrow(layer: nn.Module, family: FamilyEntry, kind: str, width: int) -> None:
    """Give a layer the modules that hold so many KV groups, or neurons, and have it count those."""
    paths = {
        role: path
        for role, path in family.roles
        if (role in "qgkvo") == (kind == "A") and has(layer, path)
    }
    units = family.groups if kind == "A" else sizes_of(layer.get_submodule(paths["down"]))[0]
    for path in dict.fromkeys(paths.values()):
        whole: Any = layer.get_submodule(path)
        inputs, outputs = sizes_of(whole)
        if path in family.reads:
            outputs = outputs * width // units
        else:
            inputs = inputs * width // units
        if isinstance(whole, nn.Linear):
            set_at(layer, path, linear(inputs, outputs, None, whole))
        else:  # GPT-2's Conv1D
            set_at(layer, path, type(whole)(outputs, inputs).to(whole.weight))
    for path in by_head(family) if kind == "A" else ():
        old = attrgetter(path)(layer)
        set_at(layer, path, nn.Parameter(old.detach()[: len(old) * width // units].clone()))
    called = called_in(layer, family, kind)
    recount(layer, [path for path in family.counts if path.startswith(called)], width, units)


def recount(layer: nn.Module, counts: Sequence[str], units: int, whole: int) -> None:
    """Have a layer's modules count so many of all KV groups or neurons; those taken apart count nothing."""
    for path in counts if units != whole else ():
        if has(layer, path):
            owner = path.rpartition(".")[0]
            counting = attrgetter(owner)(layer)
            if not isinstance(counting, nn.Module):  # a configuration, which all layers have in common
                set_at(layer, owner, copy.copy(counting))
            set_at(layer, path, attrgetter(path)(layer) * units // whole)


def by_head(family: FamilyEntry) -> list[str]:
    """Return paths of parameters with an entry for each head."""
    return [f"{path}.weight" for path in family.feature_norms] + [
        path for path in (family.sinks,) if path
    ]


def sizes_of(linear: Any) -> tuple[int, int]:
    """Return a projection's numbers of inputs and outputs."""
    first, second = linear.weight.shape
    return (second, first) if isinstance(linear, nn.Linear) else (first, second)


def factorise(layer: nn.Module, family: FamilyEntry, ranks: Mapping[str, int]) -> None:
    """Give a layer the modules that hold factors of these ranks, by role."""
    mixture = family.mixture
    stacked = {} if mixture is None else dict(mixture["roles"])
    if mixture is not None and has(layer, mixture["experts"]) and not ranks.keys().isdisjoint(stacked):
        own = layer.get_submodule(mixture["experts"])
        if not isinstance(own, ReplacementExperts):
            maps = {}
            for role in stacked:
                weight, bias = stock_map(own, mixture, role, slice(None))
                maps[role] = expert_maps(weight, bias, ranks.get(role))
            set_at(layer, mixture["experts"], ReplacementExperts(own, mixture, maps))
    for path in dict.fromkeys(path for role, path in family.roles if role in ranks and has(layer, path)):
        whole: Any = layer.get_submodule(path)
        if isinstance(whole, FactoredLinear | TakenApart):
            continue  # another slice of the sublayer was here
        roles = [role for role, place in family.roles if place == path]
        shares = family.packed.get(path, [1] * len(roles))
        inputs, outputs = sizes_of(whole)
        made = {
            role: linear(inputs, outputs * share // sum(shares), ranks.get(role), whole)
            for role, share in zip(roles, shares, strict=True)
        }
        set_at(
            layer, path, made[roles[0]] if len(roles) == 1 else TakenApart(made, family.turns.get(path))
        )


def linear(inputs: int, outputs: int, rank: int | None, like: Any) -> nn.Module:
    """Make a projection, as two factors if it has a rank, with a bias, dtype and device like another's."""
    options = {"device": like.weight.device, "dtype": like.weight.dtype}
    if rank is None:
        return nn.Linear(inputs, outputs, bias=like.bias is not None, **options)
    first = nn.Linear(inputs, rank, bias=False, **options)
    return FactoredLinear(first, nn.Linear(rank, outputs, bias=like.bias is not None, **options))


def expert_maps(weight: Tensor, bias: Tensor | None, rank: int | None) -> ExpertMaps:
    """Make a module of one matrix of each expert, (experts, out, in), or of two factors of a rank.

    Random factors, whose products are about as large as the matrices: numbers of a checkpoint come later.
    """
    experts, outputs, inputs = weight.shape
    second = "" if rank is None else "second."
    made = {f"{second}weight": weight.detach().clone()}
    if rank is not None:
        made["first.weight"] = weight.new_empty(experts, rank, inputs).normal_(std=inputs**-0.5)
        made["second.weight"] = weight.new_empty(experts, outputs, rank).normal_(std=rank**-0.5)
    if bias is not None:
        made[f"{second}bias"] = bias.detach().clone()
    return ExpertMaps(made)
