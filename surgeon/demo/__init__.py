"""The demo: a small trained model that ships with the package, and text that every machine with Python has."""

from __future__ import annotations

import hashlib
from pathlib import Path

from surgeon.demo.corpus import library_text

__all__ = ["demo_data", "demo_model", "demo_training_data"]

MODEL_FOLDER = Path(__file__).parent / "model"


def demo_model() -> Path:
    """The folder of the demo model: config.json, model.safetensors, its tokenizer, and training.json.

    Raises:
        FileNotFoundError: if this installation came without the weights.
    """
    if not (MODEL_FOLDER / "config.json").is_file():
        raise FileNotFoundError(
            f"the demo model is missing from {MODEL_FOLDER}; install surgeon with its package data, "
            "or train it again with scripts/demo_model/train.py"
        )
    return MODEL_FOLDER


def demo_data() -> list[str]:
    """Text the demo model has not seen: source files of the standard library, one string per file.

    The order is fixed and mixes the packages (it follows a hash of each text), so that a few thousand tokens from the
    start are a fair sample of all of it.

    Raises:
        FileNotFoundError: if this Python ships no standard-library sources.
    """
    return _mix(library_text(held_out=True))


def demo_training_data() -> list[str]:
    """Text of the kind the demo model was trained on: all other source files of the standard library.

    Raises:
        FileNotFoundError: if this Python ships no standard-library sources.
    """
    return _mix(library_text(held_out=False))


def _mix(texts: list[str]) -> list[str]:
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
