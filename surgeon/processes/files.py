"""Files and folders that are whole or not there, whenever their process is killed; and locks on them.

A folder is written beside the target and renamed when it is complete. A run that dies leaves a partial folder under
another name, which the next run removes. A run lives as long as the lock that it holds on its folder; a process id is
of no use, as another container or machine has it too. Where a file system has no locks, partial folders stay.

Locks are flock's (by `filelock`), and go with their process: children that are started anew do not inherit them, and a
lock file that stays is nobody's lock.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.machine import show_size

if TYPE_CHECKING:
    import pandas as pd


HALF_WRITTEN = ".*.part"  # what a killed process may have left beside a file


@contextmanager
def whole_file(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield a path beside the wanted one to write to; it is renamed at the end, or removed if writing it fails.

    The old file stays until then. Errors name the wanted file, one of a full disk, too (`name_file`).

    Args:
        durable: wait until the file is on the disk. Without that, a machine that loses its power may keep the name and
            lose the content; a process that is killed does not.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with name_file(path):
            yield beside
            if durable:
                sync(beside)
            beside.replace(path)
    except OSError as error:
        if error.filename == str(beside):
            error.filename = str(path)
        raise
    finally:
        # A disk may be read-only, and the earlier error says more of it.
        with suppress(OSError):
            beside.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder, and its parents, where they are missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        # Of a folder below a file the system names the folder.
        there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        raise NotADirectoryError(
            f"{folder} cannot be a folder: a file is in the way ({there})"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {key: finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inside) for inside in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
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
    """Wait until a folder and its content are on the disk: the last thing before it gets its name."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"the disk of {folder} is too full: {show_size(needed)} are needed, {show_size(free)} are free"
        )


LOOK_SECONDS = 0.002  # between two tries to get a lock that somebody else has


def lock(descriptor: int, wait: bool = False) -> bool:
    """Lock an open file or folder until it is closed, or tell (False) that somebody else has; `wait` for them."""
    from filelock import lock_descriptor  # who only reads and writes does without

    return lock_descriptor(descriptor, blocking=wait, poll_interval=LOOK_SECONDS)


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Lock a file, which is made if need be, while inside; waits for others to unlock it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with name_file(path):
            lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


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
        raise PermissionError(
            f"no permission to write in {target.parent}; choose another folder"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _partial_folder(target: Path) -> tuple[Path, int]:
    """Make a folder beside the target, open and locked while this process lives."""
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
    """Remove partial folders of dead runs beside the target; bring back a target that one of them moved aside.

    Folders that may be of a living run, or cannot be removed, are left alone.
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
    """Give a finished folder its final name, which what it replaces keeps until then.

    Its content should be on the disk (`sync_tree`). A replaced folder is gone, or bears the finished one's old name,
    for the caller to remove.
    """
    if not target.exists() or not any(target.iterdir()):
        folder.rename(target)
    elif not _exchange(folder, target):
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
    sync(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step, where the system can."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    swapped: int = rename(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    )
    return swapped == 0


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


def is_too_large(error: BaseException) -> bool:
    """Tell whether an error, or one that it comes from, is of a file that would be larger than files may be."""
    return any(
        (isinstance(link, OSError) and link.errno == errno.EFBIG) or "os error 27" in str(link)
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
