"""What belongs to a checkpoint of a run, in a file of its own that is written last; and what of it is missing."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from surgeon.checkpoint.read import read_json
from surgeon.checkpoint.verify import FileRecord
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
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    listed = {path.relative_to(checkpoint).as_posix(): _record(path) for path in files}
    write_json(checkpoint / MANIFEST_FILE, {"files": listed})


def _record(path: Path) -> dict[str, int | str]:
    size = path.stat().st_size
    return {"size": size} | ({"sha256": FileRecord.of(path).sha256} if size <= _HASHED_BYTES else {})


def fault_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, as in "has no optimizer.pt"; None where it is whole.

    One without a manifest, as the version before wrote them, has to have a file of each kind.
    """
    if not (checkpoint / MANIFEST_FILE).is_file():
        return _fault_by_rule(checkpoint)
    try:
        files = dict(read_json(checkpoint / MANIFEST_FILE)["files"])
    except (KeyError, TypeError, ValueError):
        return f"has a damaged {MANIFEST_FILE}"
    for name, record in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"has no {name}"
        now = _record(path)
        if now["size"] != record["size"]:
            return f"has {now['size']:,} bytes of {name}, where {record['size']:,} were written"
        if now != record:
            return f"has another {name} than was written"
    return None


def _fault_by_rule(checkpoint: Path) -> str | None:
    names = [path.name for path in checkpoint.iterdir()]
    for kinds in _NEEDED:
        if not any(fnmatch(name, kind) for name in names for kind in kinds):
            return f"has no {kinds[0]}"
    try:
        read_json(checkpoint / STATE_FILE)
    except ValueError as error:
        return f"has a damaged {STATE_FILE} ({first_line(error).rpartition(': ')[2]})"
    return None
