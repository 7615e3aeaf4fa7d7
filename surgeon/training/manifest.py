"""What belongs to a checkpoint of a run, in a file of its own that is written last; and what of it is missing."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from surgeon.checkpoint.read import read_json
from surgeon.checkpoint.verify import FileRecord, change_of
from surgeon.errors import first_line
from surgeon.processes.files import write_json

STATE_FILE = TRAINER_STATE_NAME
MANIFEST_FILE = "files.json"
_HASHED_BYTES = 1 << 20  # files up to this size; a damaged larger one is noticed where it is read
# What a checkpoint of a version without manifests consists of; each as the Trainer, FSDP or DeepSpeed calls it.
_NEEDED = (
    (STATE_FILE,),
    ("model.safetensors", "adapter_model.safetensors", "pytorch_model_fsdp*", "global_step*"),
    ("optimizer.pt", "optimizer.bin", "optimizer_*", "global_step*"),
    ("scheduler.pt", "global_step*"),
    ("rng_state.pth", "rng_state_0.pth"),
)


def write_manifest(checkpoint: Path) -> None:
    """Say in a checkpoint which files it has: their sizes, and the SHA-256 of small ones."""
    (checkpoint / MANIFEST_FILE).unlink(missing_ok=True)
    listed: dict[str, dict[str, int | str]] = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        record = listed[path.relative_to(checkpoint).as_posix()] = {"size": path.stat().st_size}
        if path.stat().st_size <= _HASHED_BYTES:
            record["sha256"] = FileRecord.of(path).sha256
    write_json(checkpoint / MANIFEST_FILE, {"files": listed})


def fault_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, as in "optimizer.pt is missing"; None where it is whole.

    One without a manifest, as the version before wrote them, has to have a file of each kind.
    """
    if (checkpoint / MANIFEST_FILE).is_file():
        try:
            files = dict(read_json(checkpoint / MANIFEST_FILE)["files"])
            return next(filter(None, (change_of(checkpoint, *each, by_size=True) for each in files.items())), None)
        except (KeyError, TypeError, ValueError):
            return f"{MANIFEST_FILE} is damaged"
    names = [path.name for path in checkpoint.iterdir()]
    for kinds in _NEEDED:
        if not any(fnmatch(name, kind) for name in names for kind in kinds):
            return f"{kinds[0]} is missing"
    try:
        read_json(checkpoint / STATE_FILE)
    except ValueError as error:
        return f"{STATE_FILE} is damaged ({first_line(error).rpartition(': ')[2]})"
    return None
