"""From text to token ids, for several threads at a time, without tokenizing what is far too long.

Tokenizing takes time and memory in proportion to the text, hundreds of bytes for every character.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

LONG_CHARACTERS = 1 << 17  # texts beyond are tokenized one at a time, so that they do not fill the memory together
CANONICAL = 4  # code points that become one at most as texts are normalised


class Encoder:
    """A tokenizer of `transformers` that several threads may use."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        tokenizer("a")  # which forgets the truncation and padding that its file may ask for
        self._fast = bool(tokenizer.is_fast)
        self._lock = threading.Lock()  # of a tokenizer in Python, about which nobody knows
        self._long = threading.Lock()
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)

    def most_characters(self, tokens: int) -> int:
        """How long a text may be to be tokenized where so many tokens fit: all of them the longest there are."""
        return CANONICAL * self._longest * tokens

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
