"""What a text of a user's names: something on this machine's disk, a recipe, a program, or a name on the hub.

Every command that takes such a text asks here, so that all of them take the same text for the same thing.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# What the system says of a name that nothing has, or that nothing could have.
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
# As programs begin: a late step, a group, a fork or a sublayer, but not the names A100.yaml, F5-tts and A21/jamba.
_PROGRAM = re.compile(r"\s*([>\[{]|[AF]\d+(?![\da-z._-]|/\D))")
_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def on_disk(text: str | Path) -> Path | None:
    """The file or folder that a text names, with `~` for the user's home; None if there is none, or could be none.

    Raises:
        OSError: if there is no telling, as behind a folder that may not be searched.
    """
    if not str(text):
        return None
    path = Path(text)
    with suppress(RuntimeError):  # nobody's home, and so a name like others
        path = path.expanduser()
    try:
        path.stat()
    except ValueError:  # a NUL byte, or what is no UTF-8
        return None
    except OSError as error:
        if error.errno in _NOTHING:
            return None
        unknown = f"there is no telling whether there is {path}: {error.strerror}; see who may read its folders"
        raise type(error)(unknown) from error
    return path


def split_values(values: Iterable[str]) -> list[str]:
    """Each of several values, of which a text may have some with commas between.

    A program is one value, and so is what is there on this machine's disk, also with a part (:) or a share (=) behind.
    """
    found = []
    for text in values:
        ends = (place for place, letter in enumerate(f"{text}:") if letter in ":=")
        whole = "," not in text or is_program(text) or any(on_disk(text[:end]) is not None for end in ends)
        found += [text] if whole else [part.strip() for part in text.split(",") if part.strip()]
    return found


def name_of(text: str | Path) -> str:
    """What a model is called: a folder's own name, a name on the hub as it is."""
    there = on_disk(text)
    return str(text) if there is None else there.resolve().name


def is_path(text: str) -> bool:
    """Whether a text can only be the place of a file or folder, whether there is one or not: it is no name."""
    return text.startswith(("/", ".", "~")) or text.partition(":")[0].count("/") > 1


def public(text: str) -> str:
    """A text without the place on this machine, if it is a path."""
    return Path(text).name if is_path(text) else text


def is_hub_name(text: str) -> bool:
    """Whether a text can be a model's name on the Hugging Face hub, as owner/name."""
    return _HUB.fullmatch(text) is not None


def is_recipe(text: str | Path) -> bool:
    """Whether it is the name of a recipe, not of a model."""
    return Path(text).suffix.lower() in (".yaml", ".yml")


def is_program(text: str) -> bool:
    """Whether a text is a program, or begins as one, and is no name of something."""
    return _PROGRAM.match(text) is not None and on_disk(text) is None
