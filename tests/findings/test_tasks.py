"""Results of tasks: the same files as lm-eval writes, and a table that fits a terminal."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.loggers.evaluation_tracker import EvaluationTracker

from surgeon.findings.tasks import Score, scores, scores_table, write_results
from tests.quality.tasks_helpers import CHOICES, CONTINUATIONS, NUMBERS, evaluate, write_rows
from tests.tiny_models import tiny_model, tiny_tokenizer

GROUP_CODE = """\
from datasets import Dataset

def rows(texts):
    return {"test": Dataset.from_list([{"text": text, "target": len(text) % 2} for text in texts])}

def three(**_):
    return rows(["fox", "brown fox", "the dog"])

def five(**_):
    return rows(["it", "jumps", "over", "lazy", "sleeping"])
"""
MEMBER = """\
task: {name}
custom_dataset: !function code.{name}
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: ["and", "or"]
doc_to_target: target
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GROUP = """\
group: outer
task:
  - group: inner
    task: [three]
    aggregate_metric_list: [{metric: acc, weight_by_size: true}]
  - five
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
"""


@pytest.fixture
def model() -> Any:
    return tiny_model("llama", 2, vocab_size=300)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def evaluated(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, files = tmp_path_factory.mktemp("tasks"), {"c": CHOICES, "l": CONTINUATIONS, "g": NUMBERS}
    paths = [write_rows(folder / f"{name}.jsonl", rows) for name, rows in files.items()]
    found: dict[str, Any] = evaluate(tiny_model("llama", 2, vocab_size=300), tokenizer, *paths, shots=1)
    del found["lm"]
    return found


@pytest.fixture
def results(evaluated: dict[str, Any]) -> dict[str, Any]:
    """Of three task files; the test's own to change."""
    return copy.deepcopy(evaluated)


def test_files_are_those_that_lm_eval_writes(results: dict[str, Any], tmp_path: Path) -> None:
    tracker = EvaluationTracker(output_path=str(tmp_path / "theirs"))
    tracker.general_config_tracker.log_experiment_args("hf", {"pretrained": "tiny"}, None, None, False)
    theirs = copy.deepcopy(results)
    samples = theirs.pop("samples")
    tracker.save_results_aggregated(theirs, samples)
    for task, rows in samples.items():
        tracker.save_results_samples(task, rows)

    path, _ = write_results(tmp_path / "ours", results, {"model": "tiny"}, with_samples=True)
    (their_path,) = (tmp_path / "theirs" / "tiny").glob("results_*.json")
    assert len(path.name) == len(their_path.name)
    ours, wanted = json.loads(path.read_text()), json.loads(their_path.read_text())
    assert ours.pop("surgeon") == {"model": "tiny"}
    seconds = {float(content.pop("total_evaluation_time_seconds")) for content in (ours, wanted)}
    assert min(seconds) > 0
    assert ours == wanted
    for task in samples:
        (mine,) = (tmp_path / "ours").glob(f"samples_{task}_*.jsonl")
        (his,) = (tmp_path / "theirs" / "tiny").glob(f"samples_{task}_*.jsonl")
        assert mine.read_text() == his.read_text()


def test_the_csv_has_the_numbers_of_the_table(results: dict[str, Any], tmp_path: Path) -> None:
    _, path = write_results(tmp_path / "out", results, {})
    assert not list((tmp_path / "out").glob("samples*"))
    rows = list(csv.DictReader(path.open()))
    found = {(row["task"], row["metric"], row["filter"]): float(row["value"]) for row in rows}
    assert found == {
        ("c", "acc", "none"): results["results"]["c"]["acc,none"],
        ("c", "acc_norm", "none"): results["results"]["c"]["acc_norm,none"],
        ("l", "perplexity", "none"): results["results"]["l"]["perplexity,none"],
        ("l", "acc", "none"): results["results"]["l"]["acc,none"],
        ("g", "exact_match", "strict-match"): 0.0,
        ("g", "exact_match", "flexible-extract"): results["results"]["g"][
            "exact_match,flexible-extract"
        ],
    }
    assert [row["rows"] for row in rows] == ["4", "4", "2", "2", "3", "3"]
    assert [row["higher_is_better"] for row in rows[1:3]] == ["True", "False"]
    assert {row["shots"] for row in rows} == {"1"}


def test_of_a_group_its_own_numbers_are_shown(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(GROUP_CODE)
    (tmp_path / "outer.yaml").write_text(GROUP)
    for name in ("three", "five"):
        (tmp_path / f"{name}.yaml").write_text(MEMBER.format(name=name))
    results = evaluate(model, tokenizer, tmp_path / "outer.yaml")
    (score,) = scores(results)
    right = [sample["acc"] for task in ("three", "five") for sample in results["samples"][task]]
    assert (score.task, score.rows, score.shots) == ("outer", 8, 0)
    assert score.value == pytest.approx(np.mean(right))


class Unwritable:
    def __str__(self) -> str:
        raise ZeroDivisionError


def test_nothing_is_left_of_results_that_cannot_be_written(
    results: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError):
        write_results(tmp_path / "out", results, {"broken": Unwritable()})
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".csv"]


def test_the_table() -> None:
    found = [
        Score("piqa", 0, "acc", "none", 0.51234, 0.0123456, 1838, True),
        Score("piqa", 0, "acc_norm", "none", 0.5, None, 1838, True),
        Score("lambada", None, "perplexity", "none", 8844249.2, 12.5, 5153, False),
    ]
    assert str(scores_table(found)).splitlines() == [
        "Accuracy on tasks",
        "task     metric      better  value ± standard error  shots   rows",
        "piqa     acc         higher          0.5123 ± 0.012      0  1,838",
        "piqa     acc_norm    higher                  0.5000      0  1,838",
        "lambada  perplexity  lower           8,844,000 ± 12         5,153",
    ]


@pytest.mark.parametrize(("task", "metric"), [("t" * 70, "acc"), ("t", "m" * 70), ("t" * 70, "m" * 70)])
def test_the_table_fits_80_columns(task: str, metric: str) -> None:
    found = Score(task, 5, metric, "flexible-extract", 8844249.2, 1e9, 123456, True)
    lines = str(scores_table([found])).splitlines()
    assert max(map(len, lines)) <= 80
    assert "..." in lines[2]
    assert "123,456" in lines[2]
