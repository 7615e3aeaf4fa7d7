"""Searches from the command line on a tiny model, as several tests run them."""

from __future__ import annotations

import json
from pathlib import Path

from surgeon.commands.app import main

SIZES = ["--tokens", "256", "--window", "64", "--trials", "6"]


def search(model: Path, text: Path, output: Path, *more: str) -> int:
    """A search of pairs at depth 3; `more` may name another budget."""
    budget = [] if "--budget" in more else ["--budget", "depth=3"]
    return main(["search", str(model), *budget, "--data", str(text), "-o", str(output), *SIZES, *more])


def search_freely(model: Path, text: Path, output: Path, *more: str) -> int:
    """A search without a budget."""
    return main(["search", str(model), "--data", str(text), "-o", str(output), *SIZES, *more])


def record_of(output: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((output / "search.json").read_text())
    return found
