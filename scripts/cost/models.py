"""The models of the papers' tables: configurations in docs/shapes, by the names that rows have for them.

They are facts of the papers or of public configurations. What a paper leaves open is chosen and said in `ASSUMED`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).resolve().parents[2] / "docs" / "shapes"
FILES = {
    "llama2-7b": "llama-2-7b",
    "llama3.2-1b": "llama-3.2-1b",
    "llama3.2-3b": "llama-3.2-3b",
    "llama3-8b": "llama-8b",
    "llama-34b": "llama-34b",
    "llama3-70b": "llama-70b",
    "llama-65b": "llama-65b",
    "llama3-405b": "llama-405b-16kv",
    "bloom-176b": "bloom-176b",
    "qwen3-4b": "qwen3-4b",
    "qwen3-14b": "qwen3-14b",
    "track-30b": "pt-30b",
    "opt-30b": "opt-30b",
}
CONFIGS: dict[str, dict[str, Any]] = {
    model: json.loads((SHAPES / f"{file}.json").read_text(encoding="utf-8"))
    for model, file in FILES.items()
}

ASSUMED = {
    "llama3-405b": "16 KV heads in place of 8, as 16 ranks each hold one",
    "bloom-176b": "gated, with the neurons that gpt-fast takes where none are said: two thirds of 4 h",
    "track-30b": "hidden size 64 heads x 128; neurons and vocabulary such that there are 30B parameters",
    "llama-34b": "Code Llama's 34B",
}
