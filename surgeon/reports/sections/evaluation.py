"""Evaluations: accuracy on tasks, from lm-eval's results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from surgeon.reports.blocks import Block, Code, Finding, Paragraph, Table
from surgeon.reports.runs import Kind, Run, model_in_record
from surgeon.words import listed, number, plural

_RECORD = "surgeon"  # under which lm-eval's results carry ours
_LM_EVAL = ("lm_eval_version", "model_name", "n-shot", "n-samples", "versions", "task_hashes", "config")
_NO_FILTER = "none"
_NAMED = 6  # numbers that the summary gives


@dataclass(frozen=True)
class TaskScore:
    """One number of one task."""

    task: str
    metric: str
    value: float
    stderr: float | None
    rows: int | None
    shots: int | None
    higher_is_better: bool | None

    @property
    def text(self) -> str:
        """The value with its standard error."""
        return number(self.value) + (f" ± {number(self.stderr, 2)}" if self.stderr is not None else "")


def scores(record: dict[str, Any]) -> list[TaskScore]:
    """Every number of lm-eval's results; of a group that it aggregates the group's, not those of its members."""
    members = {name for group in record.get("groups") or {} for name in record.get("group_subtasks", {}).get(group, [])}
    found = []
    for task, values in record["results"].items():
        if task in members or not isinstance(values, dict):
            continue
        for key, value in values.items():
            metric, comma, way = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{way}")
            rows = values.get("sample_len") or (record.get("n-samples", {}).get(task) or {}).get("effective")
            better = record.get("higher_is_better", {}).get(task, {}).get(metric)
            name = metric if way == _NO_FILTER else f"{metric} ({way})"
            error = float(stderr) if isinstance(stderr, int | float) else None
            found.append(TaskScore(task, name, float(value), error, rows, record.get("n-shot", {}).get(task), better))
    return found


def _show(run: Run) -> Iterator[Block]:
    surgery = run.record.get(_RECORD, {})
    yield Paragraph(_what(run))
    rows = [
        [
            s.task,
            s.metric,
            _better(s),
            s.text,
            "" if s.shots is None else str(s.shots),
            "" if s.rows is None else f"{s.rows:,}",
        ]
        for s in scores(run.record)
    ]
    head = ["task", "metric", "better", "value ± standard error", "shots", "rows"]
    yield Table("Accuracy on tasks", head, rows, left=frozenset({1, 2}))
    if surgery.get("program"):
        yield Code("The program that was evaluated", str(surgery["program"]))


def _what(run: Run) -> str:
    name, limit = _subject(run), run.record.get("config", {}).get("limit")
    some = f" Only the first {limit:g} rows of each task." if isinstance(limit, int | float) else ""
    return f"{name}, by lm-eval {run.record.get('lm_eval_version', '')}.{some}".replace(" .", ".")


def _subject(run: Run) -> str:
    """What was evaluated, as the user named it."""
    return str(
        run.record.get("model_name") or run.record.get("config", {}).get("model_args", {}).get("pretrained") or run.name
    )


def _better(score: TaskScore) -> str:
    return {True: "higher", False: "lower", None: ""}[score.higher_is_better]


def _together(runs: Sequence[Run]) -> list[Block]:
    """All evaluations of a model side by side."""
    by_run = [{(s.task, s.metric): s for s in scores(run.record)} for run in runs]
    keys = list(dict.fromkeys(key for found in by_run for key in found))
    rows = [
        [task, metric, *(found[task, metric].text if (task, metric) in found else "" for found in by_run)]
        for task, metric in keys
    ]
    head = ["task", "metric", *(run.name for run in runs)]
    note = "Value ± standard error. " + " ".join(f"{run.name}: {_subject(run)}." for run in runs)
    return [Table("All evaluations side by side", head, rows, note, left=frozenset({1}))] if len(runs) > 1 else []


def _findings(run: Run) -> Iterator[Finding]:
    found = scores(run.record)
    if found:
        named = listed(f"{s.task} {s.metric} {s.text}" for s in found[:_NAMED])
        more = f", and {plural(len(found) - _NAMED, 'number')} more" if len(found) > _NAMED else ""
        yield Finding("On tasks", f"{_subject(run)} has {named}{more}.")


def _provenance(record: dict[str, Any]) -> dict[str, Any]:
    """What surgeon wrote, and of lm-eval's much longer record how it was called."""
    written = record.get(_RECORD) if isinstance(record.get(_RECORD), dict) else {}
    return dict(written or {}) | {name: record[name] for name in _LM_EVAL if name in record}


def _model_of(record: dict[str, Any]) -> tuple[str, str]:
    if isinstance(record.get(_RECORD), dict):
        return model_in_record(record[_RECORD])
    return str(record.get("model_name") or "a model without a name"), ""


EVALUATION = Kind(
    name="eval",
    title="Tasks",
    record="results*.json",
    show=lambda run: list(_show(run)),
    findings=lambda run: list(_findings(run)),
    together=_together,
    without="No evaluation: accuracy on tasks is not known (surgeon eval).",
    provenance=_provenance,
    is_ours=lambda record: isinstance(record.get("results"), dict),
    model_of=_model_of,
)
