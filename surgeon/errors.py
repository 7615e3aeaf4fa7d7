"""The one error policy: ValueError (and OSError) for what a user can mend, assert for what only we can."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown word: the nearest known one, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of the machine or of a GPU, was too small (PyTorch says it in words)."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
