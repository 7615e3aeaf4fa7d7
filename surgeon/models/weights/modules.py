"""Modules that stand in a layer where one of its linear maps is stored as two factors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from surgeon.language.program import KINDS
from surgeon.models.families import Projection, SublayerSpec
from surgeon.models.weights.layout import modules_of, own_path
from surgeon.models.weights.store import Tensors
from surgeon.models.weights.view import ModelWeights


class FactoredLinear(nn.Module):
    """A linear map by two factors, (..., in) to (..., out)."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    @property
    def weight(self) -> Tensor:
        """The matrix that the factors stand for, (out, in): stock classes ask linear maps for their weight."""
        first, second = (module.get_parameter("weight") for module in (self.first, self.second))
        return second @ first

    def forward(self, x: Tensor) -> Tensor:
        """The product with the first factor, then with the second."""
        output: Tensor = self.second(self.first(x))
        return output


class TakenApart(nn.Module):
    """Projections that their architecture packs into one module, each in one of its own.

    Args:
        parts: by role, in the order in which they are packed.
        head_dim: where they are packed head by head, the width of one head; else None.
    """

    def __init__(self, parts: Mapping[str, nn.Module], head_dim: int | None) -> None:
        super().__init__()
        for role, part in parts.items():
            self.add_module(role, part)
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        """What the packed module would give, (..., all out_features)."""
        outputs = [part(x) for part in self.children()]
        if self.head_dim is None:
            return torch.cat(outputs, -1)
        by_head = [output.unflatten(-1, (-1, self.head_dim)) for output in outputs]
        return torch.stack(by_head, -2).flatten(-3)


def replaced_modules(owner: nn.Module, tensors: Tensors, spec: SublayerSpec, head_dim: int) -> dict[str, nn.Module]:
    """New modules, by path from the layer, where the layer's own cannot hold a sublayer's tensors.

    Args:
        owner: a layer.
        tensors: of the sublayer, by path from the layer.
        head_dim: the width of one head.
    """
    replaced = {}
    for path, packed in modules_of(spec).items():
        own = owner.get_submodule(path)
        if f"{path}.weight" not in tensors:
            replaced[path] = _taken_apart(packed, spec, tensors, head_dim)
        elif isinstance(own, FactoredLinear | TakenApart):
            replaced[path] = _linear(path, tensors, packed[0].transposed)
        if path in replaced:
            replaced[path].train(own.training)
    return replaced


def make_room_for_factors(model: nn.Module, weights: ModelWeights) -> None:
    """Replace modules of a model, so that it can hold what is stored: two factors in place of some matrices.

    The new ones have no numbers yet, and the dtype and device of those that they replace.

    Args:
        model: with the causal language model's own paths.
    """
    for index in range(weights.count_layers()) if weights.has_factors() else ():
        layer = model.get_submodule(f"{weights.family.layers}.{index}")
        for spec in map(weights.family.spec, KINDS):
            for path in modules_of(spec):
                inside = f"{weights.names.layers}{index}."
                stored = [name for name in weights.store.names() if name.startswith(f"{inside}{path}.")]
                like = next(layer.get_submodule(path).parameters())
                tensors = {
                    name.removeprefix(inside): torch.empty(
                        weights.store.shape(name), dtype=like.dtype, device=like.device
                    )
                    for name in stored
                }
                if f"{path}.weight" not in tensors and tensors:
                    packed = modules_of(spec)[path]
                    _set_module(layer, path, _taken_apart(packed, spec, tensors, weights.head_dim))


def _taken_apart(packed: list[Projection], spec: SublayerSpec, tensors: Tensors, head_dim: int) -> nn.Module:
    parts = {one.role: _linear(own_path(one, spec), tensors) for one in packed}
    return TakenApart(parts, head_dim if packed[0].interleaved else None) if len(parts) > 1 else parts[packed[0].role]


def _linear(path: str, tensors: Tensors, transposed: bool = False) -> nn.Module:
    """A linear map with the tensors below a path, as one module or as two factors."""
    if f"{path}.first.weight" in tensors:
        return FactoredLinear(_linear(f"{path}.first", tensors), _linear(f"{path}.second", tensors))
    weight, bias = tensors[f"{path}.weight"], tensors.get(f"{path}.bias")
    if transposed:
        from transformers.pytorch_utils import Conv1D  # takes seconds, and few architectures have it

        made: nn.Module = Conv1D(weight.shape[1], weight.shape[0])
    else:
        made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight)
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made


def _set_module(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)
