"""The demo: a small trained model in the folder `model`, and text that every machine with Python has."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

__all__ = ["demo_data", "demo_training_data"]


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


HELD_OUT_SHARE = 16  # one file in this many is held out

_LEFT_OUT_FOLDERS = {
    "__pycache__",
    "config",
    "encodings",
    "idle_test",
    "lib2to3",
    "lib-dynload",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
}
_LEFT_OUT_PREFIXES = ("_sysconfigdata", "config-")


def library_files(held_out: bool) -> list[Path]:
    """Standard-library source files in a fixed order: the held-out ones, or all the others.

    Raises:
        FileNotFoundError: if this Python ships no standard-library sources (a zipped or stripped installation).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    chosen = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        parts = relative.parts
        if _LEFT_OUT_FOLDERS & {*parts[:-1]} or any(one.startswith(_LEFT_OUT_PREFIXES) for one in parts):
            continue
        digest = hashlib.sha256(relative.as_posix().encode()).digest()
        if (int.from_bytes(digest[:4], "big") % HELD_OUT_SHARE == 0) == held_out:
            chosen.append(path)
    if not chosen:
        raise FileNotFoundError(
            f"no standard-library source files under {root}: this Python was installed without them; "
            "give a text file of your own instead"
        )
    return sorted(chosen, key=lambda path: path.relative_to(root).as_posix())


def library_text(held_out: bool) -> list[str]:
    """The texts of `library_files`, one string per file; files that are not UTF-8 are passed over."""
    texts = []
    for path in library_files(held_out):
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return [text for text in texts if text.strip()]
