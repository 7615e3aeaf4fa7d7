"""Task files that tests write, and tasks run on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surgeon.quality.tasks import Answers, TaskModel, TaskSettings, load_tasks, run_tasks

Row = dict[str, Any]

CHOICES = [
    {
        "query": "Question: What is lazy?\n",
        "choices": ["the dog", "the lazy brown dog", "it"],
        "gold": 1,
    },
    {"query": "The dog went on ", "choices": ["sleeping", "jumping over the fox"], "gold": 0},
    {"query": "Question: Who had seen it? Answer:", "choices": ["the dog", "1234567890"], "gold": 0},
    {"query": "The lazy dog", "choices": ["o", "a", "over", "and the dog"], "gold": 3},
]
CONTEXTS = [
    {
        "context_options": ["The fox saw it, and the dog", "The fox saw it, and it "],
        "continuation": "jumps",
        "gold": 0,
    },
    {
        "context_options": ["the quick", "the brown", "the lazy"],
        "continuation": " went on sleeping",
        "gold": 2,
    },
]
CONTINUATIONS = [
    {"context": "The quick brown fox", "continuation": "jumps"},
    {"context": "the dog went on ", "continuation": " sleeping: 123"},
]
NUMBERS = [
    {"context": "one dog", "answer": "7", "chain_of_thought": "a dog is <<7>>7"},
    {"context": "two foxes", "answer": 12, "chain_of_thought": "6 and 6\nmake 12"},
    {"context": "it", "answer": "1,234", "chain_of_thought": "many"},
]


def write_rows(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def evaluate(
    model: Any,
    tokenizer: Any,
    *paths: Path,
    shots: int | None = None,
    answers: Answers | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """The results of task files."""
    tasks = load_tasks([str(path) for path in paths], model.config.max_position_embeddings, shots)
    lm = TaskModel(model, tokenizer, answers or Answers(None, {}), settings.get("batch_size", 1))
    return run_tasks(lm, tasks, "tiny", TaskSettings(**settings)) | {"lm": lm}
