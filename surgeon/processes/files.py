"""Files that are whole or not there, whenever their process is killed; and what the disk has of them."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.errors import naming

if TYPE_CHECKING:
    import pandas as pd

HALF_WRITTEN = ".*.part"  # what a killed process may have left beside a file


@contextmanager
def whole_file(path: Path, durable: bool = False) -> Iterator[Path]:
    """A path beside the wanted one to write to; it is renamed at the end, or removed if writing it fails.

    What was there before stays until then. Errors name the wanted file, one of a full disk, too (`naming`).

    Args:
        durable: wait until the file is on the disk. Without that, a machine that loses its power may keep the name and
            lose the content; a process that is killed does not.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with naming(path):
            yield beside
            if durable:
                sync(beside)
            beside.replace(path)
    except OSError as error:
        if error.filename == str(beside):
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # as of a disk that may only be read, of which the error before says more
            beside.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder, and those that it lies in, where they are not there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"{folder} cannot be a folder: a file is in the way ({error.filename})") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file that is whole or not there."""
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def finite(value: Any) -> Any:
    """A JSON value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inside) for inside in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file that is whole or not there."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_table(path: Path, table: pd.DataFrame, digits: int = 9, missing: str = "nan") -> None:
    """Write a table as CSV, whole or not there.

    Args:
        digits: of each number.
        missing: what stands for NaN.
    """
    write_text(path, table.to_csv(index=False, float_format=f"%.{digits}g", na_rep=missing))


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Wait until a folder and all that lies in it are on the disk: the last thing before it gets its name."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def cache_folder(what: str) -> Path:
    """Where files of some kind are kept on this machine, to be made again if they are gone.

    Raises:
        FileNotFoundError: if the user has no home, and the environment names no other place.
    """
    kept = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(kept) if kept else Path.home() / ".cache") / "surgeon" / what
    except RuntimeError as error:  # a user id without a name, as containers have them
        raise FileNotFoundError(
            f"there is no home to keep {what} in; name a folder in HOME or XDG_CACHE_HOME"
        ) from error


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"the disk of {folder} is too full: {show_bytes(needed)} are needed, {show_bytes(free)} are free")


def show_bytes(count: int) -> str:
    """A size as people write it: 12.7 MB."""
    size = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            if unit == "bytes":
                return f"{size:.0f} {unit}"
            return f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
