"""Names in a user's text: something on this machine's disk, a recipe, a program, or a model on the hub.

Every command asks here, so that all of them take the same text for the same thing.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

# What the system says of a name that nothing has, or that nothing could have.
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
# As programs begin: a late step, a group, a fork or a sublayer, but not the names A100.yaml, F5-tts and A21/jamba.
_PROGRAM = re.compile(r"\s*([>\[{]|[AF]\d+(?![\da-z._-]|/\D))")
GGUF = ".gguf"  # how llama.cpp's files end
_HUB = re.compile(rf"(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w./-]*\{GGUF}))?(?:@(\w[\w./-]*))?", re.ASCII)
_SITE = re.compile(r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/|hf://", re.IGNORECASE)
_OF_REVISION = ("tree", "commit", "blob", "resolve", "raw")  # what stands before it in an address
MODEL_FOLDER = Path(__file__).parent / "demo" / "model"  # of "demo"
HOW_TO_NAME = "a model on the hub is typed owner/name, or owner/name@REVISION, or owner/name/FILE.gguf"


def on_disk(text: str | Path) -> Path | None:
    """Return the file or folder that a text names, with `~` for the user's home; None if there is none."""
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
    """Split texts that have several values with commas between.

    A program is one value, and so is the name of a file on this machine, also with a part (:) or a share (=) behind.
    """
    found = []
    for text in values:
        ends = (place for place, letter in enumerate(f"{text}:") if letter in ":=")
        whole = (
            "," not in text or is_program(text) or any(on_disk(text[:end]) is not None for end in ends)
        )
        found += [text] if whole else [part.strip() for part in text.split(",") if part.strip()]
    return found


class HubName(NamedTuple):
    """A model on the hub; as text owner/name, or owner/name@revision, or owner/name/FILE.gguf.

    Attributes:
        repository: owner/name.
        revision: a branch, a tag or a commit; None for the newest.
        file: one of its GGUF files; None for the model in the repository.
    """

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        name = "/".join(filter(None, (self.repository, self.file)))
        if self.revision is None:
            return name
        return f"{name}@{self.revision}"

    @property
    def address(self) -> str:
        """URL of its page."""
        page = f"https://huggingface.co/{self.repository}"
        if self.file is not None:
            return f"{page}/blob/{quote(self.revision or 'main', safe='')}/{self.file}"
        if self.revision is None:
            return page
        return f"{page}/tree/{quote(self.revision, safe='')}"


def hub_name(text: str) -> HubName | None:
    """Parse a name on the Hugging Face hub: owner/name, owner/name@revision, or a model's address there.

    Returns:
        None if it is nothing of the kind.

    Raises:
        ValueError: if it is an address, but not of a whole model on the hub.
    """
    site = _SITE.match(text)
    if site is None and "://" not in text:
        found = _HUB.fullmatch(text)
        if found is None:
            return None
        return HubName(*found.group(1, 3, 2))
    parts: list[str] = []
    if site is not None:
        parts = re.split("[?#]", text[site.end() :])[0].strip("/").split("/")
    typed = "/".join(parts)
    inside = False
    if len(parts) > 3 and parts[2] in _OF_REVISION:
        within = parts[4:] if parts[-1].endswith(GGUF) else []
        typed = f"{'/'.join([*parts[:2], *within])}@{unquote(parts[3])}"
        inside = not within and (len(parts) > 4 or parts[2] not in ("tree", "commit"))
    found = _HUB.fullmatch(typed)
    if found is None or parts[0] in ("datasets", "spaces"):
        raise ValueError(f"{text} is no address of a model on the Hugging Face hub; {HOW_TO_NAME}")
    if inside:
        raise ValueError(
            f"{text} leads into a model on the hub, which is opened as a whole; type {typed}"
        )
    return HubName(*found.group(1, 3, 2))


def model_name(text: str | Path) -> str:
    """Return a model's name as records have it: owner/name@revision of a hub model, however it was typed."""
    if on_disk(text) is None and (found := hub_name(str(text))) is not None:
        return str(found)
    return str(text)


def name_of(text: str | Path) -> str:
    """Return a folder's own name, or a name on the hub as it is."""
    there = on_disk(text)
    if there is None:
        return model_name(text)
    return there.resolve().name


def is_path(text: str) -> bool:
    """Tell whether a text can only be a path, whether or not the file exists: it is no name."""
    is_on_hub = _HUB.fullmatch(text) is not None
    return text.startswith(("/", ".", "~")) or (not is_on_hub and text.partition(":")[0].count("/") > 1)


def public(text: str) -> str:
    """Remove the place on this machine from a text, if it is a path."""
    if is_path(text):
        return Path(text).name
    return text


def is_gguf(text: str | Path) -> bool:
    """Tell whether it names a GGUF file, on this machine's disk or on the hub."""
    if on_disk(text) is None and (found := hub_name(str(text))) is not None:
        text = found.file or ""
    return Path(text).suffix.lower() == GGUF


def is_recipe(text: str | Path) -> bool:
    """Tell whether it names a recipe, not a model."""
    return Path(text).suffix.lower() in (".yaml", ".yml")


def is_program(text: str) -> bool:
    """Tell whether a text is a program, or begins as one, and is no name of something."""
    return _PROGRAM.match(text) is not None and on_disk(text) is None


def demo_model() -> Path:
    """The folder of the demo model: config.json, model.safetensors, its tokenizer, and training.json.

    Raises:
        FileNotFoundError: if this installation came without the weights.
    """
    if not (MODEL_FOLDER / "config.json").is_file():
        raise FileNotFoundError(
            f"the demo model is missing from {MODEL_FOLDER}; install surgeon with its package data, "
            "or train it again with scripts/demo_model/train.py"
        )
    return MODEL_FOLDER
