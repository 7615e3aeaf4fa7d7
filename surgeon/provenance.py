"""Provenance of results: the JSON record beside every table."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from surgeon.version import __version__

# Of everything measured; rises when what was measured before is not to be gone on with, or shown.
# 3: before, models with dropout in their configuration were measured with it on.
FORMAT = 3


def provenance(model: str, model_hash: str, *, seed: int | None = None, **more: Any) -> dict[str, Any]:
    """Record a run: model, its hash, seed, the command line, versions, and further entries.

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
    """Return the command as typed, with the program by its name alone, and without passwords."""
    return shlex.join([Path(sys.argv[0]).name, *map(without_password, sys.argv[1:])])


def without_password(text: str) -> str:
    """Replace passwords of addresses (database://user:password@host) by stars."""
    text = re.sub(r"(://[^/@:\s]*):\S*@", r"\1:***@", text)
    return re.sub(r"([?&]password=)[^&\s]*", r"\1***", text)


def versions() -> dict[str, str]:
    """Return versions that the numbers depend on."""
    import torch
    import transformers

    return {
        "surgeon": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
