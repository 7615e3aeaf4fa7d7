"""A task's accuracy of programs: as that of models edited one by one, the model left as it was, answers kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.findings.tasks import Score, scores
from surgeon.language.program import Program
from surgeon.quality.summary import Quality
from surgeon.quality.tasks import TaskSettings
from surgeon.searches.accuracy import TaskAccuracy, accuracy_of
from surgeon.searches.mixture import Trial
from surgeon.searches.quantities import parse_objectives
from tests.quality.tasks_helpers import CHOICES, evaluate, write_rows
from tests.tiny_models import tiny_model, tiny_tokenizer

PROGRAMS = [Program.dense(3), Program.parse("A0 F0 [A1 A2] [F1 F2]"), Program.parse("A2 F2")]


@pytest.fixture(autouse=True)
def _no_questions_about_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's record of the machine takes most of a second."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)


def test_accuracy_is_that_of_edited_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = tiny_tokenizer()
    model: Any = tiny_model("llama", 3, vocab_size=len(tokenizer))
    path = write_rows(tmp_path / "choices.jsonl", CHOICES)
    objectives = parse_objectives(f"divergence,accuracy:{path}")
    measured = TaskAccuracy(
        model, tokenizer, objectives, {"model": "tiny"}, tmp_path, TaskSettings(batch_size=2)
    )
    found = measured.measure(PROGRAMS)
    name = f"accuracy:{path}"
    for program in PROGRAMS:
        alone: Any = surgeon.edit(tiny_model("llama", 3, vocab_size=len(tokenizer)), program)
        (acc,) = [one for one in scores(evaluate(alone, tokenizer, path)) if one.metric == "acc"]
        assert found[program] == {name: acc.value}
    assert surgeon.program_of(model) == PROGRAMS[0]
    assert len(list(tmp_path.glob("answers-*.jsonl"))) == 3
    # Nothing is asked again.
    monkeypatch.setattr("surgeon.searches.accuracy.TaskModel._model_call", None)
    assert measured.measure(PROGRAMS[:1])[PROGRAMS[0]] == found[PROGRAMS[0]]


def test_the_best_of_every_level_are_measured(tmp_path: Path) -> None:
    tokenizer: Any = tiny_tokenizer()
    model: Any = tiny_model("llama", 3, vocab_size=len(tokenizer))
    path = write_rows(tmp_path / "choices.jsonl", CHOICES)
    (objective,) = parse_objectives(f"accuracy:{path}")
    accuracy = TaskAccuracy(model, tokenizer, [objective])
    texts = ["A0 F0", "A1 F1", "A2 F2", "A0 F0 A1 F1", "A1 F1 A2 F2"]
    levels, divergences, whole = (
        [1.0, 1.0, 1.0, 2.0, 2.0],
        [0.3, 0.2, 0.1, 0.2, 0.1],
        [True, True, False, True, True],
    )
    trials = [
        Trial(text, "window", (), level, number=number, measured=Quality(9, divergence=value, whole=end))
        for number, (text, level, value, end) in enumerate(
            zip(texts, levels, divergences, whole, strict=True)
        )
    ]
    found = accuracy.of_the_best(trials, count=1)
    assert [trial.number for trial in found if trial.measured.more] == [1, 4]
    program = Program.parse(texts[1])
    assert found[1].measured.more == accuracy.measure([program])[program]
    assert found[0] == trials[0]


def test_an_edited_model_and_an_unknown_task_are_refused() -> None:
    tokenizer: Any = tiny_tokenizer()
    model: Any = tiny_model("llama", 3, vocab_size=len(tokenizer))
    with pytest.raises((ValueError, FileNotFoundError), match="nowhere"):
        TaskAccuracy(model, tokenizer, parse_objectives("accuracy:nowhere.jsonl"))
    surgeon.edit(model, "A0 F0")
    with pytest.raises(ValueError, match="edited program"):
        TaskAccuracy(model, tokenizer, ())


def test_which_number_of_a_task_counts() -> None:
    def score(metric: str, value: float) -> Score:
        return Score("task", 0, metric, "none", value, None, 10, higher_is_better=True)

    assert accuracy_of([score("acc_norm", 0.3), score("acc", 0.4)], "accuracy:task") == 0.4
    assert accuracy_of([score("exact_match", 0.2)], "accuracy:task") == 0.2
    with pytest.raises(
        ValueError, match="accuracy:task: the task has no acc or exact_match, only word_perplexity"
    ):
        accuracy_of([score("word_perplexity", 20.0)], "accuracy:task")
