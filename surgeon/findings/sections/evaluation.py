"""Evaluations: accuracy on tasks, from lm-eval's results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from surgeon.findings.blocks import Block, Code, Finding, Paragraph, Table
from surgeon.findings.runs import Kind, Run
from surgeon.findings.tasks import PROVENANCE_KEY, Score, TaskRun
from surgeon.words import listed, number, plural

_NAMED = 6  # numbers that the summary gives


def _text(score: Score) -> str:
    """The value with its standard error."""
    return number(score.value) + (f" ± {number(score.stderr, 2)}" if score.stderr is not None else "")


def _show(run: Run[TaskRun]) -> Iterator[Block]:
    surgery = run.record.get(PROVENANCE_KEY, {})
    yield Paragraph(_what(run))
    rows = [
        [
            s.task,
            s.name,
            _better(s),
            _text(s),
            "" if s.shots is None else str(s.shots),
            "" if s.rows is None else f"{s.rows:,}",
        ]
        for s in run.found.scores
    ]
    head = ["task", "metric", "better", "value ± standard error", "shots", "rows"]
    yield Table("Accuracy on tasks", head, rows, left=frozenset({1, 2}))
    if surgery.get("program"):
        yield Code("The program that was evaluated", str(surgery["program"]))


def _what(run: Run[TaskRun]) -> str:
    name, limit = _subject(run), run.record.get("config", {}).get("limit")
    some = f" Only the first {limit:g} rows of each task." if isinstance(limit, int | float) else ""
    return f"{name}, by lm-eval {run.record.get('lm_eval_version', '')}.{some}".replace(" .", ".")


def _subject(run: Run[TaskRun]) -> str:
    """What was evaluated, as the user named it."""
    return str(
        run.record.get("model_name") or run.record.get("config", {}).get("model_args", {}).get("pretrained") or run.name
    )


def _better(score: Score) -> str:
    return {True: "higher", False: "lower", None: ""}[score.higher_is_better]


def _together(runs: Sequence[Run[TaskRun]]) -> list[Block]:
    """All evaluations of a model side by side."""
    by_run = [{(s.task, s.name): s for s in run.found.scores} for run in runs]
    keys = list(dict.fromkeys(key for found in by_run for key in found))
    rows = [
        [task, metric, *(_text(found[task, metric]) if (task, metric) in found else "" for found in by_run)]
        for task, metric in keys
    ]
    head = ["task", "metric", *(run.name for run in runs)]
    note = "Value ± standard error. " + " ".join(f"{run.name}: {_subject(run)}." for run in runs)
    return [Table("All evaluations side by side", head, rows, note, left=frozenset({1}))] if len(runs) > 1 else []


def _findings(run: Run[TaskRun]) -> Iterator[Finding]:
    found = run.found.scores
    if found:
        named = listed(f"{s.task} {s.name} {_text(s)}" for s in found[:_NAMED])
        more = f", and {plural(len(found) - _NAMED, 'number')} more" if len(found) > _NAMED else ""
        yield Finding("On tasks", f"{_subject(run)} has {named}{more}.")


EVALUATION = Kind(
    TaskRun,
    "Tasks",
    _show,
    _findings,
    together=_together,
    without="No evaluation: accuracy on tasks is not known (surgeon eval).",
)
