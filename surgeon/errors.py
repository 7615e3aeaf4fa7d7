"""The one error policy: ValueError (and OSError) for what a user can mend, assert for what only we can."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """End an error message about an unknown word: the nearest known one, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(str(word), known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(known)}"


def show_value(value: object, most: int = 40) -> str:
    """Show a value in an error message, cut if it is long."""
    text = repr(value)
    if len(text) <= most:
        return text
    return text[: most - 3] + "..."


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error; its kind if it has no text."""
    text = str(error).strip()
    if text:
        return text.splitlines()[0]
    return type(error).__name__


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Import packages of one of surgeon's extras; `what` needs them, the beginning of an error message.

    Raises:
        ImportError: if one of them is missing, saying how to install it.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or str(error)).partition(".")[0]
        raise ImportError(
            f"{what} needs {package}, which is not installed; run: pip install 'surgeon[{extra}]'",
            name=package,
        ) from error


class NotProven(ValueError):
    """A written checkpoint does not compute what the program does."""


class Diverged(ValueError):
    """A training whose loss, gradient or predictions are not finite any more."""


_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error is of a lack of memory, of the machine or of a GPU (PyTorch says it in words)."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


# Writers written in Rust and C++ (safetensors, sqlite, torch.save) report a full disk as errors of their own, in words.
_FULL_DISK = ("No space left on device", "os error 28", "disk is full", "Disk quota exceeded")
# The C++ file of torch.save, which only says that less was written than should be.
_TORCH_WRITER = "inline_container"


def is_full_disk(error: BaseException) -> bool:
    """Tell whether an error, or one that it comes from, is of a full disk or quota."""
    return any(
        (isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT))
        or any(words in str(link) for words in _FULL_DISK)
        or (
            isinstance(link, RuntimeError)
            and _TORCH_WRITER in str(link)
            and "unexpected pos" in str(link)
        )
        for link in _chain(error)
    )


@contextmanager
def name_file(place: str | Path) -> Iterator[None]:
    """Name the file in errors that lack it, as those of writing to an open file do.

    Raises:
        OSError: with `place` as its file's name, for those without one, and in place of other kinds of errors that say
            that the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(place)
        raise
    except Exception as error:
        if is_full_disk(error):
            raise full_disk(place) from error
        raise


def full_disk(place: str | Path) -> OSError:
    """Make the error of a full disk at a file."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))


def full_place(error: BaseException) -> str | None:
    """Return the file of a full disk's error, as far as it, or one that it comes from, names it."""
    # A copy's first file is the one that was read.
    names = (
        getattr(link, "filename2", None) or getattr(link, "filename", None) for link in _chain(error)
    )
    return next(
        (os.fsdecode(name) for name in names if isinstance(name, str | bytes | os.PathLike)), None
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, and those that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
