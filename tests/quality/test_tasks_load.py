"""Finding tasks by name and by path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.group import Group
from lm_eval.tasks import TaskManager

from surgeon.named import split_values
from surgeon.quality import tasks as tasks_module
from surgeon.quality.tasks import PRESETS, Tasks, load_tasks, seeds_of
from tests.quality.tasks_helpers import CHOICES, NUMBERS, write_rows

CODE = """\
from datasets import Dataset

def rows(**_):
    return {"test": Dataset.from_list([{"text": "a", "target": 1}, {"text": "b", "target": 0}])}
"""
TASK = """\
task: {name}
custom_dataset: !function code.rows
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: ["x", "y"]
doc_to_target: target
"""
GROUP = """\
group: both
task: [first, second]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three tasks of lm-eval's kind, two of them in a group."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "code.py").write_text(CODE)
    for name in ("first", "second", "third"):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name))
    (folder / "both.yaml").write_text(GROUP)
    return folder


@pytest.fixture
def known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make that folder stand in for lm-eval's own tasks, whose list takes seconds to read; counts the readings."""
    read = []

    def manager(include_path: str | None = None, include_defaults: bool = True) -> TaskManager:
        read.extend([1] * include_defaults)
        own = [str(folder)] * include_defaults
        return TaskManager(include_path=[*own, *filter(None, [include_path])], include_defaults=False)

    monkeypatch.setattr(tasks_module, "TaskManager", manager)
    return read


def names_of(tasks: Tasks) -> list[str]:
    """Groups first, then tasks by themselves."""
    groups = [item.name for item in tasks.items if isinstance(item, Group)]
    return groups + [item.task_name for item in tasks.items if not isinstance(item, Group)]


def load(*names: object, **options: Any) -> Tasks:
    return load_tasks([str(name) for name in names], 128, **options)


def test_names_with_commas_between(tmp_path: Path) -> None:
    odd = tmp_path / "a,b.jsonl"
    odd.touch()
    assert split_values(["piqa, arc_easy", str(odd), "x,"]) == ["piqa", "arc_easy", str(odd), "x"]


def test_names_patterns_and_groups(known: list[int]) -> None:
    tasks = load("third", "both")
    assert set(tasks.loaded["tasks"]) == {"first", "second", "third"}
    assert names_of(tasks) == ["both", "third"]
    assert names_of(load("*ir*")) == ["first", "third"]
    assert len(known) == 2


def test_paths_need_no_list_of_tasks(folder: Path, known: list[int], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "c.JSONL", CHOICES)
    tasks = load(folder / "third.yaml", path)
    assert names_of(tasks) == ["third", "c"]
    assert list(tasks.files) == [str(path)]
    assert set(load(folder / "both.yaml").loaded["tasks"]) == {"first", "second"}
    whole = load(folder)
    assert names_of(whole) == ["both", "third"]
    assert whole.loaded["group_map"] == {"both": ["first", "second"]}
    assert not known


def test_a_group_may_have_lm_evals_own_tasks(tmp_path: Path, known: list[int]) -> None:
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / "mixed.yaml"
    path.write_text("group: mixed\ntask:\n  - first\n  - group: inner\n    task: [third]\n")
    assert (
        set(load(path).loaded["tasks"]) == set(load(path.parent).loaded["tasks"]) == {"first", "third"}
    )
    assert known


def test_unknown_names(known: list[int]) -> None:
    with pytest.raises(
        ValueError, match=r"unknown task 'thrid'; did you mean 'third'\? \(.* its path: thrid.jsonl\)"
    ):
        load("thrid")
    with pytest.raises(ValueError, match="unknown task 'papre'; did you mean 'paper'"):
        load("papre")
    with pytest.raises(ValueError, match="unknown task 'zzz'; `lm-eval ls tasks` lists all"):
        load("zzz")
    with pytest.raises(ValueError, match="no tasks are given"):
        load()
    assert known


def test_missing_and_damaged_files(tmp_path: Path, folder: Path) -> None:
    for name in ("a.yaml", "a.jsonl", "a/b"):
        with pytest.raises(FileNotFoundError, match="there is no task file"):
            load(tmp_path / name)
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(
        ValueError, match=r"a.txt is no file of tasks; those are .jsonl files of rows, and YAML"
    ):
        load(tmp_path / "a.txt")
    (tmp_path / "a.yaml").write_text("task: [")
    with pytest.raises(ValueError, match=r"a.yaml cannot be set up \(ParserError"):
        load(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("task: a\nno_such_setting: 1\n")
    with pytest.raises(ValueError, match=r"a.yaml cannot be set up \(TypeError: .*no_such_setting"):
        load(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("text: a\n")
    with pytest.raises(ValueError, match=r"a.yaml cannot be set up"):
        load(tmp_path / "a.yaml")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no task of lm-eval's"):
        load(tmp_path / "empty")
    (folder / "code.py").write_text("import no_such_package")
    with pytest.raises(
        ImportError, match=r"needs a package that is not installed \(No module named 'no_such_package"
    ):
        load(folder / "third.yaml")


def test_data_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("task: a\ndataset_path: nobody/nothing\ntest_split: test\n")
    with pytest.raises(
        FileNotFoundError, match=r"the data of task .*a.yaml cannot be had .*local file, a.jsonl"
    ):
        load(tmp_path / "a.yaml")


def test_the_same_name_twice(tmp_path: Path, folder: Path) -> None:
    path = write_rows(tmp_path / "third.jsonl", CHOICES)
    with pytest.raises(ValueError, match="task third is there twice; name it once, or rename the file"):
        load(path, folder / "third.yaml")
    with pytest.raises(ValueError, match="task third is there twice"):
        load(path, path)


def shots(tasks: Tasks) -> dict[str, int]:
    return {name: task.get_config("num_fewshot") for name, task in tasks.loaded["tasks"].items()}


def test_numbers_of_few_shot_examples(
    folder: Path, tmp_path: Path, known: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "second.yaml").write_text(TASK.format(name="second") + "num_fewshot: 0\n")
    (folder / "third.yaml").write_text(TASK.format(name="third") + "num_fewshot: 1\n")
    path = write_rows(tmp_path / "c.jsonl", CHOICES)
    assert shots(load("first", "second", "third", path)) == {"first": 0, "second": 0, "third": 1, "c": 0}
    tasks = load("first", "second", "third", path, num_fewshot=2)
    assert shots(tasks) == {"first": 2, "second": 0, "third": 2, "c": 2}
    assert tasks.notes == ["second is defined without few-shot examples and gets none"]
    monkeypatch.setitem(PRESETS, "paper", {"first": 5, "second": 5})
    assert shots(load("paper", "third")) == {"first": 5, "second": 0, "third": 1}
    assert shots(load("paper", num_fewshot=1)) == {"first": 1, "second": 0}
    with pytest.raises(
        ValueError, match="c.jsonl has 4 different rows: too few for 4 examples and one question"
    ):
        load(path, num_fewshot=4)
    write_rows(path, [*CHOICES[:2], *CHOICES[:2]])
    with pytest.raises(ValueError, match="2 different rows"):
        load(path, num_fewshot=2)
    assert known


@pytest.mark.long
@pytest.mark.thorough
def test_the_papers_tasks_are_lm_evals() -> None:
    """Reads lm-eval's own list, once."""
    manager = TaskManager()
    (preset,) = PRESETS.values()
    assert len(preset) == 9
    assert set(preset) <= set(manager.all_tasks)


def test_what_cannot_be_computed_here(folder: Path, tmp_path: Path) -> None:
    (folder / "third.yaml").write_text(TASK.format(name="third") + "unsafe_code: true\n")
    with pytest.raises(ValueError, match="task third runs code that the model writes"):
        load(folder / "third.yaml")
    (folder / "third.yaml").write_text(TASK.format(name="third") + "doc_to_image: [text]\n")
    with pytest.raises(ValueError, match="task third needs images or sound"):
        load(folder / "third.yaml")
    long = "generation_kwargs: {max_gen_toks: 128, until: []}\n"
    text = TASK.format(name="third").replace("multiple_choice", "generate_until")
    (folder / "third.yaml").write_text(text + long)
    with pytest.raises(
        ValueError, match="third generates up to 128 tokens, but the model has only 128 positions"
    ):
        load(folder / "third.yaml")
    # Generates as much as there is room for.
    assert names_of(load(write_rows(tmp_path / "g.jsonl", NUMBERS))) == ["g"]


def test_seeds() -> None:
    assert [*seeds_of(None).values()] == [0, 1234, 1234, 1234]
    assert [*seeds_of(7).values()] == [7, 7, 7, 7]
