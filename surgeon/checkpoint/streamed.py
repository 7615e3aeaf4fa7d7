"""Models larger than memory: all but the decoder's layers is loaded; the layers' weights are read when needed.

The layers are there as modules without numbers (on PyTorch's meta device), so that code which asks for their
structure finds it. Reading one sublayer's tensors maps a part of the safetensors file into memory, and gives it back
when the tensors are dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from surgeon.checkpoint.forms import form_of
from surgeon.checkpoint.load import check_complete, open_stored
from surgeon.checkpoint.read import Checkpoint
from surgeon.checkpoint.stored import StoredModel
from surgeon.gpus import avoid_cudnn_attention
from surgeon.models.families import Family, SublayerSpec, family_of
from surgeon.models.weights import FactorSource, ModelWeights, Names


class StreamedLayers(nn.ModuleList):
    """A decoder's layers without their weights, and where those are.

    Args:
        layers: on the meta device.
        dtype, device: to compute in and on.
    """

    def __init__(
        self, layers: nn.ModuleList, checkpoint: Checkpoint, family: Family, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers)
        self.checkpoint = checkpoint
        self.family = family
        self.dtype = dtype
        self.device = device

    def weights(self, head_dim: int, factors: FactorSource | None = None) -> ModelWeights:
        """What the files hold, read when it is asked for; `factors` as `ModelWeights` takes them."""
        return ModelWeights(_Converted(self), self.family, head_dim, factors)

    def sublayer_bytes(self, spec: SublayerSpec) -> int:
        """How much memory one sublayer's weights take."""
        return sum(parameter.numel() for parameter in self._expected(0, spec).values()) * self.dtype.itemsize

    def _expected(self, layer: int, spec: SublayerSpec) -> dict[str, nn.Parameter]:
        return {
            f"{root}.{name}": parameter
            for root in (spec.norm, *spec.modules)
            for name, parameter in self[layer].get_submodule(root).named_parameters()
        }


class _Converted:
    """A checkpoint whose tensors come in another dtype, on a device; the layers' must be as their modules are."""

    def __init__(self, layers: StreamedLayers) -> None:
        self.layers = layers
        prefix = Names(layers.checkpoint, layers.family).layers
        self.expected = {f"{prefix}{name}": tuple(parameter.shape) for name, parameter in layers.named_parameters()}

    @property
    def where(self) -> str:
        return self.layers.checkpoint.where

    def names(self) -> Iterable[str]:
        return self.layers.checkpoint.names()

    def __contains__(self, name: str) -> bool:
        return name in self.layers.checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor.

        Raises:
            ValueError: if it is missing, or has another shape than the architecture asks for.
        """
        shape = self.layers.checkpoint.shape(name)
        if shape != self.expected.get(name, shape):
            raise ValueError(
                f"{self.layers.checkpoint.folder}: tensor {name} has the shape {shape}, but config.json asks for "
                f"{self.expected[name]}"
            )
        return shape

    def dtype(self, name: str) -> torch.dtype:  # noqa: ARG002 - the same for all
        return self.layers.dtype

    def tensor(self, name: str) -> Tensor:
        self.shape(name)
        return self.layers.checkpoint.tensor(name).to(self.layers.device, self.layers.dtype)

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        self.shape(name)
        return self.layers.checkpoint.part(name, dim, first, end).to(self.layers.device, self.layers.dtype)


def load_streamed(model: str | Path | StoredModel, device: str = "cpu") -> PreTrainedModel:
    """A model whose decoder layers are `StreamedLayers`, in evaluation mode.

    Raises:
        FileNotFoundError, ValueError: as `surgeon.load`; and if the checkpoint runs an edited program.
    """
    avoid_cudnn_attention()
    stored = open_stored(model)
    checkpoint, family, dtype = stored.checkpoint, stored.family, stored.compute_dtype(device)
    if form_of(checkpoint).shipped is not None:
        raise ValueError(f"{stored.folder} is an edited model, which has to fit into memory")
    config = copy.deepcopy(stored.config)  # which becomes the model's own
    with init_empty_weights(include_buffers=False):
        whole: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _fill(whole, _without_layers(stored.folder, config, family, dtype).to(device), family)
    path, _, name = family.layers.rpartition(".")
    parent = whole.get_submodule(path)
    setattr(parent, name, StreamedLayers(getattr(parent, name), checkpoint, family, dtype, torch.device(device)))
    streamed: PreTrainedModel = whole.eval()
    return streamed


def streamed_layers(model: PreTrainedModel) -> StreamedLayers | None:
    """The decoder's layers, if their weights are read when they are needed."""
    layers = model.get_submodule(family_of(model.config).layers)
    return layers if isinstance(layers, StreamedLayers) else None


def _without_layers(folder: Path, config: Any, family: Family, dtype: torch.dtype) -> nn.Module:
    """The same model with no decoder layers: embeddings, final norm and head, loaded as `transformers` loads them."""
    shallow = copy.deepcopy(config)
    for key, value in family.per_layer_entries(config, []).items():
        setattr(shallow, key, value)
    shallow.num_hidden_layers = 0
    model_class: Any = AutoModelForCausalLM
    model, report = model_class.from_pretrained(
        folder, config=shallow, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
    )
    check_complete(folder, report)
    loaded: nn.Module = model
    return loaded


def _fill(model: Any, loaded: nn.Module, family: Family) -> None:
    """Put what was loaded into the whole model."""
    model.load_state_dict(loaded.state_dict(), strict=False, assign=True)
    model.tie_weights()
    for buffer in model.buffers():
        buffer.data = buffer.data.to(model.device)
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta or name.startswith(f"{family.layers}."), name
