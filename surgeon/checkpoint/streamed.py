"""Models larger than memory: all but the decoder's layers is loaded; the layers' weights are read when needed.

The layers are there as modules without numbers (on PyTorch's meta device), so that code which asks for their
structure finds it. Reading one sublayer's tensors maps a part of the safetensors file into memory, and gives it back
when the tensors are dropped.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from surgeon.checkpoint.forms import form_of
from surgeon.checkpoint.load import from_files, open_stored
from surgeon.checkpoint.stored import StoredModel
from surgeon.gpus import avoid_cudnn_attention
from surgeon.models.families import family_of
from surgeon.models.weights import FactorSource, ModelWeights


class StreamedLayers(nn.ModuleList):
    """A decoder's layers without their weights, and where those are.

    Args:
        layers: on the meta device.
        stored: the model that they are of.
        device: to compute on.
    """

    def __init__(self, layers: nn.ModuleList, stored: StoredModel, device: torch.device) -> None:
        super().__init__(layers)
        self.stored = stored
        self.dtype = stored.compute_dtype(device)
        self.device = device

    def weights(self, head_dim: int, factors: FactorSource | None = None) -> ModelWeights:
        """What the files hold, read when it is asked for; `factors` as `ModelWeights` takes them."""
        return ModelWeights(_Converted(self), self.stored.family, head_dim, factors)

    def sublayer_bytes(self, kind: str) -> int:
        """How much memory the weights of the largest attention, or feed-forward, take."""
        spec = self.stored.family.spec
        called = ([layer.get_submodule(path) for path in spec(kind, place).stages] for place, layer in enumerate(self))
        sizes = (sum(one.numel() for module in own for one in module.parameters()) for own in called)
        return max(sizes) * self.dtype.itemsize


class _Converted:
    """A checkpoint whose tensors come in another dtype, on a device; the layers' must be as their modules are."""

    def __init__(self, layers: StreamedLayers) -> None:
        self.checkpoint = layers.stored.checkpoint
        self.to = (layers.device, layers.dtype)
        prefix = layers.stored.weights.names.layers
        self.expected = {f"{prefix}{name}": tuple(parameter.shape) for name, parameter in layers.named_parameters()}
        self.where = self.checkpoint.where
        self.names = self.checkpoint.names

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor.

        Raises:
            ValueError: if it is missing, or has another shape than the architecture asks for.
        """
        shape = self.checkpoint.shape(name)
        if shape != self.expected.get(name, shape):
            raise ValueError(
                f"{self.checkpoint.folder}: tensor {name} has the shape {shape}, but config.json asks for "
                f"{self.expected[name]}"
            )
        return shape

    def dtype(self, name: str) -> torch.dtype:  # noqa: ARG002 - the same for all
        return self.to[1]

    def tensor(self, name: str) -> Tensor:
        self.shape(name)
        return self.checkpoint.tensor(name).to(*self.to)

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        self.shape(name)
        return self.checkpoint.part(name, dim, first, end).to(*self.to)


def load_streamed(model: str | Path | StoredModel, device: str = "cpu") -> PreTrainedModel:
    """A model whose decoder layers are `StreamedLayers`, in evaluation mode.

    Raises:
        FileNotFoundError, ValueError: as `surgeon.load`; and if the checkpoint runs an edited program.
    """
    avoid_cudnn_attention()
    stored = open_stored(model)
    family = stored.family
    dtype = stored.compute_dtype(device)
    require_streamable(stored)
    if note := stored.dequantised(str(dtype).removeprefix("torch.")):
        warnings.warn(note, stacklevel=1)
    config = copy.deepcopy(stored.config)  # which becomes the model's own
    with init_empty_weights(include_buffers=False):
        whole: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Embeddings, final norm and head are those of the same model with no decoder layers.
    shallow = copy.deepcopy(stored.config)
    for key, value in stored.family.attention_entries(stored.config, []).items():
        setattr(shallow, key, value)
    shallow.num_hidden_layers = 0
    outside: nn.Module = from_files(AutoModelForCausalLM, stored, config=shallow, dtype=dtype)
    whole.load_state_dict(outside.to(device).state_dict(), strict=False, assign=True)
    whole.tie_weights()
    for module in whole.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(whole.device))
    for name, parameter in whole.named_parameters():
        assert not parameter.is_meta or name.startswith(f"{family.layers}."), name
    path, _, name = family.layers.rpartition(".")
    parent = whole.get_submodule(path)
    setattr(parent, name, StreamedLayers(getattr(parent, name), stored, torch.device(device)))
    streamed: PreTrainedModel = whole.eval()
    return streamed


def require_streamable(stored: StoredModel) -> None:
    """Refuse models of which layers cannot be read when they are needed.

    Raises:
        ValueError: if the checkpoint runs an edited program.
    """
    if form_of(stored.checkpoint).shipped is not None:
        raise ValueError(f"{stored.folder} is an edited model, which has to fit into memory")


def streamed_layers(model: PreTrainedModel) -> StreamedLayers | None:
    """The decoder's layers, if their weights are read when they are needed."""
    layers = model.get_submodule(family_of(model.config).layers)
    if isinstance(layers, StreamedLayers):
        return layers
    return None
