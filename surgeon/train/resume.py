"""A run's folder: whose run it is, and where it goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from surgeon.checkpoint.read import read_json
from surgeon.errors import shown
from surgeon.provenance import write_json

RECORD_FILE = "heal.json"
STATE_FILE = "trainer_state.json"  # the last file that the Trainer writes of a checkpoint
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def heal_folder(output: Path) -> Path:
    """The folder of the run that writes a checkpoint: beside it."""
    return output.with_name(f"{output.name}.heal")


def open_run(folder: Path, identity: dict[str, Any]) -> Path | None:
    """Begin a run in a folder, or go on with the one there.

    Args:
        identity: what the run's weights depend on, as JSON values.

    Returns:
        The last whole checkpoint of the Trainer's; None where the run begins.

    Raises:
        ValueError: if the folder has a run of something else, naming the difference.
        OSError: if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / RECORD_FILE
    identity = json.loads(json.dumps(identity))
    if not record.is_file():
        write_json(record, {"identity": identity})
        return None
    _require_same(record, read_json(record).get("identity"), identity)
    found = {int(match[1]): path for path in folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))}
    whole = [step for step in sorted(found) if (found[step] / STATE_FILE).is_file()]
    return found[whole[-1]] if whole else None


def _require_same(record: Path, before: Any, now: dict[str, Any]) -> None:
    if before == now:
        return
    before = before if isinstance(before, dict) else {}
    name = next(name for name in [*now, *before] if now.get(name) != before.get(name))
    raise ValueError(
        f"{record} is of another run: its {name.replace('_', ' ')} was {shown(before.get(name))}, and now it is "
        f"{shown(now.get(name))}; choose another -o, or remove {record.parent}"
    )


def step_of(checkpoint: Path) -> int:
    """How many steps the run had made when the Trainer wrote this checkpoint."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])
