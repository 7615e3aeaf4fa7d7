"""A folder that appears under its final name whole, or not at all.

It is written beside the target and renamed when it is complete. A run that dies leaves a partial folder under another
name, which the next run removes. Whether a run lives is told by the lock that it holds on its folder, never by a
process id, which another container or machine has too. Where a file system has no locks, what is left there stays.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surgeon.checkpoint.replaceable import why_kept
from surgeon.checkpoint.verify import sync

MARK = "surgeon-partial"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_OLD = "old"  # at the end of the name of a target that is moved aside
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
    with scratch(target) as folder:
        yield folder
        for path in (*folder.rglob("*"), folder):
            sync(path)
        _publish(folder, target, overwrite)


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """Give a new, empty folder beside the target, which is removed when the block ends.

    If this process dies in between, the next one that writes to the target removes it.

    Raises:
        PermissionError: if nothing can be written beside the target.
    """
    target = Path.cwd() / target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target)
        folder, lock = _partial_folder(target)
    except PermissionError as error:
        raise PermissionError(f"no permission to write in {target.parent}; choose another folder with -o") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            f"{target.parent} cannot be a folder: a file is in the way ({error.filename})"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _partial_folder(target: Path) -> tuple[Path, int]:
    """A new folder beside the target, and the lock on it: held while this process lives, whatever becomes of it."""
    while True:
        folder = target.parent / f".{target.name}.{MARK}-{os.getpid()}-{secrets.token_hex(4)}"
        folder.mkdir()
        # Until it is locked, another run takes it for one that was left, and removes it.
        with suppress(FileNotFoundError):
            lock = os.open(folder, _OPEN_FOLDER)
            _lock(lock, wait=True)
            if _is_at(lock, folder):
                return folder, lock
            os.close(lock)


def _lock(handle: int, wait: bool = False) -> bool:
    """Lock a folder until its handle is closed; False if it is locked, or the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open folder still has this name."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that exists, unless it is empty, or a checkpoint that may be overwritten (`why_kept`).

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
    reason = why_kept(target)
    if reason is not None:
        raise FileExistsError(
            f"{target} {reason}, so --overwrite does not replace it; choose another name with -o, or clear it yourself"
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
    """Remove what runs that died left beside the target; bring back a target that one of them had moved aside.

    What cannot be told to be of a run that died, or cannot be removed, is left alone.
    """
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{MARK}-\d+-[\w-]+")
    for path in target.parent.iterdir():
        if pattern.fullmatch(path.name) and stat.S_ISDIR(path.lstat().st_mode):
            with suppress(OSError):
                _remove_unlocked(path, target)


def _remove_unlocked(path: Path, target: Path) -> None:
    lock = os.open(path, _OPEN_FOLDER)
    try:
        # A run that has just finished has given the folder that was opened the target's name.
        if not _lock(lock) or not _is_at(lock, path):
            return
        if path.name.endswith(_OLD) and not os.path.lexists(target):
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _publish(folder: Path, target: Path, overwrite: bool) -> None:
    """Give the finished folder its final name."""
    check_target(target, overwrite)  # it may have come into being meanwhile
    if not target.exists() or not any(target.iterdir()):
        folder.rename(target)
    elif not _exchange(folder, target):
        _move_aside(folder, target)
    sync(target.parent)


def _move_aside(folder: Path, target: Path) -> None:
    """Replace the target in two steps: this file system cannot swap names. `remove_stale` mends dying in between."""
    old = folder.with_name(f"{folder.name}-{_OLD}")
    lock = os.open(target, _OPEN_FOLDER)
    try:
        _lock(lock)  # so that nobody brings it back, or removes it, meanwhile
        target.rename(old)
        folder.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        os.close(lock)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step, where the system can."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    swapped: int = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return swapped == 0
