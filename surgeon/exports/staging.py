"""A checkpoint that appears under its final name whole, or not at all, and replaces nothing but another one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surgeon.checkpoint.replaceable import why_kept
from surgeon.processes.files import sync_tree
from surgeon.processes.folders import publish, scratch


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
        sync_tree(folder)
        check_target(target, overwrite)  # it may have come into being meanwhile
        publish(folder, target)


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that exists, unless it is empty, or a checkpoint that may be overwritten (`why_kept`).

    Raises:
        FileExistsError: saying what is in the way.
    """
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise FileExistsError(f"{target} exists and is not a folder; choose another name")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists and is not empty; choose another name, or pass overwrite")
    reason = why_kept(target)
    if reason is not None:
        raise FileExistsError(
            f"{target} {reason}, so overwrite does not replace it; choose another name, or clear it yourself"
        )
