"""`surgeon eval`: a model's accuracy on tasks, by lm-eval."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="What to evaluate: a checkpoint folder, edited or not, a name on the Hugging Face hub, demo, or a "
            "recipe (.yaml), whose program is then applied to its model.",
            show_default=False,
        ),
    ],
    tasks: Annotated[
        list[str],
        typer.Option(
            "--tasks",
            help="Tasks, with commas between or the option repeated: names of lm-eval's tasks and groups; paper (the "
            "nine of the Layer Parallelism paper); or paths: a .jsonl file (see below), a YAML file of lm-eval's, "
            "whose code is run, or a folder of those.",
            show_default=False,
        ),
    ],
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            min=0, help="Few-shot examples for every task. Default: the task's own number.", show_default=False
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Rows of each task, from its start. Default: all.", show_default=False)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Requests to run together.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for results_<time>.json (lm-eval's format) and results_<time>.csv. Answers are kept in it as "
            "they come: killed, the same command goes on.",
            show_default=False,
        ),
    ] = None,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Write every row's prompts and answers, too (needs --output).")
    ] = False,
    program: Annotated[
        str | None,
        typer.Option(
            help='Run this program instead of the checkpoint\'s own, e.g. "A0 F0 [A1 A2] [F1 F2]".', show_default=False
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the choice of few-shot examples. Default: lm-eval's own.", show_default=False),
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Put prompts into the tokenizer's chat template.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda (all GPUs), or auto: cuda where there is one.")] = "auto",
) -> None:
    """Compute a model's accuracy on tasks with lm-eval, and print it as a table.

    The form of a .jsonl file follows from the keys of its rows: query, choices, gold (multiple choice);
    context_options, continuation, gold (one text after several contexts); context, continuation (LAMBADA); context,
    answer, and if there is one chain_of_thought (a number, as in GSM8K). Its few-shot examples are its other rows.
    """
    from surgeon.quality.tasks import Settings, run_tasks
    from surgeon.quality.tasks_load import Seeds, load_tasks, split_names
    from surgeon.quality.tasks_model import Answers, TaskModel
    from surgeon.quality.tasks_results import scores, table, write_results
    from surgeon.quality.tasks_subject import choose_device, open_candidate

    settings = Settings(limit, batch_size, apply_chat_template, Seeds.all(seed))
    if log_samples and output is None:
        raise ValueError("--log-samples writes files; say where to with --output")
    choose_device(device)
    candidate = open_candidate(model, program)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    loaded = load_tasks(split_names(tasks), candidate.positions, num_fewshot, settings.seeds)
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    weights = candidate.checkpoint.weights_hash()
    with Answers(output, candidate.identity(weights, device)) as answers:
        lm = TaskModel(candidate.load(device), candidate.tokenizer, answers, batch_size)
        results = run_tasks(lm, loaded, model, settings)
    if lm.cut:
        print(
            f"note: {lm.cut:,} of {len(lm.asked):,} requests were longer than the model's {candidate.positions:,} "
            "positions, and lost their beginning",
            file=sys.stderr,
        )
    print(table(scores(results)))
    if output is not None:
        record = candidate.provenance(weights, files=loaded.files, requests=len(lm.asked), requests_cut=lm.cut)
        for path in write_results(output, results, record, log_samples):
            print(path)


evaluate.__name__ = "eval"  # the command's name, which as a function's would hide Python's own
