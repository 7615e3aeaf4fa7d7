"""`surgeon.load`: a `transformers` model from a folder or a hub name, with its program if it has one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import logging

from surgeon.checkpoint.belongings import GENERATION
from surgeon.checkpoint.config import dense_config, read_config
from surgeon.checkpoint.forms import form_of
from surgeon.checkpoint.locate import locate
from surgeon.checkpoint.read import Checkpoint
from surgeon.checkpoint.stored import StoredModel
from surgeon.gpus import avoid_cudnn_attention
from surgeon.models.edit import edit
from surgeon.models.weights import take_experts_apart
from surgeon.models.weights.quantised import PackedTensor
from surgeon.named import model_name
from surgeon.words import first_few

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def open_stored(what: str | Path | Checkpoint | StoredModel) -> StoredModel:
    """What is known of a model without reading its weights.

    Args:
        what: a checkpoint's folder, a hub name, or either of what has been opened already.

    Raises:
        FileNotFoundError: if there is no such model, or a file of it is missing.
        ValueError: if the architecture is not supported, or a file is damaged.
    """
    if isinstance(what, StoredModel):
        return what
    checkpoint = what if isinstance(what, Checkpoint) else Checkpoint(locate(what))
    for matrix in checkpoint.quantised.values():
        _ = matrix.arrangement  # checks its tensors
    name = str(checkpoint.folder) if isinstance(what, Checkpoint) else model_name(what)
    return StoredModel(name, checkpoint, *read_config(checkpoint))


def load(
    model: str | Path | StoredModel, dtype: torch.dtype | None = None, device_map: Any = None, packed: bool = False
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
        loaded = from_files(model_class, stored, packed, config=config, dtype=dtype, device_map=device_map)
    except (ArithmeticError, AssertionError, LookupError, TypeError) as error:
        raise ValueError(
            f"{stored.folder / 'config.json'} describes no model that can be built ({type(error).__name__}: {error})"
        ) from error
    ready: PreTrainedModel = loaded.eval()
    if stored.own is not None:
        edit(ready, stored.own)
        vars(ready)["own_program"] = stored.own  # which recipes start from, whatever it is edited to
    return ready


def from_files(model_class: Any, stored: StoredModel, packed: bool = False, **options: Any) -> PreTrainedModel:
    """What `from_pretrained` makes of a model's folder, or of the text decoder in it.

    Quantised matrices are read as the numbers that they stand for, or stay `packed`, as `load` takes it.

    Raises:
        ValueError: if a tensor is missing or does not fit.
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
        with quiet():  # it would tell of all that is around the text decoder
            loaded, report = model_class.from_pretrained(stored.folder, key_mapping=wrapped.loading, **options)
        vars(loaded).pop("_weight_conversions", None)  # saved, the decoder is a model of its own
    check_complete(stored.folder, report)
    made: PreTrainedModel = loaded
    take_experts_apart(made)
    return made


class _Unread:
    """A tensor that `transformers` reads by indexing it with `...`, when it has a place for it."""

    def __init__(self, checkpoint: Checkpoint, name: str, packed: bool) -> None:
        self.checkpoint = checkpoint
        self.name = name
        self.packed = packed

    def __getitem__(self, everything: Any) -> Tensor:
        matrix = self.checkpoint.quantised.get(self.name) if self.packed else None
        if matrix is not None and len(matrix.shape) == 2:  # others are stacked, and used in parts
            return PackedTensor.of(matrix)
        return self.checkpoint.tensor(self.name)[everything]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep `transformers` from reporting on every load."""
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
    """Refuse what `transformers` would go on with, with random numbers in place of weights that do not fit.

    Args:
        report: of loading, as `transformers` gives it; of it `mismatched_keys` (name, stored shape, wanted shape) and
            `missing_keys` count.

    Raises:
        ValueError: naming the first one.
    """
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"{folder}: tensor {name} has the shape {tuple(stored)}, but config.json asks for {tuple(expected)}"
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{folder} lacks a tensor of its model: {first_few(missing, 1)}")
