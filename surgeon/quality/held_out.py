"""Text that a search has not seen, to measure again on what it found."""

from __future__ import annotations

from typing import Any

from surgeon.quality.data import Windows, load_windows, shared_windows

LEAST = 2  # windows: one has no interval
_ADVICE = "search on fewer tokens so that text is left, hold out other text, or hold out none"


def held_out(
    tokenizer: Any, searched: Windows, tokens: int | None = None, other: str | None = None, between: int = 0
) -> Windows:
    """Windows of the length of those searched on: what follows them in their data, or the beginning of another text.

    Args:
        tokenizer: the one that the searched windows were made with.
        searched: the first windows of their data.
        tokens: how many are wanted, by default as many as were searched on and at least two windows; where there are
            fewer, a note says so.
        other: text to use in the place of what follows, as `load_windows` takes it.
        between: tokens, whole windows, that follow the searched ones and have been used for something else.

    Raises:
        FileNotFoundError: if there is no such other text.
        ValueError: if there are not two windows of it, or it holds windows that were searched on.
    """
    window, separator = searched.ids.shape[1], searched.separator
    wanted = max(searched.ids.numel(), LEAST * window) if tokens is None else tokens
    if wanted < LEAST * window:
        raise ValueError(
            f"held-out text of {wanted} tokens is less than {LEAST} windows of {window}, without which there is no "
            f"interval; hold out {LEAST * window} or more"
        )
    if other is None:
        used = searched.ids.numel() + between
        try:
            found = load_windows(tokenizer, searched.source, window, wanted, separator, after=used)
        except ValueError as error:
            raise ValueError(f"nothing is left to hold out: {error}; {_ADVICE}") from error
    else:
        found = load_windows(tokenizer, other, window, wanted, separator)
        if again := shared_windows(found, searched):
            raise ValueError(
                f"{again} of the {len(found.ids)} windows of {found.source} are among those that the search saw; hold "
                "out other text"
            )
    if len(found.ids) < LEAST:
        raise ValueError(
            f"{found.source} has only {len(found.ids)} window of {window} tokens to hold out, and an interval needs "
            f"{LEAST}; {_ADVICE}"
        )
    return found
