"""A run's folder: whose run it is, who works on it, where it goes on, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate import PartialState

from surgeon.checkpoint.read import read_json
from surgeon.errors import shown
from surgeon.processes.files import make_folder, write_json
from surgeon.processes.locks import lock
from surgeon.training.checkpoints import checkpoints_of, newest_checkpoint, remove_checkpoint, remove_partial

RECORD_FILE = "run.json"
TEACHER_FOLDER = "teacher"


def run_folder(output: Path) -> Path:
    """The folder of the run that writes a checkpoint: beside it."""
    return output.with_name(f"{output.name}.run")


@contextmanager
def alone(folder: Path, device: str) -> Iterator[None]:
    """Keep other runs out of a folder, which is made if it is not there.

    Of several processes of one run the first does. Where a file system has no locks, nobody is kept out.

    Args:
        device: "cpu" or "cuda"; where the processes compute.

    Raises:
        OSError: if another run is writing to it, or it cannot be written.
    """
    if not PartialState(cpu=device == "cpu").is_main_process:
        yield
        return
    make_folder(folder)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        mine = True
        with suppress(OSError):
            mine = lock(handle)
        if not mine:
            raise OSError(f"another run is writing to {folder}; wait for it, or choose another output")
        yield
    finally:
        os.close(handle)


def open_run(folder: Path, identity: dict[str, Any]) -> Path | None:
    """Begin a run in a folder, or go on with the one there, of which what was half written is removed.

    Args:
        identity: what the run's weights depend on, as JSON values.

    Returns:
        The last checkpoint of the Trainer's that is whole; None where the run begins.

    Raises:
        ValueError: if the folder has a run of something else, naming the difference, or what is there is not whole.
        OSError: if it cannot be written.
    """
    make_folder(folder)
    record = folder / RECORD_FILE
    identity = json.loads(json.dumps(identity))
    if record.is_file():
        require_same(folder, read_record(folder).get("identity"), identity)
    elif checkpoints_of(folder):
        read_record(folder)  # which refuses them: nobody knows of what run they are
    remove_partial(folder)
    newest = newest_checkpoint(folder)
    if newest is None:
        write_json(record, {"identity": identity})
    return newest


def require_same(folder: Path, before: Any, identity: dict[str, Any]) -> None:
    """Refuse to take a run in a folder, which follows from one thing, for one that follows from another.

    Raises:
        ValueError: naming the innermost difference.
    """
    if before != identity:
        name, was, is_now = _difference("identity", before, identity)
        raise ValueError(
            f"{folder / RECORD_FILE} is of another run: its {name.replace('_', ' ')} was {shown(was)}, and now it is "
            f"{shown(is_now)}; choose another output, or remove {folder}"
        )


def _difference(name: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    """The innermost value that differs: its name, what it was, and what it is now."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return name, before, now
    inner = next(key for key in [*now, *before] if now.get(key) != before.get(key))
    return _difference(inner, before.get(inner), now.get(inner))


def read_record(folder: Path) -> dict[str, Any]:
    """What a run's folder says of the run.

    Raises:
        FileNotFoundError: if it is gone.
        ValueError: if it is damaged.
    """
    if not (folder / RECORD_FILE).is_file():
        raise FileNotFoundError(
            f"{folder} has no {RECORD_FILE}, which says of what run it is; remove {folder} to begin the run again"
        )
    try:
        return read_json(folder / RECORD_FILE)
    except ValueError as error:
        raise ValueError(f"{error}; remove {folder} to begin the run again") from error


def add_to_record(folder: Path, record: dict[str, Any]) -> None:
    """Add to what a run's folder says of the run, or replace what it says under the same names."""
    write_json(folder / RECORD_FILE, read_record(folder) | record)


def finish_run(folder: Path, record: dict[str, Any]) -> None:
    """Complete the record of a run whose result is written, and remove its checkpoints and kept logits; tables stay.

    Where it was killed in between, it may be called again.

    Args:
        record: what the run came to, as JSON values; added to what the record says already.

    Raises:
        OSError: if the folder cannot be written.
    """
    add_to_record(folder, record)
    for checkpoint in checkpoints_of(folder).values():
        remove_checkpoint(checkpoint)
    if (folder / TEACHER_FOLDER).is_dir():
        shutil.rmtree(folder / TEACHER_FOLDER)
    remove_partial(folder)
