"""Task files: a .jsonl file becomes a task of lm-eval's, with prompts and metrics like lm-eval's own.

The keys of its rows say which of `FORMS` it is. Nothing is fetched, or written to the cache of `datasets`.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from surgeon.errors import show_value
from surgeon.quality.text_files import read_json_lines, require_utf8

Row = dict[str, Any]

SUFFIX = ".jsonl"
MOST_NEW_TOKENS = 256
_SPLIT = "test"
_VERSION = 1.0
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
    for number, row in read_json_lines(path):
        where = f"{path}:{number}"
        if not rows:
            fitting = [name for name, (keys, _) in FORMS.items() if set(keys) <= set(row)]
            if len(fitting) != 1:
                known = "; ".join(f"{', '.join(keys)} ({name})" for name, (keys, _) in FORMS.items())
                what = "fit no kind of task"
                if fitting:
                    what = "fit several kinds of task"
                raise ValueError(f"{where}: the keys {', '.join(row)} {what}; a row has one of: {known}")
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
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    form, rows = read_rows(path)
    config = FORMS[form][1] | {"task": path.stem, "test_split": _SPLIT, "fewshot_split": _SPLIT}
    config |= {"dataset_path": str(path), "metadata": {"version": _VERSION}}
    if form == "number":
        config["filter_list"] = [_STRICT, _FLEXIBLE] if "#### " in rows[0]["target"] else [_FLEXIBLE]
        config["generation_kwargs"] = {
            "until": [_QUESTION, "</s>", "<|im_end|>"],
            "do_sample": False,
            "temperature": 0.0,
            "max_gen_toks": max(1, min(MOST_NEW_TOKENS, positions // 2)),
        }
    splits = {_SPLIT: Dataset.from_list(rows)}
    task = ConfigurableTask(config=config | {"custom_dataset": lambda **_: splits})
    task.set_config("custom_dataset", None)  # results list the settings; code is none of them
    return task, hashlib.sha256(path.read_bytes()).hexdigest()
