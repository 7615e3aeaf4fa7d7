"""`surgeon eval`, `surgeon.evaluate`: a model's quality on texts, and its accuracy on tasks, by lm-eval."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

from surgeon.commands.command import command, option, several
from surgeon.commands.options import DATA_HELP, ProgramText, TextFlags

if TYPE_CHECKING:
    from surgeon.analysis.evaluate import Evaluation
    from surgeon.language.recipe import Recipe
    from surgeon.opened import EditedModel, Model


@command(name="eval")  # which as a function's name would hide Python's own
def evaluate(
    model: Annotated[
        str | Path | Recipe | Model | EditedModel,
        option(
            "What to evaluate: a checkpoint folder, edited or not, a name on the Hugging Face hub, demo, or a recipe "
            "(.yaml), whose program is then applied to its model.",
            metavar="MODEL",
        ),
    ],
    data: Annotated[str | Path | None, option("Perplexity, too. " + DATA_HELP, kind=str)] = None,
    *,
    tasks: Annotated[
        str | Path | Sequence[str | Path],
        several(
            "Tasks: names of lm-eval's tasks and groups; paper (the nine of the Layer Parallelism paper); or paths: a "
            ".jsonl file (see below), a YAML file of lm-eval's, whose code is run, or a folder of those.",
            kind=list[str],
        ),
    ] = (),
    against: Annotated[
        str | Path | Model | None,
        option(
            "With --data: the model that the divergence is from. Default: for a recipe or --program, the model "
            "without it.",
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None, option("Few-shot examples for every task. Default: the task's own number.", least=0)
    ] = None,
    limit: Annotated[int | None, option("Rows of each task, from its start. Default: all.")] = None,
    batch_size: Annotated[int, option("Requests to run together.")] = 1,
    seed: Annotated[
        int | None, option("Seed of the choice of few-shot examples. Default: lm-eval's own.")
    ] = None,
    apply_chat_template: Annotated[
        bool, option("Put prompts into the tokenizer's chat template.")
    ] = False,
    output: Annotated[
        str | Path | None,
        option(
            "Folder for results_<time>.json (lm-eval's format), results_<time>.csv and text.json. Answers are kept in "
            "it as they come: killed, the same command goes on.",
            "--output",
            "-o",
        ),
    ] = None,
    log_samples: Annotated[
        bool, option("Write every row's prompts and answers, too (needs --output).")
    ] = False,
    program: ProgramText = None,
    device: Annotated[
        str,
        option("cpu, cuda (one GPU where the model fits, else all), or auto: cuda where there is one."),
    ] = "auto",
    **text: Unpack[TextFlags],
) -> Evaluation:
    """Measure perplexity and divergence on a text (--data), and accuracy on tasks with lm-eval (--tasks).

    Of a checkpoint, of a recipe (its model after the operations, without an export), or of any --program. Of one that
    is compared with another model also how well it would draft for that (--draft of generate and serve): the share of
    tokens that is accepted, greedy and sampled. A program over the model's own weights reads the model's keys and
    values of earlier tokens for that, as drafts do; what is compared by --against reads its own.

    The form of a .jsonl file follows from the keys of its rows: query, choices, gold (multiple choice);
    context_options, continuation, gold (one text after several contexts); context, continuation (LAMBADA); context,
    answer, and if there is one chain_of_thought (a number, as in GSM8K). Its few-shot examples are its other rows.

    Raises:
        FileNotFoundError, ValueError: if there is nothing to measure, or model, text or tasks cannot be used.
        OSError: if the output cannot be written.
    """
    from surgeon.analysis.evaluate import Evaluation, factors_of, on_tasks, on_text
    from surgeon.commands.command import as_list
    from surgeon.errors import needs_extra, refuse_useless
    from surgeon.named import split_values
    from surgeon.opened import EditedModel, choose_device, open_edited
    from surgeon.processes.files import make_folder
    from surgeon.quality import DEFAULT_TOKENS
    from surgeon.quality.data import load_windows, window_for

    if not tasks and data is None:
        raise ValueError("there is nothing to measure; give tasks, data or both")
    refuse_useless(
        "tasks",
        bool(tasks),
        num_fewshot=num_fewshot is not None,
        limit=limit is not None,
        batch_size=batch_size != 1,
        seed=seed is not None,
        apply_chat_template=apply_chat_template,
        log_samples=log_samples,
    )
    refuse_useless(
        "data",
        data is not None,
        against=against is not None,
        tokens=text.get("tokens", DEFAULT_TOKENS) != DEFAULT_TOKENS,
        window=text.get("window") is not None,
        separator=text.get("separator") is not None,
    )
    if log_samples and output is None:
        raise ValueError("log_samples writes files; say where to by an output folder")
    folder = None if output is None else Path(output)
    choose_device(device)
    candidate = open_edited(model, program)
    if folder is not None:
        make_folder(folder)
    # What is wrong with the text or the tasks is said before anything is measured.
    windows = None
    if data is not None:
        size = window_for(candidate.model.config, text.get("window"))
        tokens = text.get("tokens", DEFAULT_TOKENS)
        windows = load_windows(candidate.model.tokenizer, str(data), size, tokens, text.get("separator"))
    original = None
    if data is not None and against is not None:
        original = open_edited(against)
    elif data is not None and candidate.asked is not None and candidate.model.own is not None:
        # A checkpoint with a program of its own runs that, and not its stored layers.
        original = EditedModel(candidate.model.name, candidate.model)
    asked = None
    if tasks:
        with needs_extra("tasks", "measuring tasks"):
            from surgeon.quality.tasks import TaskSettings, load_tasks

        settings = TaskSettings(limit, batch_size, apply_chat_template, seed)
        names = split_values(map(str, as_list(tasks)))
        asked = load_tasks(names, candidate.model.positions, num_fewshot, seed), settings
    found = Evaluation()
    with factors_of(candidate, folder) as candidate:
        if windows is not None:
            with factors_of(original, None) if original is not None else nullcontext() as compared:
                found = replace(found, text=on_text(candidate, compared, windows, device, folder))
        if asked is not None:
            results, files = on_tasks(candidate, *asked, device, folder, log_samples)
            found = replace(found, tasks=results, files=tuple(files))
    return found
