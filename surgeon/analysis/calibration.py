"""Text to calibrate on, apart from the text that is measured on."""

from __future__ import annotations

from dataclasses import replace

from surgeon.checkpoint.load import read_config
from surgeon.checkpoint.read import Checkpoint, locate
from surgeon.quality.data import Windows, digest_of, load_windows, window_for
from surgeon.runtime.text import open_tokenizer


def load_calibration(
    model: str,
    data: str,
    tokens: int,
    wanted: int,
    window: int | None = None,
    separator: str | None = None,
    other: str | None = None,
) -> Windows:
    """Windows to calibrate on: what follows the measured ones in their text, or the beginning of another text.

    Args:
        model: a checkpoint folder, a hub name or "demo".
        data: the text measured on, as `load_windows` takes it.
        tokens: measured on, from the start of the data.
        wanted: tokens to calibrate on; fewer if the text has no more, which a note says.
        window, separator: as for the text measured on.
        other: text to calibrate on instead of what follows.

    Raises:
        FileNotFoundError: if the model, a file of it, or the data is missing.
        ValueError: if one of them cannot be used, or nothing follows the measured text.
    """
    folder = locate(model)
    size, tokenizer = window_for(read_config(Checkpoint(folder)), window), open_tokenizer(folder)
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
