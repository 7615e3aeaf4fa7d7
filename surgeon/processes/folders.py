"""A folder that appears under its final name whole, or not at all.

It is written beside the target and renamed when it is complete. A run that dies leaves a partial folder under another
name, which the next run removes. Whether a run lives is told by the lock that it holds on its folder, never by a
process id, which another container or machine has too. Where a file system has no locks, what is left there stays.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surgeon.processes.files import make_folder, sync
from surgeon.processes.locks import lock

MARK = "surgeon-partial"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_OLD = "old"  # at the end of the name of a target that is moved aside
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """Give a new, empty folder beside the target, which is removed when the block ends, unless it was published.

    If this process dies in between, the next one that writes to the target removes it.
    """
    target = Path.cwd() / target
    try:
        make_folder(target.parent)
        remove_stale(target)
        folder, held = _partial_folder(target)
    except PermissionError as error:
        raise PermissionError(f"no permission to write in {target.parent}; choose another folder") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _partial_folder(target: Path) -> tuple[Path, int]:
    """A new folder beside the target, and what is open and locked of it while this process lives."""
    while True:
        folder = target.parent / f".{target.name}.{MARK}-{os.getpid()}-{secrets.token_hex(4)}"
        folder.mkdir()
        # Until it is locked, another run takes it for one that was left, and removes it.
        with suppress(FileNotFoundError):
            handle = os.open(folder, _OPEN_FOLDER)
            with suppress(OSError):  # without locks nobody removes anything
                lock(handle, wait=True)
            if _is_at(handle, folder):
                return folder, handle
            os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def remove_stale(target: Path) -> None:
    """Remove what runs that died left beside the target; bring back a target that one of them had moved aside.

    What cannot be told to be of a run that died, or cannot be removed, is left alone.
    """
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{MARK}-\d+-[\w-]+")
    for path in target.parent.iterdir():
        if not pattern.fullmatch(path.name) or not stat.S_ISDIR(path.lstat().st_mode):
            continue
        with suppress(OSError):
            handle = os.open(path, _OPEN_FOLDER)
            try:
                # A run that has just finished has given the folder that was opened the target's name.
                if not lock(handle) or not _is_at(handle, path):
                    continue
                if path.name.endswith(_OLD) and not os.path.lexists(target):
                    path.rename(target)
                else:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def publish(folder: Path, target: Path) -> None:
    """Give a finished folder its final name. What has that name is replaced, and stays whole until then.

    Before, all that the new one holds should be on the disk (`sync_tree`). What was replaced is gone, or bears the
    folder's old name, for whoever made that to remove.
    """
    if not target.exists() or not any(target.iterdir()):
        folder.rename(target)
    elif not _exchange(folder, target):
        _move_aside(folder, target)
    sync(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step, where the system can."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    swapped: int = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return swapped == 0


def _move_aside(folder: Path, target: Path) -> None:
    """Replace the target in two steps: this file system cannot swap names. `remove_stale` mends dying in between."""
    old = folder.with_name(f"{folder.name}-{_OLD}")
    handle = os.open(target, _OPEN_FOLDER)
    try:
        with suppress(OSError):
            lock(handle)  # so that nobody brings it back, or removes it, meanwhile
        target.rename(old)
        folder.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        os.close(handle)
