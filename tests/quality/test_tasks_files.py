"""Task files: what each form becomes, and which rows are refused."""

from __future__ import annotations

import codecs
import hashlib
import json
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pytest
import yaml
from lm_eval.utils import apply_template

from surgeon.quality.tasks import file_task, read_rows
from tests.quality.tasks_helpers import CHOICES, CONTEXTS, CONTINUATIONS, NUMBERS, Row, write_rows

CHOICE: Row = {"query": "q", "choices": ["a", "b"], "gold": 0}
CONTEXT: Row = {"context_options": ["a", "b"], "continuation": "c", "gold": 0}
TEXT: Row = {"context": "a", "continuation": "b"}
NUMBER: Row = {"context": "a", "answer": "7"}


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (CHOICES, "multiple choice"),
        (CONTEXTS, "one continuation of several contexts"),
        (CONTINUATIONS, "continuation"),
        (NUMBERS, "number"),
    ],
)
def test_the_form_follows_from_the_keys(tmp_path: Path, rows: list[Row], name: str) -> None:
    form, read = read_rows(
        write_rows(tmp_path / "t.jsonl", [dict(row, id=i) for i, row in enumerate(rows)])
    )
    assert (form, len(read)) == (name, len(rows))


def own_template(task: str, file: str) -> dict[str, Any]:
    """The settings of one of lm-eval's own tasks, as far as they are plain text."""
    path = Path(lm_eval.tasks.__file__).parent / task / file
    settings: dict[str, Any] = yaml.safe_load(path.read_text())
    return settings


def test_prompts_are_those_of_lm_evals_own_tasks(tmp_path: Path) -> None:
    goal, choices = "How do I make it?", ["so", "like this"]
    written = [{"query": f"Question: {goal}\n", "choices": choices, "gold": 1}]
    (row,) = read_rows(write_rows(tmp_path / "t.jsonl", written))[1]
    piqa = own_template("piqa", "piqa.yaml")
    assert row["prompt"] == apply_template(piqa["doc_to_text"], {"goal": goal})
    (row,) = read_rows(write_rows(tmp_path / "t.jsonl", [{**written[0], "query": f"Question: {goal}"}]))[
        1
    ]
    arc = own_template("arc", "arc_easy.yaml")
    assert row["prompt"] == apply_template(arc["doc_to_text"], {"question": goal})
    assert own_template("openbookqa", "openbookqa.yaml")["doc_to_text"] == "question_stem"
    (row,) = read_rows(write_rows(tmp_path / "t.jsonl", [{**written[0], "query": "The sun is"}]))[1]
    assert row["prompt"] == "The sun is"


def test_numbers_are_asked_and_read_as_in_lm_evals_gsm8k(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "t.jsonl",
        [{"context": goal, "chain_of_thought": "1 + 1\nis 2", "answer": "2"} for goal in "ab"],
    )
    task, digest = file_task(path, 1024)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    own = own_template("gsm8k", "gsm8k.yaml")
    doc = {"question": "a", "answer": "1 + 1\nis 2\n#### 2"}
    row = task.eval_docs[0]
    assert task.doc_to_text(row) == apply_template(own["doc_to_text"], doc)
    assert task.doc_to_target(row) == apply_template(own["doc_to_target"], doc)
    for key in ("filter_list", "metric_list"):
        assert task.config[key] == own[key]
    assert task.config["generation_kwargs"] == own["generation_kwargs"] | {"max_gen_toks": 256}
    assert file_task(path, 100)[0].config["generation_kwargs"]["max_gen_toks"] == 50


def test_numbers_without_reasoning_are_looked_for_anywhere(tmp_path: Path) -> None:
    task, _ = file_task(write_rows(tmp_path / "t.jsonl", [NUMBER, {**NUMBER, "answer": -3.5}]), 1024)
    assert [filters["name"] for filters in task.config["filter_list"]] == ["flexible-extract"]
    assert [task.doc_to_target(row) for row in task.eval_docs] == ["7", "-3.5"]


def test_nothing_is_left_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    task, _ = file_task(write_rows(tmp_path / "t.jsonl", CHOICES), 1024)
    assert len(list(task.eval_docs)) == len(CHOICES)
    assert not (tmp_path / "cache").exists()
    assert "lambda" not in json.dumps(task.dump_config())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"a": 1},
            "the keys a fit no kind of task; a row has one of: query, choices, gold (multiple choice);",
        ),
        ({**TEXT, **NUMBER}, "the keys context, continuation, answer fit several kinds of task"),
        ({**CHOICE, "gold": 2}, "gold must be the right one's number, 0 to 1, not 2"),
        ({**CHOICE, "gold": -1}, "not -1"),
        ({**CHOICE, "gold": True}, "not True"),
        ({**CONTEXT, "gold": "0"}, "not '0'"),
        ({**CHOICE, "choices": ["a"]}, "choices must be a list of at least two texts, not ['a']"),
        ({**CHOICE, "choices": "ab"}, "choices must be a list of at least two texts, not 'ab'"),
        ({**CHOICE, "choices": ["a", ""]}, "choices must be text with something in it, not ''"),
        ({**CHOICE, "query": " "}, "query must be text with something in it, not ' '"),
        (
            {**CONTEXT, "context_options": ["a", 1]},
            "context_options must be text with something in it, not 1",
        ),
        ({**CONTEXT, "continuation": None}, "continuation must be text with something in it, not None"),
        ({**TEXT, "continuation": ""}, "continuation must be text"),
        (
            {**CHOICE, "query": "a\ud800"},
            "query is not text in UTF-8 (a lone surrogate, U+D800, at character 1)",
        ),
        (
            {**NUMBER, "answer": "Paris"},
            "the answer 'Paris' is no number; rows with context and answer are scored",
        ),
        ({**NUMBER, "answer": True}, "answer must be text"),
        ({**NUMBER, "chain_of_thought": 1}, "chain_of_thought must be text"),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, row: Row, said: str) -> None:
    path = write_rows(tmp_path / "t.jsonl", [row])
    with pytest.raises(ValueError, match="^") as raised:
        read_rows(path)
    assert str(raised.value).startswith(f"{path}:1: ")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([CHOICE, TEXT], ":2: the key 'query' is missing; every row needs query, choices, gold"),
        ([CHOICE, {**CHOICE, "gold": 5}], ":2: gold must be"),
        (
            [NUMBER, {**NUMBER, "chain_of_thought": "a"}],
            ":2: either every row has a chain_of_thought or none has",
        ),
        ([], " is empty; give a file with rows in it"),
    ],
)
def test_every_row_is_checked(tmp_path: Path, rows: list[Row], said: str) -> None:
    path = write_rows(tmp_path / "t.jsonl", rows)
    with pytest.raises(ValueError, match="^") as raised:
        read_rows(path)
    assert str(raised.value) == f"{path}{said}" or str(raised.value).startswith(f"{path}{said}")


def test_files_as_other_programs_write_them(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", [CHOICE, CHOICE])
    plain = read_rows(path)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_rows(path) == plain
    path.write_text(path.read_text(encoding="utf-8-sig"), encoding="utf-16")
    with pytest.raises(ValueError, match=r"t.jsonl begins as text in UTF-16 does"):
        read_rows(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no task file .*t.jsonl"):
        file_task(tmp_path / "t.jsonl", 1024)
