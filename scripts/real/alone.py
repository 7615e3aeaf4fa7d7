"""What lm-eval alone, with its own prompts, finds of a model on some rows: a process in which there is no surgeon.

    python -I scripts/real/alone.py MODEL TASK ROWS.jsonl COUNT

MODEL is a folder; ROWS are as scripts/real/tasks.py takes them. Prints the accuracies as JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

FILES = {"arc_easy": "arc/arc_easy.yaml", "arc_challenge": "arc/arc_easy.yaml", "piqa": "piqa/piqa.yaml"}


def document(task: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row as the task's dataset on the hub has it."""
    question, choices = row["query"].removeprefix("Question: ").rstrip("\n"), row["choices"]
    if task == "piqa":
        return {"goal": question, "sol1": choices[0], "sol2": choices[1], "label": row["gold"]}
    labels = [chr(ord("A") + number) for number in range(len(choices))]
    return {
        "question": question,
        "choices": {"text": choices, "label": labels},
        "answerKey": labels[row["gold"]],
    }


def main() -> None:
    sys.modules["surgeon"] = None  # type: ignore[assignment]  # whoever imports it from here on fails
    model, name, path, count = sys.argv[1:]
    lines = Path(path).read_text(encoding="utf-8").splitlines()[: int(count)]
    rows = Dataset.from_list([document(name, json.loads(line)) for line in lines])
    config = yaml.safe_load(
        (Path(lm_eval.__file__).parent / "tasks" / FILES[name]).read_text(encoding="utf-8")
    )
    for key in ("tag", "dataset_name", "training_split", "validation_split"):
        config.pop(key, None)
    config |= {"task": name, "test_split": "test", "custom_dataset": lambda **_: {"test": rows}}
    with redirect_stdout(sys.stderr):
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args=f"pretrained={model},dtype=float32",
            tasks=[ConfigurableTask(config=config)],
            task_manager=TaskManager(include_defaults=False),
            device="cpu",
            batch_size=8,
            bootstrap_iters=0,
        )
    results = found["results"][name]
    print(json.dumps({metric: results[f"{metric},none"] for metric in ("acc", "acc_norm")}))


if __name__ == "__main__":
    main()
