"""Finding tasks: lm-eval's own, YAML files in its format, and .jsonl files (tasks_files.py)."""

from __future__ import annotations

import difflib
import fnmatch
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.group import Group
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from surgeon.checkpoint.config import without_retries
from surgeon.errors import did_you_mean, first_line
from surgeon.named import on_disk
from surgeon.progress import progress
from surgeon.quality.tasks_files import MOST_NEW_TOKENS, SUFFIX, file_task

YAML = (".yaml", ".yml")
_GROUP = re.compile(r"^group\s*:", re.MULTILINE)


# Several tasks under one name, each with its few-shot examples. Layer Parallelism, table 1: five for each task but
# IFEval, which lm-eval never gives any.
PRESETS = {
    "paper": dict.fromkeys(
        (
            *("mmlu", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa", "hellaswag"),
            *("gsm8k", "ifeval"),
        ),
        5,
    )
}


def seeds_of(seed: int | None) -> dict[str, int]:
    """Seed all generators alike, by default as lm-eval does: arguments of `lm_eval.simple_evaluate`."""
    names = ("numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    if seed is None:
        return {"random_seed": 0, **dict.fromkeys(names, 1234)}
    return dict.fromkeys(("random_seed", *names), seed)


@dataclass
class Tasks:
    """Loaded tasks.

    Attributes:
        items: requested tasks and groups, as `lm_eval.simple_evaluate` takes them.
        loaded: these with all tasks inside them, as `TaskManager.load` gives them.
        files: SHA-256 of each .jsonl file, by path.
        notes: for the user, one line each.
    """

    items: list[Any]
    loaded: dict[str, Any]
    files: dict[str, str]
    notes: list[str] = field(default_factory=list)


def load_tasks(
    names: list[str], positions: int, num_fewshot: int | None = None, seed: int | None = None
) -> Tasks:
    """Load tasks and their data.

    Args:
        names: lm-eval's tasks and groups (`*` stands for anything), names of `PRESETS`, or paths: .jsonl files,
            lm-eval's YAML files, folders of those. Code that YAML files name is run.
        positions: of the model.
        num_fewshot: for all tasks; by default each task's own number, or none.

    Raises:
        FileNotFoundError: if there is no such file, or a task's data cannot be had.
        ValueError: if a task is unknown, damaged, there twice, or cannot be computed here.
        ImportError: if a task needs a package that is not there.
    """
    seeds = seeds_of(seed)
    # Tasks shuffle as they are loaded.
    random.seed(seeds["random_seed"])
    np.random.seed(seeds["numpy_random_seed"])
    torch.manual_seed(seeds["torch_random_seed"])
    wanted: list[tuple[str, int | None]] = []
    for name in names:
        wanted += PRESETS.get(name, {name: None}).items()
    if not wanted:
        raise ValueError("no tasks are given; name some, such as piqa,arc_easy")
    files: dict[str, str] = {}
    known = cache(TaskManager)  # reading lm-eval's own list takes seconds
    items: list[tuple[Any, int | None]] = []
    with progress("loading tasks", len(wanted), "tasks") as advance:
        for name, shots in wanted:
            path = on_disk(name) or Path(name)
            if path.suffix.lower() == SUFFIX:
                task, files[name] = file_task(path, positions)
                items.append((task, shots))
            else:
                items += [(item, shots) for item in _find_items(name, path, known)]
            advance(1)
    seen: set[str] = set()
    for name in (task.task_name for item, _ in items for task in _list_tasks(item)):
        if name in seen:  # the results would hold only one of them
            raise ValueError(f"task {name} is there twice; name it once, or rename the file")
        seen.add(name)
    # A manager without tasks of its own: it only brings these into the form that `evaluate` takes.
    roots = [item for item, _ in items]
    tasks = Tasks(roots, dict(TaskManager(include_defaults=False).load(roots)), files)
    for item, shots in items:
        for task in _list_tasks(item):
            _set_shots(task, shots if num_fewshot is None else num_fewshot, tasks)
            task.set_fewshot_seed(seed=seeds["fewshot_random_seed"])
            _check_task(task, positions)
    return tasks


def _find_items(name: str, path: Path, known: Callable[[], TaskManager]) -> list[Any]:
    """Build the tasks and groups of a name, a YAML file or a folder; `known` gives lm-eval's own."""
    if path.suffix.lower() in YAML:
        if not path.is_file():
            raise FileNotFoundError(f"there is no task file {path}")
        if not _GROUP.search(path.read_text(encoding="utf-8", errors="replace")):
            return _build(TaskManager(include_defaults=False), str(path))
        manager = _make_manager(path.parent)  # a group's tasks may lie in files beside it
        places = {group: manager.task_index[group].yaml_path for group in manager.all_groups}
        named = [group for group, place in places.items() if place is not None and place.samefile(path)]
        return [item for group in named or [str(path)] for item in _build(manager, group)]
    if "/" in name or (path.is_dir() and name not in known().all_tasks):
        if not path.is_dir():
            raise FileNotFoundError(f"there is no task file or folder {path}")
        inside = TaskManager(include_defaults=False, include_path=str(path))
        if not inside.all_tasks:
            raise ValueError(
                f"{path} holds no task of lm-eval's (a YAML file with the key task or group)"
            )
        # All groups, and the tasks that are in none of them.
        groups = [item for group in inside.all_groups for item in _build(_make_manager(path), group)]
        members = {task.task_name for group in groups for task in group.get_all_tasks()}
        within = {group.name for outer in groups for group in outer.get_all_groups()}
        single = [one for one in inside.all_subtasks if one not in members]
        return [
            *(group for group in groups if group.name not in within),
            *(item for one in single for item in _build(inside, one)),
        ]
    manager = known()
    matching = fnmatch.filter(manager.all_subtasks, name) if "*" in name else [name]
    if not matching or matching[0] not in manager.all_tasks:
        near = difflib.get_close_matches(name, [*PRESETS, *manager.all_tasks], n=1)
        hint = "`lm-eval ls tasks` lists all"
        if near:
            hint = did_you_mean(name, near)
        raise ValueError(
            f"unknown task {name!r}; {hint} (a file of your own is given by its path: {name}{SUFFIX})"
        )
    return [item for one in matching for item in _build(manager, one)]


def _make_manager(folder: Path) -> TaskManager:
    """A manager of the tasks in a folder of YAML files, and lm-eval's if a group there has some of those."""
    inside = TaskManager(include_defaults=False, include_path=str(folder))
    named = {
        name for group in inside.all_groups for name in _list_members(inside.task_index[group].cfg or {})
    }
    if named <= set(inside.all_tasks):
        return inside
    return TaskManager(include_path=str(folder))


def _list_members(group: dict[str, Any]) -> Iterator[str]:
    listed = group.get("task")
    for item in listed if isinstance(listed, list) else [listed]:
        if isinstance(item, dict):
            yield from _list_members(item)
        elif item is not None:
            yield str(item)


def _build(manager: TaskManager, name: str) -> list[Any]:
    try:
        with without_retries():
            built = manager.load([name])
    except ImportError as error:
        raise ImportError(
            f"task {name} needs a package that is not installed ({_shorten(error)}); "
            f"pip install 'lm-eval[{name}]' may bring it"
        ) from error
    except OSError as error:
        raise FileNotFoundError(
            f"the data of task {name} cannot be had ({_shorten(error)}); connect to the network, or give the task as a "
            f"local file, {Path(name).stem}{SUFFIX}"
        ) from error
    except Exception as error:  # whatever is wrong with a task's settings
        raise ValueError(
            f"task {name} cannot be set up ({type(error).__name__}: {_shorten(error)})"
        ) from error
    groups = list(built["groups"].values())  # the one that was asked for first
    return groups[:1] or list(built["tasks"].values())


def _list_tasks(item: Any) -> list[Any]:
    if isinstance(item, Group):
        return list(item.get_all_tasks())
    return [item]


def _set_shots(task: Any, wanted: int | None, tasks: Tasks) -> None:
    """Set the number of few-shot examples; a task with 0 in its settings keeps it, as in lm-eval."""
    own = task.get_config("num_fewshot")
    if wanted is None or own == 0:
        if wanted and own == 0:
            tasks.notes.append(f"{task.task_name} is defined without few-shot examples and gets none")
        task.set_config(key="num_fewshot", value=own or 0)
        return
    task.set_config(key="num_fewshot", value=wanted)
    source = str(task.get_config("dataset_path"))
    if source in tasks.files:
        rows = len({repr(row) for row in task.eval_docs})
        if rows <= wanted:
            raise ValueError(
                f"{source} has {rows} different rows: too few for {wanted} examples and one question"
            )


def _check_task(task: Any, positions: int) -> None:
    name = task.task_name
    if getattr(task, "UNSAFE_CODE", False):
        raise ValueError(
            f"task {name} runs code that the model writes, which surgeon does not do; use lm-eval for it"
        )
    if getattr(task, "MULTIMODAL", False):
        raise ValueError(f"task {name} needs images or sound; only tasks of text can be computed")
    if task.OUTPUT_TYPE == "generate_until":
        settings = task.get_config("generation_kwargs") or {}
        longest = normalize_gen_kwargs(settings, MOST_NEW_TOKENS)["max_gen_toks"]
        if longest >= positions:
            raise ValueError(
                f"task {name} generates up to {longest} tokens, but the model has only {positions} positions; "
                "leave the task out, or use a model that has more"
            )


def _shorten(error: BaseException) -> str:
    return first_line(error).strip("\"'")[:200]
