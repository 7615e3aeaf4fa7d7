"""The subject of an analysis: a model, the text it is measured on, and text to calibrate on, apart from that."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from surgeon.analysis.importance import unit_importance
from surgeon.language.operations.lowrank import Calibration
from surgeon.language.operations.width import USUAL
from surgeon.language.program import Program
from surgeon.machine import available_bytes, gpu_with_room, parse_size, show_size
from surgeon.models.edit import program_of
from surgeon.models.weights import FactorSource, ScoredUnits, TruncatedSVD, UnitsByLayer
from surgeon.opened import Model, load, load_streamed, open_model
from surgeon.quality import DEFAULT_TOKENS
from surgeon.quality.data import Windows, default_data, load_windows, window_for
from surgeon.quality.sources import file_and_column
from surgeon.version import FORMAT

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

    def identity(self, **more: Any) -> dict[str, Any]:
        """Name what all numbers of a journal depend on."""
        return {"format": FORMAT, "model_hash": self.opened.hash, "data": self.windows.digest, **more}

    def provenance(self, **more: Any) -> dict[str, Any]:
        """Record the subject, for every table made of it."""
        text = self.windows
        return self.opened.provenance(
            **text.record(),
            separator=text.separator,
            window=text.ids.shape[1],
            tokens=text.ids.numel(),
            tokens_predicted=text.predicted_tokens,
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


CALIBRATION_TOKENS = 32768


def load_calibration(
    model: str | Model,
    data: str,
    tokens: int,
    wanted: int,
    window: int | None = None,
    separator: str | None = None,
    other: str | None = None,
) -> Windows:
    """Load windows to calibrate on: what follows the measured ones in their text, or the beginning of another text.

    Args:
        tokens: measured on, from the start of the data.
        wanted: tokens to calibrate on; fewer if the text has no more, which a note tells.
        other: text to calibrate on instead of what follows.
    """
    opened = open_model(model)
    size = window_for(opened.config, window)
    if wanted < size:
        raise ValueError(f"calibration tokens must be at least one window of {size}, not {wanted}")
    if other is not None:
        return load_windows(opened.tokenizer, other, size, wanted, separator)
    found, whole = _behind(opened, data, tokens // size * size, wanted, size, separator)
    left = found.ids.numel()
    if not left:
        raise ValueError(
            f"{data} has {whole} tokens in whole windows, and all of them are measured: none are left to "
            "calibrate on; measure fewer tokens, or give other text as calibration"
        )
    fewer = f"{left} tokens are left to calibrate on, fewer than the {wanted} asked for: all are used"
    return replace(found, notes=(fewer,) if left < wanted // size * size else ())


def _behind(
    model: Model, data: str, before: int, wanted: int, window: int, separator: str | None
) -> tuple[Windows, int]:
    """The windows of a text behind its first tokens, which are whole windows, and how many tokens were read in all."""
    both = load_windows(model.tokenizer, data, window, before + wanted, separator)
    return both.behind(before // window), both.ids.numel()


def calibration_entry(windows: Windows, after: int = 0) -> Calibration:
    """Name a calibration text, after so many tokens of its data, as recipes do: a file by its whole path."""
    path, column = file_and_column(windows.source)
    whole = windows.source if path is None else str(path.resolve())
    named: Calibration = {
        "data": whole if column is None else f"{whole}:{column}",
        "tokens": windows.ids.numel(),
        "window": windows.ids.shape[1],
        "hash": f"sha256:{windows.digest}",
    }
    if after:
        named["after"] = after
    if windows.separator is not None:
        named["separator"] = windows.separator
    return named


def load_recorded(model: Model, calibration: Calibration) -> Windows:
    """Load the text that a recipe names.

    Raises:
        FileNotFoundError: if the text is gone.
        ValueError: if it is not named, has changed since the recipe was made, or cannot be used.
    """
    if "data" not in calibration:
        raise ValueError(
            "calibration has no text; add data, as in calibration: {data: text.txt, tokens: 32768}"
        )
    data = calibration["data"]
    after = calibration.get("after", 0)
    size = window_for(model.config, calibration.get("window"))
    wanted = calibration.get("tokens", CALIBRATION_TOKENS)
    if after < 0 or after % size:
        raise ValueError(f"calibration: after must be whole windows of {size} tokens, not {after}")
    if wanted < size:
        raise ValueError(f"calibration: tokens must be at least one window of {size}, not {wanted}")
    try:
        found, whole = _behind(model, data, after, wanted, size, calibration.get("separator"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"the calibration text is gone: {error}") from error
    if not len(found.ids):
        raise ValueError(
            f"calibration: {data} has no more than {whole} tokens, of which {after} are left out"
        )
    recorded_hash = calibration.get("hash")
    if recorded_hash is not None and recorded_hash != f"sha256:{found.digest}":
        raise ValueError(
            f"the calibration text {data} is not what the recipe was made with: its tokens have "
            f"sha256:{found.digest}, and the recipe says {recorded_hash}; bring the text back, or remove the hash to "
            "calibrate on what there is now"
        )
    return found


def most_important(
    model: PreTrainedModel,
    programs: Iterable[Program],
    windows: Windows,
    folder: Path | None = None,
    factors: FactorSource | None = None,
    **more: Any,
) -> FactorSource | None:
    """The source of units of programs that are measured on a text: those that matter most on it, by Wanda."""
    own: Program = vars(model).get("own_program") or program_of(model)
    # Layers stored as narrow as asked leave nothing to choose.
    stored = {(one.parts[0], one.width) for one in own.sublayers()}
    sublayers = (one for program in programs for one in program.sublayers() if one.width is not None)
    narrowed = {one.parts[0] for one in sublayers if (one.parts[0], one.width) not in stored}
    if not narrowed:
        return factors
    found = unit_importance(model, dict.fromkeys(sorted(narrowed), USUAL), windows, folder, **more)
    scored = {part: ScoredUnits(values, USUAL) for part, values in found.items()}
    return UnitsByLayer(scored, factors or TruncatedSVD(remembers=True))
