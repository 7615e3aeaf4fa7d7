"""What analyses of tiny models work on, without a checkpoint on the disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from surgeon.analysis.subject import Subject
from surgeon.opened import Model
from surgeon.quality.data import Windows


def subject_of(
    model: Any, windows: Windows, model_hash: str = "weights", memory: int | None = None
) -> Subject:
    """A model called tiny, of this hash."""
    files: Any = SimpleNamespace(model_hash=lambda: model_hash, folder=Path("nowhere"))
    return Subject(Model("tiny", files, model.config, None), model, windows, memory)
