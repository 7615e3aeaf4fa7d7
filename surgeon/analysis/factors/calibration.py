"""Text to calibrate on, apart from the text that is measured on."""

from __future__ import annotations

from dataclasses import replace

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
    ids = both.ids[before // window :]
    return replace(both, ids=ids, digest=digest_of(ids)), both.ids.numel()


def recorded(windows: Windows, after: int = 0) -> Calibration:
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
    known = calibration.get("hash")
    if known is not None and known != f"sha256:{found.digest}":
        raise ValueError(
            f"the calibration text {data} is not what the recipe was made with: its tokens have "
            f"sha256:{found.digest}, and the recipe says {known}; bring the text back, or remove the hash to calibrate "
            "on what there is now"
        )
    return found
