"""The models of the papers' tables, configurations in docs/shapes, and the programs of the systems compared there.

Configurations are facts of the papers or public ones. What a paper leaves open is chosen and said in `ASSUMED`.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from surgeon.language.operations.fuse_attention_mlp import fuse_attention_mlp
from surgeon.language.operations.ladder import ladder
from surgeon.language.operations.lowrank import lowrank
from surgeon.language.operations.pair import pair
from surgeon.language.operations.tracks import tracks
from surgeon.language.program import Program
from surgeon.language.sublayer import LayerShapes

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
# DeInfer's compression of 40% is read as the share of parameters that every matrix's factors keep.
KEEP = 0.6
LOW_RANK = {"base": "base", "deinfer": "gather"}


def program_of(system: str, layers: int, shapes: LayerShapes) -> Program:
    """The program of a system as `cases.Run` names it.

    Raises:
        ValueError: for a name that is none.
    """
    dense = Program.dense(layers)
    name, *numbers = system.split(":")
    if name in ("dense", "upper"):
        return dense
    if name == "lp":
        pairs, end = (int(number) for number in numbers)
        return pair(dense, range(end - 2 * pairs, end))
    if name == "ladder":
        return ladder(dense, range(layers))
    if name == "parallel":
        return fuse_attention_mlp(dense, range(layers))
    if name == "tracks":
        return tracks(dense, range(layers), 8, int(numbers[0]))
    if name in LOW_RANK:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return lowrank(dense, range(layers), shapes, keep=KEEP)
    raise ValueError(f"no known system: {system!r}")
