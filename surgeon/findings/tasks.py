"""The results of tasks: as a table to read, as a CSV file, and in lm-eval's own format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import pandas as pd

from surgeon.findings.result import Block, Finding, Record, RunResult, Table, record_codes
from surgeon.processes.files import make_folder, write_text
from surgeon.words import join_words, number, plural

PROVENANCE_KEY = "surgeon"
_NAMED = 6  # numbers that the summary gives
_NO_FILTER = "none"
_LM_EVAL = ("lm_eval_version", "model_name", "n-shot", "n-samples", "versions", "task_hashes", "config")


@dataclass(frozen=True)
class Score:
    """One number of one task or group.

    Attributes:
        shots: None for a group whose tasks have different numbers.
        filter: lm-eval's, of a generated text; "none" for scored texts.
        stderr, rows: None where lm-eval does not say them.
    """

    task: str
    shots: int | None
    metric: str
    filter: str
    value: float
    stderr: float | None
    rows: int | None
    higher_is_better: bool | None

    @property
    def name(self) -> str:
        """The metric's name, with the filter where there is one."""
        if self.filter == _NO_FILTER:
            return self.metric
        return f"{self.metric} ({self.filter})"

    @property
    def text(self) -> str:
        """The number with its standard error."""
        if self.stderr is None:
            return number(self.value)
        return f"{number(self.value)} ± {number(self.stderr, 2)}"


@dataclass(frozen=True, repr=False)
class TaskRun(RunResult):
    """The result of `evaluate` on tasks: lm-eval's, with our provenance in it."""

    COMMAND = "eval"
    RECORD = "results*.json"
    TITLE = "Tasks"
    WITHOUT = "No evaluation: accuracy on tasks is not known (surgeon eval)."

    scores: list[Score]

    @classmethod
    def facts(cls, record: Record, file: Path) -> Record:  # noqa: ARG003
        return {"scores": scores(record)}

    @classmethod
    def is_ours(cls, record: Record) -> bool:
        return isinstance(record.get("results"), dict)

    @classmethod
    def provenance(cls, record: Record) -> Record:
        """Our provenance, and the call of lm-eval from its much longer record."""
        written = record.get(PROVENANCE_KEY)
        own = {}
        if isinstance(written, dict):
            own = dict(written)
        return own | {name: record[name] for name in _LM_EVAL if name in record}

    @classmethod
    def model_of(cls, record: Record) -> tuple[str, str]:
        if isinstance(record.get(PROVENANCE_KEY), dict):
            return super().model_of(record[PROVENANCE_KEY])
        return str(record.get("model_name") or "a model without a name"), ""

    def table(self) -> pd.DataFrame:
        return pd.DataFrame(map(asdict, self.scores), columns=list(Score.__dataclass_fields__))

    def __str__(self) -> str:
        return str(scores_table(self.scores))

    def section(self) -> Iterator[Block]:
        surgery = self.record.get(PROVENANCE_KEY, {})
        limit = self.record.get("config", {}).get("limit")
        some = ""
        if isinstance(limit, int | float):
            some = f" Only the first {'row' if limit == 1 else f'{limit:g} rows'} of each task."
        said = f"{self._subject()}, by lm-eval {self.record.get('lm_eval_version', '')}.{some}"
        yield said.replace(" .", ".")
        yield scores_table(self.scores)
        yield from record_codes(surgery, program="The program that was evaluated")

    def _subject(self) -> str:
        return str(self.record.get("model_name") or self.name)

    @classmethod
    def together(cls, runs: Sequence[Self]) -> list[Block]:
        by_run = [{(score.task, score.name): score.text for score in run.scores} for run in runs]
        keys = dict.fromkeys(key for found in by_run for key in found)
        rows = [[*key, *(found.get(key, "") for found in by_run)] for key in keys]
        head = ["task", "metric", *(run.name for run in runs)]
        note = "Value ± standard error. " + " ".join(f"{run.name}: {run._subject()}." for run in runs)
        if len(runs) > 1:
            return [Table("All evaluations side by side", head, rows, note, left=(1,))]
        return []

    def summary(self) -> Iterator[Finding]:
        found = self.scores
        if found:
            named = join_words(f"{score.task} {score.name} {score.text}" for score in found[:_NAMED])
            more = ""
            if len(found) > _NAMED:
                more = f", and {plural(len(found) - _NAMED, 'number')} more"
            yield Finding("On tasks", f"{self._subject()} has {named}{more}.")


def scores_table(scores: Sequence[Score]) -> Table:
    """Table each number with its standard error."""
    better = {True: "higher", False: "lower", None: ""}
    rows = []
    for one in scores:
        counts = ("" if count is None else f"{count:,}" for count in (one.shots, one.rows))
        rows.append([one.task, one.name, better[one.higher_is_better], one.text, *counts])
    head = ["task", "metric", "better", "value ± standard error", "shots", "rows"]
    return Table("Accuracy on tasks", head, rows, left=(1, 2))


def scores(results: Record) -> list[Score]:
    """The numbers of the tasks and groups that were asked for, without members of groups that lm-eval aggregates."""
    members = results.get("group_subtasks", {})
    hidden = {child for group in results.get("groups") or {} for child in members.get(group, [])}
    found = []
    for task, values in results["results"].items():
        if task in hidden or not isinstance(values, dict):
            continue
        rows = values.get("sample_len") or (results.get("n-samples", {}).get(task) or {}).get(
            "effective"
        )
        for key, value in values.items():
            metric, comma, way = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{way}")
            if not isinstance(stderr, int | float):
                stderr = None
            better = results.get("higher_is_better", {}).get(task, {}).get(metric)
            shots = results.get("n-shot", {}).get(task)
            found.append(Score(task, shots, metric, way, float(value), stderr, rows, better))
    return found


def write_results(
    folder: Path, results: Record, record: Record, with_samples: bool = False
) -> tuple[Path, ...]:
    """Write results_<time>.json as lm-eval does, the table's numbers as CSV, and samples_<task>_<time>.jsonl.

    Provenance goes under the key "surgeon". Every file is whole or not there; the results mark the end.
    """
    from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list, sanitize_task_name

    def dumps(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, indent=indent, default=handle_non_serializable, ensure_ascii=False)

    make_folder(folder)
    moment = datetime.now().isoformat().replace(":", "-")
    hashes: dict[str, str] = {}
    for task, rows in results["samples"].items():
        hashes[task] = hash_string(
            "".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows)
        )
        lines = []
        for row in rows if with_samples else ():  # as lm-eval writes them, and `datasets` can load them
            requests = {
                f"gen_args_{i}": {f"arg_{j}": part for j, part in enumerate(request)}
                for i, request in enumerate(row["arguments"])
            }
            texts = {key: sanitize_list(row[key]) for key in ("resps", "filtered_resps")}
            lines.append(dumps(row | texts | {"arguments": requests, "target": str(row["target"])}))
        if with_samples:
            name = sanitize_task_name(task) if "/" in task else task
            write_text(folder / f"samples_{name}_{moment}.jsonl", "".join(f"{line}\n" for line in lines))
    listed = folder / f"results_{moment}.csv"
    whole = folder / f"results_{moment}.json"
    columns = list(Score.__dataclass_fields__)
    write_text(
        listed,
        pd.DataFrame(map(asdict, scores(results)), columns=columns, dtype=object).to_csv(index=False),
    )
    content = {key: value for key, value in results.items() if key != "samples"}
    write_text(whole, dumps(content | {"task_hashes": hashes, PROVENANCE_KEY: record}, indent=2))
    return whole, listed
