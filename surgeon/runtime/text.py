"""From token ids to text as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from surgeon.checkpoint.read import locate

CONTEXT = 16  # prompt tokens decoded with the new ones, because tokenizers write a text's first token differently
UNFINISHED = "\ufffd"  # what a token decodes to that holds a part of a character


def open_tokenizer(path_or_name: str | Path) -> Any:
    """The tokenizer in a checkpoint folder.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if there is no tokenizer in it that can be read.
    """
    folder = locate(path_or_name)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{folder} has no tokenizer that can be read ({reason}); copy the original model's tokenizer files into it"
        ) from error


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """The token ids of a prompt.

    Raises:
        ValueError: if it has none, or is not text.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not text in UTF-8 (at character {error.start})") from error
    tokens: list[int] = tokenizer(prompt).input_ids
    if not tokens:
        raise ValueError("the prompt is empty: it has no tokens; give --prompt at least one character")
    return tokens


class Continuation:
    """Turns new tokens into text, piece by piece, whose sum is the text that follows the prompt."""

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self.tokenizer = tokenizer
        self.tokens = prompt[-CONTEXT:]
        self.written = len(self._text())

    def _text(self) -> str:
        # Cleaning up would change text that has been written already.
        text: str = self.tokenizer.decode(self.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def add(self, token: int) -> str:
        """The text that one more token adds; empty while a character is unfinished."""
        self.tokens.append(token)
        return "" if self._text().endswith(UNFINISHED) else self.rest()

    def rest(self) -> str:
        """The text not returned yet."""
        text = self._text()
        piece, self.written = text[self.written :], len(text)
        return piece
