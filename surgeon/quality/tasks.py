"""Accuracy on tasks, computed by lm-eval: its own tasks, YAML files in its format, and .jsonl files.

A .jsonl file becomes a task of lm-eval's, with prompts and metrics like lm-eval's own. The keys of its rows say which
of `FORMS` it is. Nothing is fetched, or written to the cache of `datasets`.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import io
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from datasets import Dataset
from lm_eval import evaluator
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from surgeon.checkpoint.config import without_retries
from surgeon.named import on_disk
from surgeon.processes.journal import Journal
from surgeon.progress import progress
from surgeon.quality.sources import read_json_lines, require_utf8
from surgeon.words import did_you_mean, first_line, show_value

Row = dict[str, Any]

SUFFIX = ".jsonl"
MOST_NEW_TOKENS = 256
_NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(\.[0-9]+)?")
_QUESTION = "Question:"
_ANSWER = "Answer:"


def _average(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


def _check_text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {key} must be text with something in it, not {show_value(value)}")
    return require_utf8(value, f"{where}: {key}")


# The patterns are those of lm-eval's gsm8k, so that numbers compare.
_FLEXIBLE = {
    "name": "flexible-extract",
    "filter": [
        {"function": "regex", "group_select": -1, "regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)"},
        {"function": "take_first"},
    ],
}
_STRICT = {
    "name": "strict-match",
    "filter": [
        {"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"},
        {"function": "take_first"},
    ],
}
_EXACT = {
    **_average("exact_match")[0],
    "ignore_case": True,
    "ignore_punctuation": False,
    "regexes_to_ignore": [",", r"\$", r"(?s).*#### ", r"\.$"],
}

# Kinds of tasks: the keys of every row, and lm-eval's settings on what `_convert_row` makes of it.
FORMS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "multiple choice": (
        ("query", "choices", "gold"),
        {
            "output_type": "multiple_choice",
            "doc_to_text": "prompt",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "metric_list": _average("acc", "acc_norm"),
        },
    ),
    "one continuation of several contexts": (
        ("context_options", "continuation", "gold"),
        {
            "output_type": "multiple_choice",
            "doc_to_text": "gold",  # a number tells lm-eval that the choices are contexts
            "doc_to_choice": "context_options",
            "doc_to_target": "continuation",
            "metric_list": _average("acc"),
        },
    ),
    "continuation": (
        ("context", "continuation"),
        {
            "output_type": "loglikelihood",
            "doc_to_text": "prompt",
            "doc_to_target": "target",
            "target_delimiter": "",  # the target begins with its space
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                *_average("acc"),
            ],
        },
    ),
    "number": (
        ("context", "answer"),
        {
            "output_type": "generate_until",
            "doc_to_text": "prompt",
            "doc_to_target": "target",
            "metric_list": [_EXACT],
        },
    ),
}


def _check_row(form: str, row: Row, where: str) -> Row:
    """Read a row's keys that are texts, lists of these, or the number of one."""
    found = dict[str, Any]()
    for key in FORMS[form][0]:
        value = row[key]
        if key == "gold":
            several = len(found.get("choices") or found["context_options"])
            if type(value) is not int or not 0 <= value < several:
                raise ValueError(
                    f"{where}: gold must be the right one's number, 0 to {several - 1}, not {show_value(value)}"
                )
        elif key in ("choices", "context_options"):
            if not isinstance(value, list) or len(value) < 2:
                raise ValueError(
                    f"{where}: {key} must be a list of at least two texts, not {show_value(value)}"
                )
            for text in value:
                _check_text(text, key, where)
        else:
            if key == "answer" and isinstance(value, int | float) and not isinstance(value, bool):
                value = str(value)
            _check_text(value, key, where)
        found[key] = value
    return found


def _convert_row(form: str, row: Row, where: str) -> Row:
    """Convert a row for lm-eval."""
    found = _check_row(form, row, where)
    if "query" in found:
        prompt = found["query"].rstrip()
        # To a question that says so lm-eval's tasks add the word for the answer.
        if prompt.startswith(_QUESTION) and not prompt.endswith(_ANSWER):
            prompt = f"{prompt}\n{_ANSWER}"
        return {"prompt": prompt, "choices": found["choices"], "gold": found["gold"]}
    if "context_options" in found:
        contexts = [context.rstrip() for context in found["context_options"]]
        return found | {"context_options": contexts, "continuation": found["continuation"].lstrip()}
    if "continuation" in found:
        return {
            "prompt": found["context"].rstrip(),
            "target": f" {found['continuation'].lstrip()}",
        }
    answer = target = found["answer"].strip()
    if not _NUMBER.fullmatch(answer):
        raise ValueError(
            f"{where}: the answer {show_value(answer)} is no number; rows with context and answer are scored on the "
            "last number written (for other answers give query, choices and gold)"
        )
    if "chain_of_thought" in row:
        thought = _check_text(row["chain_of_thought"], "chain_of_thought", where)
        target = f"{thought.strip()}\n#### {answer}"
    prompt = f"{_QUESTION} {found['context'].strip()}\n{_ANSWER}"
    return {"prompt": prompt, "target": target, "answer": answer}


def read_rows(path: Path) -> tuple[str, list[Row]]:
    """Read and check the rows of a task file, and find its kind."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no task file {path}")
    rows: list[Row] = []
    form = ""
    reasoned = False
    for where, row in read_json_lines(path):
        if not rows:
            fitting = [name for name, (keys, _) in FORMS.items() if set(keys) <= set(row)]
            if len(fitting) != 1:
                forms = "; ".join(f"{', '.join(keys)} ({name})" for name, (keys, _) in FORMS.items())
                what = "several kinds" if fitting else "no kind"
                raise ValueError(
                    f"{where}: the keys {', '.join(row)} fit {what} of task; a row has one of: {forms}"
                )
            form = fitting[0]
            reasoned = "chain_of_thought" in row
        keys = FORMS[form][0]
        missing = [key for key in keys if key not in row]
        if form == "number" and ("chain_of_thought" in row) != reasoned:
            raise ValueError(f"{where}: either every row has a chain_of_thought or none has")
        if missing:
            raise ValueError(
                f"{where}: the key {missing[0]!r} is missing; every row needs {', '.join(keys)}"
            )
        rows.append(_convert_row(form, row, where))
    if not rows:
        raise ValueError(f"{path} is empty; give a file with rows in it")
    return form, rows


def file_task(path: Path, positions: int) -> tuple[Any, str]:
    """Make a task for lm-eval of a file; returns it with the file's SHA-256.

    Few-shot examples are other rows of the file, drawn by lm-eval's seed.

    Args:
        positions: of the model; generated text takes half of them at most.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a row is damaged or not like the others, naming file and line.
    """
    form, rows = read_rows(path)
    config = FORMS[form][1] | {"task": path.stem, "test_split": "test", "fewshot_split": "test"}
    config |= {"dataset_path": str(path), "metadata": {"version": 1.0}}
    if form == "number":
        config["filter_list"] = [_STRICT, _FLEXIBLE] if "#### " in rows[0]["target"] else [_FLEXIBLE]
        config["generation_kwargs"] = {
            "until": [_QUESTION, "</s>", "<|im_end|>"],
            "do_sample": False,
            "temperature": 0.0,
            "max_gen_toks": max(1, min(MOST_NEW_TOKENS, positions // 2)),
        }
    splits = {"test": Dataset.from_list(rows)}
    task = ConfigurableTask(config=config | {"custom_dataset": lambda **_: splits})
    task.set_config("custom_dataset", None)  # results list the settings; code is none of them
    return task, hashlib.sha256(path.read_bytes()).hexdigest()


YAML = (".yaml", ".yml")

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
    open_manager = cache(TaskManager)  # reading lm-eval's own list takes seconds
    items: list[tuple[Any, int | None]] = []
    with progress("loading tasks", len(wanted), "tasks") as advance:
        for name, shots in wanted:
            path = on_disk(name) or Path(name)
            if path.suffix.lower() == SUFFIX:
                task, files[name] = file_task(path, positions)
                items.append((task, shots))
            else:
                items += [(item, shots) for item in _find_items(name, path, open_manager)]
            advance(1)
    every = [
        (task, shots)
        for item, shots in items
        for task in (item.get_all_tasks() if isinstance(item, Group) else [item])
    ]
    names = [task.task_name for task, _ in every]
    twice = [name for name in names if names.count(name) > 1]
    if twice:  # the results would hold only one of them
        raise ValueError(f"task {twice[0]} is there twice; name it once, or rename the file")
    # A manager without tasks of its own: it only brings these into the form that `evaluate` takes.
    roots = [item for item, _ in items]
    tasks = Tasks(roots, dict(TaskManager(include_defaults=False).load(roots)), files)
    for task, preset in every:
        asked = preset if num_fewshot is None else num_fewshot
        own = task.get_config("num_fewshot")
        shots = own or 0
        if asked and own == 0:  # which it keeps, as in lm-eval
            tasks.notes.append(f"{task.task_name} is defined without few-shot examples and gets none")
        elif asked is not None and own != 0:
            shots = asked
            source = str(task.get_config("dataset_path"))
            if source in files and (rows := len({repr(row) for row in task.eval_docs})) <= asked:
                raise ValueError(
                    f"{source} has {rows} different rows: too few for {asked} examples and one question"
                )
        task.set_config(key="num_fewshot", value=shots)
        _check_task(task, positions)
    return tasks


def _find_items(name: str, path: Path, open_manager: Callable[[], TaskManager]) -> list[Any]:
    """Build the tasks and groups of a name, a YAML file or a folder; `open_manager` gives lm-eval's own."""
    is_file = path.suffix.lower() in YAML
    if path.is_file() and not is_file and ("/" in name or name not in open_manager().all_tasks):
        raise ValueError(
            f"{path} is no file of tasks; those are {SUFFIX} files of rows, and YAML files of lm-eval's (.yaml)"
        )
    if not (is_file or "/" in name or (path.is_dir() and name not in open_manager().all_tasks)):
        manager = open_manager()
        names = fnmatch.filter(manager.all_subtasks, name) if "*" in name else [name]
        if not names or names[0] not in manager.all_tasks:
            near = difflib.get_close_matches(name, [*PRESETS, *manager.all_tasks], n=1)
            hint = "`lm-eval ls tasks` lists all"
            if near:
                hint = did_you_mean(name, near)
            raise ValueError(
                f"unknown task {name!r}; {hint} (a file of your own is given by its path: {name}{SUFFIX})"
            )
        return [item for one in names for item in _build(manager, one, one)]
    if not (path.is_file() if is_file else path.is_dir()):
        raise FileNotFoundError(f"there is no task file{'' if is_file else ' or folder'} {path}")
    folder = path.parent if is_file else path  # a group's tasks may lie in files beside it
    manager = TaskManager(include_defaults=False, include_path=str(folder))
    index = manager.task_index
    names = [*manager.all_groups, *manager.all_subtasks]
    if is_file:
        names = [one for one in names if path.samefile(index[one].yaml_path)]
    members = {
        member
        for one in names
        if one in manager.all_groups
        for member in _list_members(index[one].cfg or {})
    }
    if not members <= index.keys():
        manager = TaskManager(include_path=str(folder))
    # All groups, and the tasks that are in none of them, by their names or tags.
    names = [one for one in names if members.isdisjoint({one, *index[one].tags})]
    if not names and not is_file:
        raise ValueError(
            f"{path} holds no task of lm-eval's (a YAML file with the key task or group); name {SUFFIX} files each"
        )
    # What is wrong with a file keeps it out of the list, and is said as it is built.
    return [item for one in names or [str(path)] for item in _build(manager, one, name)]


def _list_members(group: dict[str, Any]) -> Iterator[str]:
    listed = group.get("task")
    for item in listed if isinstance(listed, list) else [listed]:
        if isinstance(item, dict):
            yield from _list_members(item)
        elif item is not None:
            yield str(item)


def _build(manager: TaskManager, name: str, given: str) -> list[Any]:
    """Build a task or a group, or the tasks of a tag; errors call it as it was given."""
    try:
        with without_retries():
            built = manager.load([name])
    except ImportError as error:
        raise ImportError(
            f"task {given} needs a package that is not installed ({_shorten(error)}); "
            f"pip install 'lm-eval[{given}]' may bring it"
        ) from error
    except OSError as error:
        raise FileNotFoundError(
            f"the data of task {given} cannot be had ({_shorten(error)}); connect to the network, or give the task as "
            f"a local file, {Path(given).stem}{SUFFIX}"
        ) from error
    except Exception as error:  # whatever is wrong with a task's settings
        raise ValueError(
            f"task {given} cannot be set up ({type(error).__name__}: {_shorten(error)})"
        ) from error
    groups = list(built["groups"].values())  # the one that was asked for first
    return groups[:1] or list(built["tasks"].values())


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


class Answers(Journal):
    """A model's answers by request, in a journal or in memory alone.

    The file's name holds a hash of what the answers depend on, so that those of other models lie beside it. lm-eval's
    own cache would run equal requests again, and knows no batches.

    Args:
        folder: made if it is not there; None to keep nothing.
        identity: what the answers depend on, as JSON values.

    Attributes:
        known: answers by their request's key.

    Raises:
        ValueError, OSError: as `Journal`.
    """

    def __init__(self, folder: Path | None, identity: dict[str, Any]) -> None:
        self.known: dict[str, Any] = {}
        self._unwritten: dict[str, Any] = {}
        path = None
        if folder is not None:
            path = folder / f"answers-{_hash(identity)[:12]}.jsonl"
        super().__init__(path, "evaluation of this model")

    def add(self, key: str, value: Any) -> None:
        """Add an answer; the next `write` puts it into the file."""
        self.known[key] = self._unwritten[key] = value

    def write(self) -> None:
        """Write the added answers: a batch at a time, so that batches after a kill are the same."""
        if self._unwritten:
            self.append(*self._unwritten.items())
            self._unwritten.clear()

    def take(self, line: Any) -> None:
        key, value, *_ = line  # versions before 0.3 said which requests were cut
        self.known[key] = tuple(value) if isinstance(value, list) else value


class TaskModel(HFLM):  # type: ignore[misc]
    """lm-eval's wrapper of a `transformers` model, with kept answers, progress, and errors for users.

    Attributes:
        asked: keys of all requests so far.
        cut: number of those that lost their beginning, exceeding the model's positions.

    Raises:
        ValueError: from its methods, if a text cannot be scored with this model.
    """

    def __init__(self, model: Any, tokenizer: Any, answers: Answers, batch_size: int) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        self.answers = answers
        self.asked: set[str] = set()
        self.cut = 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:  # noqa: ARG002
        room = repeat(self.max_length + 1.0, len(requests))  # the last token is only predicted
        return self._ask("loglikelihood", requests, room, super().loglikelihood)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:  # noqa: ARG002
        room = repeat(math.inf, len(requests))  # lm-eval cuts such texts into windows
        return self._ask("loglikelihood_rolling", requests, room, super().loglikelihood_rolling)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:  # noqa: ARG002
        settings = [normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests]
        if any(how["do_sample"] for how in settings):  # equal requests have different answers then
            with progress("generating", len(requests), "requests") as advance:
                self.set_cache_hook(SimpleNamespace(add_partial=lambda *_: advance(1)))
                answers: list[Any] = super().generate_until(requests, disable_tqdm=True)
                return answers
        room = [self.max_length - how["max_gen_toks"] for how in settings]
        return self._ask("generate_until", requests, room, super().generate_until)

    def _ask(
        self, kind: str, requests: list[Any], room: Iterable[float], run: Callable[..., list[Any]]
    ) -> list[Any]:
        """Find the answers that are known, and run the model for the others.

        Args:
            room: tokens that each request's texts have at most without losing their beginning.
        """
        answers = self.answers
        keys = [_hash([kind, *request.args]) for request in requests]
        missing: dict[str, Any] = {}
        for key, request, most in zip(keys, requests, room, strict=True):
            if key not in self.asked:
                text = "".join(part for part in request.args if isinstance(part, str))
                # A token is a byte at least, but for those around a text: most need not be tokenized for this.
                if len(text.encode()) + _AROUND > most:
                    self.cut += len(self.tok_encode(text)) > most
                self.asked.add(key)
            if key not in answers.known:
                missing[key] = request
        count = len(set(keys))
        doing = "generating" if kind == "generate_until" else "scoring"
        with progress(doing, count, "requests", count - len(missing)) as advance:
            # It knows nothing of this object, which keeps it.
            def note(kind: str, request: Any, answer: Any) -> None:
                answers.add(_hash([kind, *request]), answer)
                advance(1)

            self.set_cache_hook(SimpleNamespace(add_partial=note))  # lm-eval calls it with each answer
            before_passes = self.model.register_forward_pre_hook(lambda *_: answers.write())
            try:
                if missing:
                    run(list(missing.values()), disable_tqdm=True)
            finally:
                before_passes.remove()
                answers.write()
        return [answers.known[key] for key in keys]

    def _loglikelihood_tokens(self, requests: list[Any], *arguments: Any, **options: Any) -> list[Any]:
        for texts, _, continuation in requests:
            scored = f"the text to be scored {show_value(texts[1]) if texts is not None else 'a text'}"
            if not continuation:
                raise ValueError(
                    f"{scored} has no tokens of its own: the tokenizer joins it with the text before"
                )
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"{scored} has {len(continuation)} tokens, and the model only {self.max_length} "
                    "positions"
                )
        answers: list[Any] = super()._loglikelihood_tokens(requests, *arguments, **options)
        return answers


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


_AROUND = 8  # special tokens around a text, at most

# Draws for the error of metrics that are no means; lm-eval's 100,000 take minutes for LAMBADA.
BOOTSTRAP = 1000


@dataclass(frozen=True)
class TaskSettings:
    """Settings of computing tasks.

    Attributes:
        limit: rows of each task, from its start; None for all.
        batch_size: requests that are run together.
        chat: put prompts into the tokenizer's chat template, few-shot examples as turns.
        seed: that the tasks were loaded with.
    """

    limit: int | None = None
    batch_size: int = 1
    chat: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1 row of each task, not {self.limit}")
        if self.batch_size < 1:
            raise ValueError(f"batch size must be at least 1, not {self.batch_size}")


def run_tasks(lm: TaskModel, tasks: Tasks, name: str, settings: TaskSettings) -> dict[str, Any]:
    """Compute tasks; returns lm-eval's results, with the samples under "samples".

    Args:
        name: of the model, for the results.

    Raises:
        ValueError: if a text cannot be scored with this model, or a chat template or an EOS that is needed is missing.
    """
    tokenizer = lm.tokenizer
    if settings.chat and not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; leave the template out")
    if tokenizer.eos_token_id is None:
        if tokenizer.bos_token_id is None:
            raise ValueError(
                "the tokenizer has neither BOS nor EOS, one of which lm-eval needs; set one in its files"
            )
        for task_name, task in tasks.loaded["tasks"].items():
            if task.OUTPUT_TYPE == "generate_until":
                raise ValueError(
                    f"task {task_name} generates text, which needs a tokenizer that has an EOS"
                )
    tracker = EvaluationTracker()
    # lm-eval forks for its bootstrap, which a process with threads in it should not; it prints to stdout; and outside a
    # repository the git that it asks for a hash complains.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with (
        redirect_stdout(io.StringIO()),
        patch.object(evaluator, "get_git_commit_hash", return_value=None),
    ):
        results: Any = evaluator.simple_evaluate(
            model=lm,
            model_args={"pretrained": name},
            tasks=tasks.items,
            task_manager=TaskManager(include_defaults=False),  # every task has been found already
            batch_size=settings.batch_size,
            device=str(lm.device),
            limit=settings.limit,
            bootstrap_iters=BOOTSTRAP,
            evaluation_tracker=tracker,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
            **seeds_of(settings.seed),
        )
    settings_used = tracker.general_config_tracker
    settings_used.log_end_time()
    results["config"]["model"] = "hf"
    return {**results, **asdict(settings_used), "model_source": "hf"}
