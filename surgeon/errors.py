"""The one error policy: ValueError (and OSError) for what a user can mend, assert for what only we can."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown word: the nearest known one, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def shown(value: object, most: int = 40) -> str:
    """A value as an error message shows it; what is too long loses its end."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line; its kind if it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class NotProven(ValueError):
    """A written checkpoint does not compute what the program does."""


_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of the machine or of a GPU, was too small (PyTorch says it in words)."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


# Writers written in Rust and C++ (safetensors, sqlite, torch.save) report a full disk as errors of their own, in words.
_FULL_DISK = ("No space left on device", "os error 28", "disk is full", "Disk quota exceeded")
_TORCH_WRITER = "inline_container"  # the C++ file of torch.save, which only says that less was written than should be


def is_full_disk(error: BaseException) -> bool:
    """Whether an error, or one that it comes from, says that a disk, or a user's share of it, is full."""
    return any(
        (isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT))
        or any(words in str(link) for words in _FULL_DISK)
        or (isinstance(link, RuntimeError) and _TORCH_WRITER in str(link) and "unexpected pos" in str(link))
        for link in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
