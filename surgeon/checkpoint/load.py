"""`surgeon.load`: a `transformers` model from a folder or a hub name, with its program if it has one; or streamed.

Streamed layers are modules on PyTorch's meta device. Reading one sublayer's tensors maps a part of the safetensors file
into memory, which is freed with the tensors.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from surgeon.checkpoint.belongings import GENERATION
from surgeon.checkpoint.config import dense_config, open_stored
from surgeon.checkpoint.forms import form_of
from surgeon.checkpoint.stored import Checkpoint, StoredModel
from surgeon.checkpoint.tensor_file import StoredTensor
from surgeon.machine import avoid_cudnn_attention
from surgeon.models.edit import edit
from surgeon.models.families import family_of
from surgeon.models.weights import FactorSource, ModelWeights, take_experts_apart
from surgeon.models.weights.quantised import PackedTensor
from surgeon.words import first_few

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(
    model: str | Path | StoredModel,
    dtype: torch.dtype | None = None,
    device_map: Any = None,
    packed: bool = False,
) -> PreTrainedModel:
    """Load a model for surgery, in evaluation mode; no code that lies in the folder is run.

    Args:
        model: a checkpoint folder (edited by surgeon or not), a hub name, or a model that is open (`surgeon.open`).
        dtype: to compute in; by default that of the stored embedding, but float32 for 16-bit weights on a CPU.
        device_map: as in `transformers`: "auto", a device, or a mapping of modules to devices.
        packed: keep quantised matrices in memory as they are stored (`PackedTensor`), and make their numbers whenever
            something is computed with them: less memory, more time, and they cannot be trained.

    Raises:
        FileNotFoundError: if there is no such model, or a file of it is missing.
        ValueError: if the architecture is not supported or a file is damaged.
    """
    avoid_cudnn_attention()
    stored = open_stored(model)
    if dtype is None:
        places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
        on_gpu = any(str(place) not in ("None", "cpu", "disk", "meta") for place in places)
        dtype = stored.compute_dtype("cuda" if on_gpu and torch.cuda.is_available() else "cpu")
    model_class = form_of(stored.checkpoint).model_class(stored)
    config = copy.deepcopy(stored.config)  # which becomes the loaded model's own
    if note := stored.dequantised(str(dtype).removeprefix("torch."), packed):
        warnings.warn(note, stacklevel=1)
    try:
        loaded = from_files(
            model_class, stored, packed, config=config, dtype=dtype, device_map=device_map
        )
    except (ArithmeticError, AssertionError, LookupError, TypeError) as error:
        raise ValueError(
            f"{stored.folder / 'config.json'} describes no model that can be built ({type(error).__name__}: {error})"
        ) from error
    ready: PreTrainedModel = loaded.eval()
    if stored.own is not None:
        edit(ready, stored.own)
        vars(ready)["own_program"] = stored.own  # which recipes start from, whatever it is edited to
    return ready


def from_files(
    model_class: Any, stored: StoredModel, packed: bool = False, **options: Any
) -> PreTrainedModel:
    """Build a model from a folder, or the text decoder in it, as `from_pretrained` does.

    Quantised matrices are read as numbers, or stay `packed`, as `load` takes it.
    """
    wrapped = stored.wrapped
    options = options | {"ignore_mismatched_sizes": True, "output_loading_info": True}
    if stored.checkpoint.quantised or stored.checkpoint.imported:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, GenerationConfig

        if model_class is AutoModelForCausalLM:  # which takes names only
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(options["config"])]
        options["config"] = dense_config(copy.deepcopy(options["config"]))
        tensors = {name: _Unread(stored.checkpoint, name, packed) for name in stored.checkpoint.names()}
        loaded, report = model_class.from_pretrained(None, state_dict=tensors, **options)
        loaded.name_or_path = loaded.config._name_or_path = str(stored.folder)
        if (stored.folder / GENERATION).is_file():
            loaded.generation_config = GenerationConfig.from_pretrained(stored.folder)
    elif wrapped is None:
        loaded, report = model_class.from_pretrained(stored.folder, **options)
    else:
        # Patterns of stored names, and what stands in their place in the text decoder alone.
        inside = {
            f"^{before.replace('.', '[.]')}": own for before, own in wrapped.prefixes if before != own
        }
        with quiet():  # it would tell of all that is around the text decoder
            loaded, report = model_class.from_pretrained(stored.folder, key_mapping=inside, **options)
        vars(loaded).pop("_weight_conversions", None)  # saved, the decoder is a model of its own
    check_complete(stored.folder, report)
    made: PreTrainedModel = loaded
    take_experts_apart(made)
    return made


@dataclass(frozen=True, eq=False)
class _Unread:
    """A tensor that `transformers` reads by indexing it with `...`, when it has a place for it."""

    checkpoint: Checkpoint
    name: str
    packed: bool

    def __getitem__(self, everything: Any) -> Tensor:
        if self.packed:
            matrix = self.checkpoint.quantised.get(self.name)
        else:
            matrix = None
        if matrix is not None and len(matrix.shape) == 2:  # others are stacked, and used in parts
            return PackedTensor.of(matrix)
        return self.checkpoint.tensor(self.name)[everything]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence `transformers`' reports while inside."""
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def check_complete(folder: Path, report: Mapping[str, Any]) -> None:
    """Refuse weights that are missing or do not fit, which `transformers` would replace by random numbers."""
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"{folder}: tensor {name} has the shape {tuple(stored)}, but config.json asks for {tuple(expected)}"
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{folder} lacks a tensor of its model: {first_few(missing, 1)}")


class StreamedLayers(nn.ModuleList):
    """A decoder's layers without their weights, which `stored` holds.

    Args:
        layers: on the meta device.
        device: to compute on.
    """

    def __init__(self, layers: nn.ModuleList, stored: StoredModel, device: torch.device) -> None:
        super().__init__(layers)
        self.stored = stored
        self.dtype = stored.compute_dtype(device)
        self.device = device

    def weights(self, head_dim: int, factors: FactorSource | None = None) -> ModelWeights:
        """The files' weights, read on demand; `factors` as `ModelWeights` takes them."""
        checkpoint = self.stored.checkpoint
        prefix = self.stored.weights.names.layers
        for name, parameter in self.named_parameters():
            if (
                stored := checkpoint.tensors.get(f"{prefix}{name}")
            ) is not None and stored.shape != parameter.shape:
                raise ValueError(
                    f"{checkpoint.folder}: tensor {prefix}{name} has the shape {stored.shape}, but config.json asks "
                    f"for {tuple(parameter.shape)}"
                )
        placed = checkpoint.copy()
        placed.tensors = {
            name: _Placed(one, self.device, self.dtype) for name, one in checkpoint.tensors.items()
        }
        return ModelWeights(placed, self.stored.family, head_dim, factors)

    def sublayer_bytes(self, kind: str) -> int:
        """Return the memory of the largest attention's, or feed-forward's, weights."""
        spec = self.stored.family.spec
        called = (
            [layer.get_submodule(path) for path in spec(kind, place).stages]
            for place, layer in enumerate(self)
        )
        sizes = (sum(one.numel() for module in own for one in module.parameters()) for own in called)
        return max(sizes) * self.dtype.itemsize


class _Placed(StoredTensor):
    """A stored tensor that is read onto a device, in another dtype."""

    def __init__(self, stored: StoredTensor, device: torch.device, dtype: torch.dtype) -> None:
        self.stored = stored
        self.device = device
        self.dtype = dtype
        self.paths = stored.paths
        self.shape = stored.shape

    def read(self) -> Tensor:
        return self.stored.read().to(self.device, self.dtype)

    def part(self, dim: int, first: int, end: int) -> Tensor:
        return self.stored.part(dim, first, end).to(self.device, self.dtype)


def load_streamed(model: str | Path | StoredModel, device: str = "cpu") -> PreTrainedModel:
    """Load a model whose decoder layers are `StreamedLayers`, in evaluation mode."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM  # takes seconds, and ranks do without

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
    """Refuse models whose layers cannot be read one by one."""
    if form_of(stored.checkpoint).shipped is not None:
        raise ValueError(f"{stored.folder} is an edited model, which has to fit into memory")


def streamed_layers(model: PreTrainedModel) -> StreamedLayers | None:
    """Return the decoder's layers if they are streamed."""
    layers = model.get_submodule(family_of(model.config).layers)
    if isinstance(layers, StreamedLayers):
        return layers
    return None
