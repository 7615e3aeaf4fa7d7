"""Text to calibrate on, apart from the text that is measured on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from surgeon.checkpoint.load import read_config
from surgeon.checkpoint.read import Checkpoint
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.language.operations.lowrank import Calibration
from surgeon.opened import Model, open_model
from surgeon.quality.data import Windows, digest_of, load_windows, window_for
from surgeon.quality.sources import file_and_column

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
    """Windows to calibrate on: what follows the measured ones in their text, or the beginning of another text.

    Args:
        model: a checkpoint folder, a hub name, "demo", or a model that is open.
        data: the text measured on, as `load_windows` takes it.
        tokens: measured on, from the start of the data.
        wanted: tokens to calibrate on; fewer if the text has no more, which a note says.
        window, separator: as for the text measured on.
        other: text to calibrate on instead of what follows.

    Raises:
        FileNotFoundError: if the model, a file of it, or the data is missing.
        ValueError: if one of them cannot be used, or nothing follows the measured text.
    """
    opened = model if isinstance(model, Model) else open_model(model)
    size, tokenizer = window_for(opened.config, window), opened.tokenizer
    if wanted < size:
        raise ValueError(f"calibration tokens must be at least one window of {size}, not {wanted}")
    if other is not None:
        return load_windows(tokenizer, other, size, wanted, separator)
    measured = tokens // size
    both = load_windows(tokenizer, data, size, measured * size + wanted, separator)
    ids = both.ids[measured:]
    if not len(ids):
        raise ValueError(
            f"{data} has {both.ids.numel()} tokens in whole windows, and all of them are measured: none are left to "
            "calibrate on; lower --tokens, or give other text with --calibration"
        )
    fewer = f"{ids.numel()} tokens are left to calibrate on, fewer than the {wanted} asked for: all are used"
    notes = (fewer,) if len(ids) < wanted // size else ()
    return replace(both, ids=ids, digest=digest_of(ids), notes=notes)


def recorded(windows: Windows, after: int = 0) -> Calibration:
    """How a recipe names the text that was calibrated on, wherever it is used from: a file by its whole path.

    Args:
        after: how many tokens come before it in its data.
    """
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


def load_recorded(folder: Path, calibration: Calibration) -> Windows:
    """The text that a recipe names.

    Args:
        folder: of the model, whose tokenizer reads it.

    Raises:
        FileNotFoundError: if the text is gone.
        ValueError: if it is not named, has changed since the recipe was made, or cannot be used.
    """
    if "data" not in calibration:
        raise ValueError("calibration has no text; add data, as in calibration: {data: text.txt, tokens: 32768}")
    data, after = calibration["data"], calibration.get("after", 0)
    size = window_for(read_config(Checkpoint(folder)), calibration.get("window"))
    wanted, separator = calibration.get("tokens", CALIBRATION_TOKENS), calibration.get("separator")
    if after < 0 or after % size:
        raise ValueError(f"calibration: after must be whole windows of {size} tokens, not {after}")
    if wanted < size:
        raise ValueError(f"calibration: tokens must be at least one window of {size}, not {wanted}")
    try:
        both = load_windows(open_tokenizer(folder), data, size, after + wanted, separator)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"the calibration text is gone: {error}") from error
    ids = both.ids[after // size :]
    if not len(ids):
        raise ValueError(
            f"calibration: {data} has no more than {both.ids.numel()} tokens, of which {after} are left out"
        )
    digest, known = digest_of(ids), calibration.get("hash")
    if known is not None and known != f"sha256:{digest}":
        raise ValueError(
            f"the calibration text {data} is not what the recipe was made with: its tokens have sha256:{digest}, and "
            f"the recipe says {known}; bring the text back, or remove the hash to calibrate on what there is now"
        )
    return replace(both, ids=ids, digest=digest)
