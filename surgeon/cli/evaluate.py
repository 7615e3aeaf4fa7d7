"""`surgeon eval`: a model's quality on texts, and its accuracy on tasks, by lm-eval."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import DATA_HELP, ProgramOption, TextArguments, several


@dataclass(frozen=True)
class SubjectArguments:
    """What is measured on, in the user's words; a group of options (see grouped.py)."""

    tasks: Annotated[
        list[str] | None,
        several(
            "--tasks",
            help="Tasks: names of lm-eval's tasks and groups; paper (the "
            "nine of the Layer Parallelism paper); or paths: a .jsonl file (see below), a YAML file of lm-eval's, "
            "whose code is run, or a folder of those.",
        ),
    ] = None
    data: Annotated[str | None, typer.Option("--data", help="Perplexity, too. " + DATA_HELP)] = None
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="With --data: the model that the divergence is from. Default: for a recipe or --program, the model "
            "without it.",
        ),
    ] = None


@dataclass(frozen=True)
class TaskArguments:
    """How much of the tasks is asked, and how; a group of options (see grouped.py)."""

    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Few-shot examples for every task. Default: the task's own number.")
    ] = None
    limit: Annotated[int | None, typer.Option(help="Rows of each task, from its start. Default: all.")] = None
    batch_size: Annotated[int, typer.Option(help="Requests to run together.")] = 1
    seed: Annotated[
        int | None, typer.Option(help="Seed of the choice of few-shot examples. Default: lm-eval's own.")
    ] = None
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Put prompts into the tokenizer's chat template.")
    ] = False


@dataclass(frozen=True)
class ResultFiles:
    """What is written; a group of options (see grouped.py)."""

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for results_<time>.json (lm-eval's format), results_<time>.csv and text.json. Answers are "
            "kept in it as they come: killed, the same command goes on.",
        ),
    ] = None
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Write every row's prompts and answers, too (needs --output).")
    ] = False


@grouped
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="What to evaluate: a checkpoint folder, edited or not, a name on the Hugging Face hub, demo, or a "
            "recipe (.yaml), whose program is then applied to its model."
        ),
    ],
    *,
    on: SubjectArguments,
    text: TextArguments,
    asking: TaskArguments,
    files: ResultFiles,
    program: ProgramOption = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda (one GPU where the model fits, else all), or auto: cuda where there is one.")
    ] = "auto",
) -> None:
    """Measure perplexity and divergence on a text (--data), and accuracy on tasks with lm-eval (--tasks).

    Of a checkpoint, of a recipe (its model after the operations, without an export), or of any --program. Of one that
    is compared with another model also how well it would draft for that (--draft of generate and serve): the share of
    tokens that is accepted, greedy and sampled. A program over the model's own weights reads the model's keys and
    values of earlier tokens for that, as drafts do; what is compared by --against reads its own.

    The form of a .jsonl file follows from the keys of its rows: query, choices, gold (multiple choice);
    context_options, continuation, gold (one text after several contexts); context, continuation (LAMBADA); context,
    answer, and if there is one chain_of_thought (a number, as in GSM8K). Its few-shot examples are its other rows.
    """
    from surgeon.library.evaluate import evaluate as measure

    found = measure(
        model,
        on.data,
        tasks=on.tasks or (),
        program=program,
        against=on.against,
        **vars(text),
        **vars(asking),
        device=device,
        **vars(files),
    )
    print(found)
    for path in found.files:
        print(path)


evaluate.__name__ = "eval"  # the command's name, which as a function's would hide Python's own
