"""Where a result came from: what is written in the JSON file beside every table."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.errors import naming

if TYPE_CHECKING:
    import pandas as pd

# Of everything measured; rises when what was measured before is not to be gone on with, or shown.
# 3: before, models with dropout in their configuration were measured with it on.
FORMAT = 3


def provenance(model: str, model_hash: str, *, seed: int | None = None, **more: Any) -> dict[str, Any]:
    """A record of a run: model, its hash, seed, the command line, versions, and whatever else is given.

    Args:
        model: as the user named it.
        model_hash: `Checkpoint.model_hash()` of it.
        more: data, its hash, program, settings; values that JSON can hold.
    """
    return {
        "format": FORMAT,
        "command": command_line(),
        "model": model,
        "model_hash": model_hash,
        **({} if seed is None else {"seed": seed}),
        **more,
        "versions": versions(),
    }


def command_line() -> str:
    """What the user typed, with the program by its name alone, and without passwords."""
    return shlex.join([Path(sys.argv[0]).name, *map(without_password, sys.argv[1:])])


def without_password(text: str) -> str:
    """A text in which the passwords of addresses (database://user:password@host) are stars."""
    text = re.sub(r"(://[^/@:\s]*):\S*@", r"\1:***@", text)
    return re.sub(r"([?&]password=)[^&\s]*", r"\1***", text)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    import torch
    import transformers

    import surgeon

    return {
        "surgeon": surgeon.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file that is whole or not there: beside the target, then renamed."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file that is whole or not there; what was there before stays until then."""
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_table(path: Path, table: pd.DataFrame, digits: int = 9, missing: str = "nan") -> None:
    """Write a table as CSV, whole or not there.

    Args:
        digits: of each number.
        missing: what stands for NaN.
    """
    write_text(path, table.to_csv(index=False, float_format=f"%.{digits}g", na_rep=missing))


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside the wanted one to write to; it is renamed at the end, or removed if writing it fails."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with naming(path):
            yield beside
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
