"""surgeon.json, in which a checkpoint says what it was made of: read, and checked as far as it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgeon.checkpoint.read import read_json
from surgeon.checkpoint.training import is_no_source, lacking
from surgeon.errors import shown
from surgeon.words import MOST_LAYERS

REPORT_FILE = "surgeon.json"


def read_report(folder: Path) -> dict[str, Any] | None:
    """What a checkpoint's surgeon.json says; None where it has none.

    Raises:
        ValueError: if it is damaged, or not what `surgeon.export` writes.
    """
    path = folder / REPORT_FILE
    if not path.exists():
        return None
    report = read_json(path)
    source, proof, trained, stored = (report.get(name) for name in ("source", "proof", "trained", "stored_layers"))
    layers = source.get("num_layers") if isinstance(source, dict) else None
    if not (
        isinstance(report.get("program"), str)
        and isinstance(source, dict)
        and (isinstance(source.get("model"), str) or (is_no_source(source) and "trained" in report))
        and type(layers) is int
        and 1 <= layers <= MOST_LAYERS
        and isinstance(source.get("program"), str | None)
    ):
        raise ValueError(f"{path} is not what surgeon export writes: it lacks the program or its source")
    if isinstance(proof, dict) and not (
        all(isinstance(proof.get(name), int | float) for name in ("exact", "written"))
        and type(proof.get("tokens")) is int
        and isinstance(proof.get("dtype"), str)
    ):
        raise ValueError(f"{path} is not what surgeon export writes: its proof is {shown(proof, 200)}; export again")
    if trained is not None and (not isinstance(trained, dict) or lacking(trained) is not None):
        raise ValueError(f"{path} is not what surgeon export writes: it has trained: {shown(trained, 200)}")
    if stored is not None and not (
        isinstance(stored, list)
        and all(isinstance(one, list) for one in stored)
        and all(type(layer) is int and 0 <= layer < layers for one in stored for layer in one)
    ):
        raise ValueError(f"{path} is not what surgeon export writes: it has stored_layers: {shown(stored, 200)}")
    return report
