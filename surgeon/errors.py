"""The one error policy: ValueError (and OSError) for what a user can mend, assert for what only we can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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


def refuse_useless(needed: str, is_there: bool, **given: bool) -> None:
    """Refuse parameters that are given, and do nothing without what is needed.

    Raises:
        ValueError: naming the first of them.
    """
    for name, is_given in given.items():
        if is_given and not is_there:
            raise ValueError(f"`{name}` is for {needed}; give {needed}, too, or leave `{name}` out")


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
