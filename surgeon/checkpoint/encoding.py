"""From text to token ids, for several threads at a time, without tokenizing what is certainly too long.

Tokenizing takes time and memory in proportion to the text, hundreds of bytes for every character. How many tokens a
text has at least is known at once where every character ends up in some token: the longest token has so many.
"""

from __future__ import annotations

import json
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

LONG_CHARACTERS = 1 << 17  # texts beyond are tokenized one at a time, so that they do not fill the memory together
_NFC_SHRINKS = 4  # code points that become one at most: so many has the longest canonical decomposition
_SPLITTING = ("ByteLevel", "Metaspace", "Digits")  # that keep every character
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class Encoder:
    """A tokenizer of `transformers` that several threads may use."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        tokenizer("a")  # which forgets the truncation and padding that its file may ask for
        self._fast = bool(tokenizer.is_fast)
        self._lock = threading.Lock()  # of a tokenizer in Python, about which nobody knows
        self._long = threading.Lock()
        self._most_characters, self._stripping = _most_characters(tokenizer) if self._fast else (None, [])

    def fewest(self, text: str) -> int:
        """How many tokens a text has at least; never more than it has."""
        if self._most_characters is None:
            return 0
        characters = len(text)
        if any(token in text for token in self._stripping):  # which take any number of spaces with them
            characters = sum(map(len, text.split()))
        return -(-characters // self._most_characters)

    def __call__(self, text: str, special: bool = True) -> list[int]:
        """The token ids of a text.

        Args:
            special: whether to add what the model's texts begin and end with.
        """
        alone: AbstractContextManager[object] = self._long if len(text) > LONG_CHARACTERS else nullcontext()
        with alone:
            if self._fast:
                # The only call that leaves other threads running, and it keeps no places of tokens.
                batch = self.tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=special)
                ids: list[int] = batch[0].ids
                return ids
            with self._lock:
                return list(self.tokenizer(text, add_special_tokens=special).input_ids)


def _most_characters(tokenizer: Any) -> tuple[int | None, list[str]]:
    """How many characters of a text a token stands for at most, and the tokens that take spaces beside them, too.

    None where characters may vanish: in unknown tokens, normalisation, or between words.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    shrinks = _shrinking(described["normalizer"])
    splits = _steps(described["pre_tokenizer"], "pretokenizers")
    loses = any(
        step["type"] not in _SPLITTING
        and (step["type"] not in ("Split", "Punctuation") or step["behavior"] == "Removed")
        for step in splits
    )
    vocabulary = tokenizer.get_vocab()
    if shrinks is None or loses or not _knows_all(described["model"], splits, vocabulary):
        return None, []
    added = described["added_tokens"]
    # Those that are looked for in normalised text may be written in many ways: "" is in every text.
    stripping = [
        "" if token["normalized"] else token["content"] for token in added if token["lstrip"] or token["rstrip"]
    ]
    return shrinks * max(map(len, vocabulary)), stripping


def _steps(step: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for one in step[several] for inner in _steps(one, several)]
    return [step]


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """How many characters become one at most; None if that is not known."""
    shrinks = 1
    for step in _steps(normalizer, "normalizers"):
        if step["type"] == "NFC":
            shrinks *= _NFC_SHRINKS
        elif step["type"] == "Replace":
            if len(step["content"]) < len(step["pattern"].get("String", "")) or "String" not in step["pattern"]:
                return None
        elif step["type"] not in ("NFD", "Prepend"):
            return None
    return shrinks


def _knows_all(model: dict[str, Any], splits: list[dict[str, Any]], vocabulary: dict[str, int]) -> bool:
    """Whether every character has tokens of its own, if not one then its bytes."""
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    if any(step["type"] == "ByteLevel" for step in splits):
        from tokenizers.pre_tokenizers import ByteLevel

        return all(letter in vocabulary for letter in ByteLevel.alphabet())
    return bool(model.get("byte_fallback")) and all(byte in vocabulary for byte in _BYTES)
