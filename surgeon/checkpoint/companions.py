"""The files that belong to a model beside its configuration and weights, and go with it into other checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.checkpoint.belongings import CARRIED, FOLDERS, FileKind, kind_of
from surgeon.checkpoint.read import Checkpoint
from surgeon.words import first_few

_EXPECTED = {FileKind.WEIGHTS.value, FileKind.TRAINING.value}  # of what stays behind: nobody misses it
MOST_NAMED = 6  # files, for one reason


@dataclass(frozen=True)
class Companions:
    """What lies in a model's folder beside its configuration and weights, by name, with slashes in folders inside.

    Attributes:
        folder: the model's.
        files: what goes on, and where it lies.
        left: what stays behind, and why.
    """

    folder: Path
    files: dict[str, Path]
    left: dict[str, str]


def companions_of(folder: Path, own: Collection[str]) -> Companions:
    """What lies beside a model's configuration and weights.

    Code is never run. Of it what tokenizers and processors are made of goes on, by its name.

    Args:
        own: names of the files that hold its weights (`Checkpoint.file_names`).

    Raises:
        FileNotFoundError: if what goes on is a link to nothing.
    """
    files: dict[str, Path] = {}
    left: dict[str, str] = {}
    for name in sorted(names_in(folder)):
        kind = kind_of(name)
        if kind in CARRIED and legible(name) == name:  # so that it can be written down as it is
            files[name] = path = folder / name
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is a link to {path.resolve()}, which is not there; put the file itself there, or remove "
                    "the link"
                )
        elif kind not in (FileKind.MADE_ANEW, FileKind.OF_TOOLS) and name not in own:
            left[legible(name)] = (FileKind.UNKNOWN if kind in CARRIED else kind).value
    return Companions(folder, files, left)


def companions_at(folder: Path) -> Companions:
    """The same of any folder that a model was loaded from, whether or not surgeon could open it.

    Raises:
        FileNotFoundError: as `companions_of`.
    """
    try:
        own = Checkpoint(folder).file_names
    except (FileNotFoundError, ValueError):
        own = frozenset()
    return companions_of(folder, own)


def left_by(report: dict[str, Any]) -> dict[str, str]:
    """What stayed behind by a surgeon.json, and why."""
    entry = report.get("companions")
    left = entry.get("left_behind") if isinstance(entry, dict) else None
    return {name: str(why) for name, why in left.items()} if isinstance(left, dict) else {}


def left_behind(left: dict[str, str], shown: Callable[[str], str] = str) -> str:
    """What stays behind that somebody might miss, for people; empty if there is none.

    Args:
        shown: how a name is written.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        if reason not in _EXPECTED:
            by_reason.setdefault(reason, []).append(shown(name))
    return "; ".join(f"{first_few(names, MOST_NAMED)} ({reason})" for reason, names in by_reason.items())


def legible(name: str) -> str:
    """A file's name as JSON and screens can have it."""
    text = name.encode(errors="backslashreplace").decode()
    if text.isprintable():
        return text
    return ascii(text)[1:-1]


def names_in(folder: Path) -> Iterator[str]:
    """Its files, folders (with a slash), and files of the folders that are looked into."""
    for path in folder.iterdir():
        if not path.is_dir():
            yield path.name
        elif path.name.lower() in FOLDERS:
            yield from (f"{path.name}/{each.name}{'/' * each.is_dir()}" for each in path.iterdir())
        else:
            yield f"{path.name}/"
