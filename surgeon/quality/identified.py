"""Tensors in a file that says what they follow from: they are gone on with where that is the same, and only there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from surgeon.models.weights import Tensors
from surgeon.processes.files import whole_file
from surgeon.provenance import FORMAT

UNREADABLE = (OSError, SafetensorError)


def write_identified(path: Path, tensors: Tensors, identity: Mapping[str, str]) -> None:
    """Write tensors into a file, which is whole or not there.

    Raises:
        OSError, SafetensorError: if it cannot be written.
    """
    with whole_file(path) as beside:
        save_file(tensors, beside, metadata={"format": str(FORMAT), **identity})


@contextmanager
def open_identified(
    path: Path, identity: Mapping[str, str], names: Mapping[str, str], holds: str, otherwise: str, device: str = "cpu"
) -> Iterator[Any]:
    """A file of tensors, as `safe_open` has it; None where it is not there, or damaged, of which a warning tells.

    Args:
        names: what another value of an entry of the identity means.
        holds: what such files hold.
        otherwise: what is done where it is damaged.

    Raises:
        ValueError: if it follows from something else, naming the entry.
    """
    if not path.is_file():
        yield None
        return
    try:
        opened = safe_open(path, "pt", device=device)
    except UNREADABLE as error:
        warnings.warn(f"{path} is damaged ({error}); {otherwise}", stacklevel=4)
        yield None
        return
    with opened as file:
        found = file.metadata() or {}
        for name, value in {"format": str(FORMAT), **identity}.items():
            if found.get(name) != value:
                means = {"format": "an older or a newer version's format", **names}.get(name, name)
                raise ValueError(
                    f"{path} holds {holds} of {means} ({name} {found.get(name)}, not {value}); use another "
                    "folder, or remove the file"
                )
        yield file
