"""The subject of an analysis: a model, and the text it is measured on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from surgeon.checkpoint.load import load, load_streamed
from surgeon.machine import available_bytes, gpu_with_room, parse_size, show_size
from surgeon.opened import Model, open_model
from surgeon.quality.data import DEFAULT_TOKENS, Windows, default_data, load_windows, window_for

_LEAST_ROOM = 64 << 20  # for the numbers of a single small task


@dataclass(frozen=True)
class Subject:
    """A loaded model and its windows of text.

    Attributes:
        opened: the model as the user named it.
        model: the same, loaded.
        memory: the limit in bytes on the memory of the process.
    """

    opened: Model
    model: PreTrainedModel
    windows: Windows
    memory: int | None = None

    def provenance(self, **more: Any) -> dict[str, Any]:
        """Record the subject, for every table made of it."""
        text = self.windows
        return self.opened.provenance(
            **text.record(),
            separator=text.separator,
            window=text.ids.shape[1],
            tokens=text.ids.numel(),
            tokens_predicted=text.predicted,
            num_layers=self.opened.num_layers,
            steps_per_layer=self.opened.family.steps_per_layer,
            **more,
        )


def open_subject(
    model: str | Path | Model,
    data: str | Path | None,
    tokens: int = DEFAULT_TOKENS,
    window: int | None = None,
    separator: str | None = None,
    memory: int | str | None = None,
    elsewhere: bool = False,
) -> Subject:
    """Load a model and the text to measure it on, with warnings about the text.

    The text comes first, so that its faults are known before a large model is loaded.

    Args:
        memory: a limit on the memory of the whole process, in bytes or as one writes it ("2GB").
        elsewhere: other processes will run the model; here only its structure is needed.
    """
    opened = open_model(model)
    limit = parse_size(memory) if isinstance(memory, str) else memory
    # The text comes first: what is wrong with it is said before a large model is loaded.
    source = default_data(opened.tokenizer) if data is None else str(data)
    windows = load_windows(
        opened.tokenizer, source, window_for(opened.config, window), tokens, separator
    )
    for note in windows.notes:
        warnings.warn(note, stacklevel=2)
    # One with a program of its own is not streamed.
    streams = elsewhere and opened.form.shipped is None
    loaded = load_streamed(opened) if streams else load_for_analysis(opened, limit)
    return Subject(opened, loaded, windows, limit)


def load_for_analysis(
    model: Model, memory: int | None = None, device: str | None = None
) -> PreTrainedModel:
    """Load a model to measure: whole where it fits, else with weights that are read layer by layer."""
    if device is None and torch.cuda.is_available():
        device = str(gpu_with_room(model.bytes_on("cuda") + _LEAST_ROOM) or "cuda:0")
    device = device or "cpu"
    size = model.bytes_on(device)
    room = available_bytes(torch.device(device), memory)
    if size + _LEAST_ROOM <= room:
        return load(model, device_map=None if device == "cpu" else device)
    warnings.warn(
        f"the model's weights ({show_size(size)}) do not fit into the memory that is left ({show_size(max(0, room))}): "
        "they are read layer by layer",
        stacklevel=2,
    )
    return load_streamed(model, device)
