"""Accuracy on tasks, computed by lm-eval."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

from lm_eval import evaluator
from lm_eval.loggers.evaluation_tracker import GeneralConfigTracker
from lm_eval.tasks import TaskManager

from surgeon.quality.tasks_load import Seeds, Tasks
from surgeon.quality.tasks_model import TaskModel

BOOTSTRAP = 1000  # draws for the error of metrics that are no means; lm-eval's 100,000 take minutes for LAMBADA


@dataclass(frozen=True)
class TaskSettings:
    """How tasks are computed.

    Attributes:
        limit: rows of each task, from its start; None for all.
        batch_size: requests that are run together.
        chat: put prompts into the tokenizer's chat template, few-shot examples as turns.
        seeds: those the tasks were loaded with.
    """

    limit: int | None = None
    batch_size: int = 1
    chat: bool = False
    seeds: Seeds = field(default_factory=Seeds)

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
        ValueError: if a text cannot be scored with this model, or there is no chat template or no EOS where one is
            needed.
    """
    _check_tokenizer(lm.tokenizer, tasks, settings.chat)
    tracker = GeneralConfigTracker()
    template = None
    if settings.chat:
        template = lm.chat_template(settings.chat)
    tracker.log_experiment_args("hf", {"pretrained": name}, None, template, settings.chat)
    # lm-eval forks for its bootstrap, which a process with threads in it should not; it prints to stdout; and outside a
    # repository the git that it asks for a hash complains.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    seeds = settings.seeds
    with redirect_stdout(io.StringIO()), patch.object(evaluator, "get_git_commit_hash", return_value=None):
        results: Any = evaluator.simple_evaluate(
            model=lm,
            model_args={"pretrained": name},
            tasks=tasks.items,
            task_manager=TaskManager(include_defaults=False),  # every task has been found already
            batch_size=settings.batch_size,
            device=str(lm.device),
            limit=settings.limit,
            bootstrap_iters=BOOTSTRAP,
            log_samples=True,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
            random_seed=seeds.python,
            numpy_random_seed=seeds.numpy,
            torch_random_seed=seeds.torch,
            fewshot_random_seed=seeds.fewshot,
        )
    tracker.log_end_time()
    results["config"]["model"] = "hf"
    return {**results, **asdict(tracker)}


def _check_tokenizer(tokenizer: Any, tasks: Tasks, chat: bool) -> None:
    if chat and not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; leave the template out")
    if tokenizer.eos_token_id is None:
        if tokenizer.bos_token_id is None:
            raise ValueError("the tokenizer has neither BOS nor EOS, one of which lm-eval needs; set one in its files")
        for name, task in tasks.loaded["tasks"].items():
            if task.OUTPUT_TYPE == "generate_until":
                raise ValueError(f"task {name} generates text, which needs a tokenizer that has an EOS")
