"""A folder that appears under its final name whole, or not at all.

It is written beside the target and renamed when it is complete. A run that dies leaves a partial folder under another
name, which the next run removes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surgeon.checkpoint.verify import sync

MARK = "surgeon-partial"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def staged(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a new, empty folder beside the target; when the block ends, it becomes the target.

    If the block raises, the folder is removed and the target is as it was.

    Args:
        overwrite: replace an existing checkpoint folder (the old one stays whole until the new one is).

    Raises:
        FileExistsError: if the target exists and is not to be, or must not be, replaced.
        PermissionError: if nothing can be written beside the target.
    """
    target = Path.cwd() / target
    check_target(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target)
        folder = target.parent / f".{target.name}.{MARK}-{os.getpid()}-{secrets.token_hex(4)}"
        folder.mkdir()
    except PermissionError as error:
        raise PermissionError(f"no permission to write in {target.parent}; choose another folder with -o") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            f"{target.parent} cannot be a folder: a file is in the way ({error.filename})"
        ) from error
    # Held while this process lives, whatever becomes of it: how another run knows that the folder is in use.
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
        for path in (*folder.iterdir(), folder):
            sync(path)
        _publish(folder, target, overwrite)
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that exists, unless it is empty, or a checkpoint that may be overwritten.

    Raises:
        FileExistsError: saying what is in the way.
    """
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise FileExistsError(f"{target} exists and is not a folder; choose another name with -o")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists and is not empty; choose another name with -o, or pass --overwrite")
    if not (target / "config.json").exists():
        raise FileExistsError(
            f"{target} has no config.json, so it is no checkpoint, and --overwrite does not replace it"
        )


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        OSError: with the folder, what is needed and what is there.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"the disk of {folder} is too full: {show_bytes(needed)} are needed, {show_bytes(free)} are free")


def is_full(error: OSError) -> bool:
    """Whether the error says that a disk, or a user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def show_bytes(count: int) -> str:
    """A size as people write it: 12.7 MB."""
    size = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def remove_stale(target: Path) -> None:
    """Remove what runs that died left beside the target; bring back a target that one of them had moved aside."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{MARK}-(\d+)-(\w+)")
    for path in target.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match is None or _is_alive(int(match[1])) or not _is_unlocked(path):
            continue
        if match[2] == "old" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_unlocked(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def _publish(folder: Path, target: Path, overwrite: bool) -> None:
    """Give the finished folder its final name."""
    check_target(target, overwrite)  # it may have come into being meanwhile
    if not target.exists() or not any(target.iterdir()):
        folder.rename(target)
    elif not _exchange(folder, target):
        # This file system cannot swap two names at once. Dying in between is mended by `remove_stale`.
        old = folder.with_name(f".{target.name}.{MARK}-{os.getpid()}-old")
        target.rename(old)
        folder.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    sync(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step, where the system can."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    swapped: int = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return swapped == 0
