"""Accuracy on tasks, computed by lm-eval."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from lm_eval import evaluator
from lm_eval.loggers.evaluation_tracker import GeneralConfigTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from surgeon.errors import show_value
from surgeon.processes.journal import Journal
from surgeon.progress import progress
from surgeon.quality.tasks_load import Tasks, seeds_of


class Answers(Journal):
    """A model's answers by request, in a journal or in memory alone.

    The file's name holds a hash of what the answers depend on, so that those of other models lie beside it. lm-eval's
    own cache would run equal requests again, and forget which ones were cut.

    Args:
        folder: made if it is not there; None to keep nothing.
        identity: what the answers depend on, as JSON values.

    Attributes:
        known: answers by their request's key.
        cut: keys of requests that exceed the model's positions, noted before their answers are added.

    Raises:
        ValueError, OSError: as `Journal`.
    """

    def __init__(self, folder: Path | None, identity: dict[str, Any]) -> None:
        self.known: dict[str, Any] = {}
        self.cut: set[str] = set()
        self._unwritten: list[tuple[str, Any, bool]] = []
        path = None
        if folder is not None:
            path = folder / f"answers-{_hash(identity)[:12]}.jsonl"
        super().__init__(path, "evaluation of this model")

    def add(self, key: str, value: Any) -> None:
        """Add an answer; the next `write` puts it into the file."""
        self.known[key] = value
        self._unwritten.append((key, value, key in self.cut))

    def write(self) -> None:
        """Write the added answers: a batch at a time, so that batches after a kill are the same."""
        self.append(*self._unwritten)
        self._unwritten.clear()

    def take(self, line: Any) -> None:
        key, value, cut = line
        self.known[key] = tuple(value) if isinstance(value, list) else value
        if cut:
            self.cut.add(key)


class TaskModel(HFLM):  # type: ignore[misc]
    """lm-eval's wrapper of a `transformers` model, with kept answers, progress, and errors for users.

    Attributes:
        asked: keys of all requests so far.

    Raises:
        ValueError: from its methods, if a text cannot be scored with this model.
    """

    def __init__(self, model: Any, tokenizer: Any, answers: Answers, batch_size: int) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        self.answers = answers
        self.asked: set[str] = set()

    @property
    def cut(self) -> int:
        """Number of requests that lost their beginning, exceeding the model's positions."""
        return len(self.answers.cut & self.asked)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:  # noqa: ARG002
        return self._ask("loglikelihood", "scoring", requests, super().loglikelihood)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:  # noqa: ARG002
        return self._ask("loglikelihood_rolling", "scoring", requests, super().loglikelihood_rolling)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:  # noqa: ARG002
        settings = [normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests]
        for request, how in zip(requests, settings, strict=True):
            if len(self.tok_encode(request.args[0])) > self.max_length - how["max_gen_toks"]:
                self.answers.cut.add(_hash(["generate_until", *request.args]))
        if any(how["do_sample"] for how in settings):  # equal requests have different answers then
            with progress("generating", len(requests), "requests") as advance:
                self.set_cache_hook(SimpleNamespace(add_partial=lambda *_: advance(1)))
                answers: list[Any] = super().generate_until(requests, disable_tqdm=True)
                return answers
        return self._ask("generate_until", "generating", requests, super().generate_until)

    def _ask(
        self, kind: str, doing: str, requests: list[Any], run: Callable[..., list[Any]]
    ) -> list[Any]:
        keys = [_hash([kind, *request.args]) for request in requests]
        self.asked.update(keys)
        missing = {
            key: request
            for key, request in zip(keys, requests, strict=True)
            if key not in self.answers.known
        }
        count = len(set(keys))
        answers = self.answers
        with progress(doing, count, "requests", count - len(missing)) as advance:
            # It knows nothing of this object, which keeps it.
            def note(kind: str, request: Any, answer: Any) -> None:
                answers.add(_hash([kind, *request]), answer)
                advance(1)

            self.set_cache_hook(SimpleNamespace(add_partial=note))  # lm-eval calls it with each answer
            try:
                if missing:
                    run(list(missing.values()), disable_tqdm=True)
            finally:
                self.answers.write()
        return [self.answers.known[key] for key in keys]

    def _loglikelihood_tokens(self, requests: list[Any], *arguments: Any, **options: Any) -> list[Any]:
        for texts, context, continuation in requests:
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
            if texts is not None and len(context) + len(continuation) > self.max_length + 1:
                self.answers.cut.add(_hash(["loglikelihood", *texts]))
        answers: list[Any] = super()._loglikelihood_tokens(requests, *arguments, **options)
        return answers

    def _model_call(self, *arguments: Any, **options: Any) -> torch.Tensor:
        self.answers.write()
        logits: torch.Tensor = super()._model_call(*arguments, **options)
        return logits

    def _model_generate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        self.answers.write()
        tokens: torch.Tensor = super()._model_generate(*arguments, **options)
        return tokens


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


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
    tracker = GeneralConfigTracker()
    template = None
    if settings.chat:
        template = lm.chat_template(settings.chat)
    tracker.log_experiment_args("hf", {"pretrained": name}, None, template, settings.chat)
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
            log_samples=True,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
            **seeds_of(settings.seed),
        )
    tracker.log_end_time()
    results["config"]["model"] = "hf"
    return {**results, **asdict(tracker)}
