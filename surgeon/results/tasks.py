"""The results of tasks: as a table to read, as a CSV file, and in lm-eval's own format."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list, sanitize_task_name

from surgeon.processes.files import write_text

PROVENANCE_KEY = "surgeon"
_WIDTH = 80
_NO_FILTER = "none"
_HEADS = ("task", "shots", "metric", "value", "stderr", "n")
_LEFT = (True, False, True, False, False, False)


@dataclass(frozen=True)
class Score:
    """One number of one task or group.

    Attributes:
        shots: few-shot examples; None for a group whose tasks have different numbers.
        filter: how the answer was taken out of a generated text; "none" for scored texts.
        stderr: standard error, or None where lm-eval knows none.
        rows: how many were evaluated.
    """

    task: str
    shots: int | None
    metric: str
    filter: str
    value: float
    stderr: float | None
    rows: int
    higher_is_better: bool | None


def scores(results: dict[str, Any]) -> list[Score]:
    """The numbers of what was asked for: of a group that lm-eval aggregates the group's, not those of its members."""
    groups = results.get("groups", {})
    hidden = {child for group in groups for child in results["group_subtasks"].get(group, [])}
    found = []
    for task, values in results["results"].items():
        if task in hidden:
            continue
        for key, value in values.items():
            metric, comma, way = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            stderr = values.get(f"{metric}_stderr,{way}")
            better = results["higher_is_better"].get(task, {}).get(metric)
            shots = results["n-shot"].get(task)
            error = None if stderr is None or isinstance(stderr, str) else float(stderr)
            found.append(Score(task, shots, metric, way, float(value), error, int(values["sample_len"]), better))
    return found


def table(found: list[Score]) -> str:
    """The numbers as lines of at most 80 characters."""
    rows = [_HEADS, *(_cells(score) for score in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
    for flexible in (0, 2):  # names give way
        spare = _WIDTH - (sum(widths) + 2 * (len(widths) - 1))
        widths[flexible] = max(min(12, widths[flexible]), widths[flexible] + min(0, spare))
    lines = []
    for i, row in enumerate(rows):
        shown = ("", "", *row[2:]) if i > 1 and row[:2] == rows[i - 1][:2] else row
        lines.append("  ".join(map(_place, shown, widths, _LEFT)).rstrip())
    return "\n".join(lines)


def _place(text: str, width: int, left: bool) -> str:
    text = text if len(text) <= width else text[: width - 3] + "..."
    return text.ljust(width) if left else text.rjust(width)


def _cells(score: Score) -> tuple[str, ...]:
    metric = score.metric if score.filter == _NO_FILTER else f"{score.metric} ({score.filter})"
    shots = "" if score.shots is None else str(score.shots)
    stderr = "" if score.stderr is None else _number(score.stderr)
    return score.task, shots, metric, _number(score.value), stderr, f"{score.rows:,}"


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def write_results(
    folder: Path, results: dict[str, Any], record: dict[str, Any], with_samples: bool = False
) -> tuple[Path, ...]:
    """Write results_<time>.json as lm-eval does, and the numbers of the table as CSV; with samples_<task>_<time>.jsonl.

    The record of provenance goes under the key "surgeon". Every file is whole or not there; the results, which say
    that all is done, come last.

    Args:
        results: of `surgeon.quality.tasks.run_tasks`.

    Returns:
        The JSON file, and the CSV file.

    Raises:
        OSError: if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    moment = datetime.now().isoformat().replace(":", "-")
    samples: dict[str, list[dict[str, Any]]] = results["samples"]
    if with_samples:
        for task, rows in samples.items():
            lines = "".join(_dumps(_sample(row)) + "\n" for row in rows)
            write_text(folder / f"samples_{_file_name(task)}_{moment}.jsonl", lines)
    listed, whole = folder / f"results_{moment}.csv", folder / f"results_{moment}.json"
    write_text(listed, _csv(scores(results)))
    content = {key: value for key, value in results.items() if key != "samples"}
    content |= {"task_hashes": {task: _hash(rows) for task, rows in samples.items()}, PROVENANCE_KEY: record}
    write_text(whole, _dumps(content, indent=2))
    return whole, listed


def _csv(found: list[Score]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Score.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(score) for score in found)
    return text.getvalue()


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    """One row's record as lm-eval writes it: lists of texts, which `datasets` can load again."""
    arguments = {
        f"gen_args_{i}": {f"arg_{j}": part for j, part in enumerate(request)}
        for i, request in enumerate(row["arguments"])
    }
    texts = {key: sanitize_list(row[key]) for key in ("resps", "filtered_resps")}
    return row | texts | {"arguments": arguments, "target": str(row["target"])}


def _hash(rows: list[dict[str, Any]]) -> str:
    """lm-eval's hash of what a task asked."""
    hashed: str = hash_string("".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows))
    return hashed


def _file_name(task: str) -> str:
    name: str = task if "/" not in task else sanitize_task_name(task)
    return name


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, default=handle_non_serializable, ensure_ascii=False)
