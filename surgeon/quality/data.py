"""Text that a model is measured on, as fixed, non-overlapping windows of tokens."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surgeon.quality import DEFAULT_TOKENS, DEFAULT_WINDOW
from surgeon.quality.sources import DEMO, are_apart, documents
from surgeon.quality.text_files import Reading
from surgeon.quality.tokens import TextTokens

__all__ = [
    "DEFAULT_TOKENS",
    "DEFAULT_WINDOW",
    "DEMO",
    "Windows",
    "held_out",
    "load_windows",
    "window_for",
]

HELD_OUT_SHARE = 10  # by default one in so many windows of a text is held out
HELD_OUT_TOKENS = 16384  # at most
_MARKS = ("<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<s>")
_TRIED_CHARACTERS = 4096  # of the default text, with a tokenizer
_LOST_CHARACTERS = 0.1  # of them: with more, it is not for such text
LEAST_HELD_OUT = 2  # windows: one has no interval
_HOLD_OUT_ADVICE = "search on fewer tokens so that text is left, hold out other text, or hold out none"


@dataclass(frozen=True)
class Windows:
    """Windows of a text.

    Attributes:
        ids: (windows, tokens); in each window every token but the first is predicted.
        answers: (windows, tokens), tokens that count, of conversations; None where all do.
        source: the data as the user named it.
        digest: SHA-256 of the token ids and their shape.
        separator: between documents; None where the text was read as one.
        notes: for the user, one line each.
        column: of a table or dataset.
        left_out: counts of what was left out, as far as the text was read (see `Reading`).
    """

    ids: Tensor
    source: str
    digest: str
    separator: str | None = None
    notes: tuple[str, ...] = ()
    column: str | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    answers: Tensor | None = None

    def record(self, name: str = "data") -> dict[str, Any]:
        """Describe the text as JSON values, under names that begin with `name`."""
        record: dict[str, Any] = {name: self.source, f"{name}_hash": self.digest}
        if self.column is not None:
            record[f"{name}_column"] = self.column
        if self.left_out:
            record[f"{name}_left_out"] = dict(self.left_out)
        return record

    @property
    def predicted(self) -> int:
        if self.answers is not None:
            return int(self.answers[:, 1:].sum())
        return len(self.ids) * (self.ids.shape[1] - 1)


def load_windows(
    tokenizer: Any,
    data: str,
    window: int = DEFAULT_WINDOW,
    tokens: int = DEFAULT_TOKENS,
    separator: str | None = None,
    after: int = 0,
    at_most: bool = False,
) -> Windows:
    """Cut the first `tokens` tokens of a text, or those behind its first `after`, into windows.

    With a separator the text is split into documents (at least one for each row of a table), each begun with the
    tokenizer's BOS, or ended with its EOS where it has no BOS. Documents follow one another in the windows. Without a
    separator all of the text is one document, with a blank line between rows.

    A byte order mark, the CR of CRLF, rows without text (null, or no such column) and empty documents between
    separators are left out; the result counts them, and its notes name them.

    Args:
        tokenizer: a `transformers` tokenizer.
        data: a UTF-8 text file; a .jsonl, .json (one object a line) or .parquet file, as file or file:column (by
            default the column text, or else the only one of strings); a folder of such files, whose documents are
            apart; "demo" for held-out source files of the Python standard library, "demo:train" for the others, which
            the demo model was trained on; or the name of a dataset for `datasets`, as name[:config[:split[:column]]].
            Text and JSON files may be compressed (.gz). Endings count in any letter case.
        window: tokens in a window.
        tokens: tokens in all, cut down to whole windows.
        after: tokens to skip before these, whole windows.
        at_most: do not note that there is less text than that.

    Raises:
        FileNotFoundError: if there is no such file or dataset.
        ValueError: if the text is empty, not UTF-8 (UTF-16 is named, NUL bytes are refused), too short for one window,
            a row is damaged or holds something else (a lone surrogate, too), the column is ambiguous, or the sizes make
            no sense.
    """
    check_window(window)
    if tokens < window:
        raise ValueError(
            f"tokens must be at least one window of {window}, not {tokens}; take more tokens or a smaller window"
        )
    if after < 0 or after % window:
        raise ValueError(
            f"what is left out must be whole windows of {window} tokens, not {after} tokens"
        )
    if separator == "":
        raise ValueError(
            "the separator is empty; give the text between documents, such as '<|endoftext|>'"
        )
    wanted = after + tokens // window * window
    apart = are_apart(data, separator)
    ids: list[int] = []
    reading = Reading()
    for some in TextTokens(tokenizer, apart).read(documents(data, separator, reading)):
        ids += [id_ for each in some for id_ in each.ids.tolist()]
        if len(ids) >= wanted:
            break
    ids, shortage = _cut_windows(ids, data, window, after, wanted)
    notes = reading.lines(data)
    if shortage and not at_most:
        notes.insert(0, shortage)
    if not apart:
        notes += marks_in_text(tokenizer, ids, data)
    tensor = torch.tensor(ids, dtype=torch.long).view(-1, window)
    return Windows(
        tensor, data, digest_of(tensor), separator, tuple(notes), reading.column, +reading.left_out
    )


def marks_in_text(tokenizer: Any, ids: list[int], data: str) -> list[str]:
    """Warn of marks between documents that were read as ordinary text."""
    # The BOS that the tokenizer itself put at the start is no sign of them.
    marks = [mark for mark in _MARKS if tokenizer.decode(ids).count(mark, len(mark))]
    if not marks:
        return []
    advice = f"to keep its documents apart, give the separator '{marks[0]}'"
    return [
        f"{data} contains {marks[0]!r}, read as ordinary text, which makes perplexity worse; {advice}"
    ]


def default_data(tokenizer: Any) -> str:
    """Choose the demo's text where none is given, with a warning."""
    text = "".join(next(documents(DEMO, None)))[:_TRIED_CHARACTERS]
    read = tokenizer.decode(
        tokenizer(text, add_special_tokens=False)["input_ids"], skip_special_tokens=True
    )
    wanted, kept = (Counter("".join(part.split())) for part in (text, read))
    lost = 1 - (wanted & kept).total() / wanted.total()
    what = "source files of the Python standard library"
    if lost > _LOST_CHARACTERS:
        raise ValueError(
            f"no text was given, and the one that ships with surgeon, {what}, is nothing for this tokenizer, which has "
            f"no tokens for {lost:.0%} of its characters; give a text that the model is made for"
        )
    warnings.warn(
        f"no text was given, so the one that ships with surgeon is used: {what}. What is found holds for such text; "
        "for a model that is used on another, give some of that",
        stacklevel=2,
    )
    return DEMO


def _cut_windows(
    ids: list[int], data: str, window: int, after: int, wanted: int
) -> tuple[list[int], str]:
    """Take the whole windows up to token `wanted` behind the skipped ones; and a note where there are fewer."""
    if not ids:
        raise ValueError(f"{data} is empty; give a text file with something in it")
    if len(ids) < window:
        raise ValueError(
            f"{data} has {len(ids)} tokens, fewer than one window of {window}; use a smaller window or more text"
        )
    read = min(wanted, len(ids) // window * window)
    if read <= after:
        raise ValueError(
            f"{data} has only {len(ids)} tokens, and {after} of them are left out: not one window of {window} follows"
        )
    if read == wanted:
        return ids[after:read], ""
    behind = ""
    if after:
        behind = f" behind the first {after}"
    asked = f"of the {wanted - after} asked for"
    return ids[
        after:read
    ], f"{data} has only {read - after} tokens in whole windows{behind} {asked}: all are used"


def digest_of(ids: Tensor) -> str:
    """Hash token ids and their shape (SHA-256)."""
    return hashlib.sha256(
        repr(tuple(ids.shape)).encode() + ids.contiguous().numpy().tobytes()
    ).hexdigest()


def shared_windows(one: Windows, other: Windows) -> int:
    """Count windows that two texts share: a model is not judged by text that it was chosen by."""
    seen = {row.tobytes() for row in other.ids.numpy()}
    return sum(row.tobytes() in seen for row in one.ids.numpy())


def held_out(
    tokenizer: Any,
    searched: Windows,
    tokens: int | None = None,
    other: str | None = None,
) -> Windows:
    """Load text that a search has not seen: what follows its windows, or another text, in windows of equal length.

    Args:
        tokenizer: of the searched windows.
        searched: the first windows of their data.
        tokens: by default as many as were searched on, and at least two windows; a note tells where there are fewer.
        other: another text, as `load_windows` takes it.

    Raises:
        FileNotFoundError: if there is no such other text.
        ValueError: if there are not two windows of it, or it holds windows that were searched on.
    """
    window = searched.ids.shape[1]
    separator = searched.separator
    wanted = max(searched.ids.numel(), LEAST_HELD_OUT * window)
    if tokens is not None:
        wanted = tokens
    if wanted < LEAST_HELD_OUT * window:
        raise ValueError(
            f"held-out text of {wanted} tokens is less than {LEAST_HELD_OUT} windows of {window}, without which there "
            f"is no interval; hold out {LEAST_HELD_OUT * window} or more"
        )
    if other is None:
        used = searched.ids.numel()
        try:
            found = load_windows(tokenizer, searched.source, window, wanted, separator, after=used)
        except ValueError as error:
            raise ValueError(f"nothing is left to hold out: {error}; {_HOLD_OUT_ADVICE}") from error
    else:
        found = load_windows(tokenizer, other, window, wanted, separator)
        if again := shared_windows(found, searched):
            raise ValueError(
                f"{again} of the {len(found.ids)} windows of {found.source} are among those that the search saw; hold "
                "out other text"
            )
    if len(found.ids) < LEAST_HELD_OUT:
        raise ValueError(
            f"{found.source} has only {len(found.ids)} window of {window} tokens to hold out, and an interval needs "
            f"{LEAST_HELD_OUT}; {_HOLD_OUT_ADVICE}"
        )
    return found


def tokens_before_rest(
    tokenizer: Any, data: str, window: int, tokens: int, separator: str | None = None, least: int = 1
) -> int:
    """Count the first tokens of a text that are used where the rest is held out by default.

    The rest is a tenth of the text, at most 16,384 tokens and at least `least` windows. Where too few follow the
    `tokens` that are asked for, fewer are used, with a warning.

    Raises:
        FileNotFoundError, ValueError: as `load_windows`.
    """
    most = max(least, HELD_OUT_TOKENS // window)
    there = len(
        load_windows(tokenizer, data, window, tokens + most * window, separator, at_most=True).ids
    )
    rest = min(most, max(least, there // HELD_OUT_SHARE))
    used = min(tokens // window, there - rest)
    if used < 1 or used == tokens // window:
        return tokens
    warnings.warn(
        f"{data} has {there * window:,} tokens in whole windows: the first {used * window:,} are used of the "
        f"{tokens:,} asked for, and the last {rest * window:,} are held out",
        stacklevel=2,
    )
    return used * window


def check_window(window: int) -> None:
    """Refuse windows in which nothing is predicted."""
    if window < 2:
        raise ValueError(f"window must be at least 2 tokens, so that one is predicted, not {window}")


def window_for(config: Any, window: int | None) -> int:
    """Choose the window: the given one or the default, within the model's positions."""
    positions = getattr(config, "max_position_embeddings", None)
    if window is None:
        return min(DEFAULT_WINDOW, positions or DEFAULT_WINDOW)
    if positions is not None and window > positions:
        raise ValueError(
            f"a window of {window} tokens is longer than the model's {positions} positions; use a window of {positions}"
        )
    return window
