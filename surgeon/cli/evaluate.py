"""`surgeon eval`: a model's quality on texts, and its accuracy on tasks, by lm-eval."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.opening import warn
from surgeon.cli.options import DATA_HELP, ProgramOption, TextArguments

if TYPE_CHECKING:
    from surgeon.opened import UnloadedModel
    from surgeon.quality.data import Windows
    from surgeon.quality.tasks import TaskSettings
    from surgeon.quality.tasks_load import Tasks


@dataclass(frozen=True)
class SubjectArguments:
    """What is measured on, in the user's words; a group of options (see grouped.py)."""

    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            help="Tasks, with commas between or the option repeated: names of lm-eval's tasks and groups; paper (the "
            "nine of the Layer Parallelism paper); or paths: a .jsonl file (see below), a YAML file of lm-eval's, "
            "whose code is run, or a folder of those.",
            show_default=False,
        ),
    ] = None
    data: Annotated[str | None, typer.Option("--data", help="Perplexity, too. " + DATA_HELP, show_default=False)] = None
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="With --data: the model that the divergence is from. Default: for a recipe or --program, the model "
            "without it.",
            show_default=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        if not self.tasks and self.data is None:
            raise ValueError("there is nothing to measure; give --tasks, --data or both")


@dataclass(frozen=True)
class TaskArguments:
    """How much of the tasks is asked, in the user's words; a group of options (see grouped.py)."""

    num_fewshot: Annotated[
        int | None,
        typer.Option(
            min=0, help="Few-shot examples for every task. Default: the task's own number.", show_default=False
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option(help="Rows of each task, from its start. Default: all.", show_default=False)
    ] = None
    batch_size: Annotated[int, typer.Option(help="Requests to run together.")] = 1


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
            show_default=False,
        ),
    ] = None
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Write every row's prompts and answers, too (needs --output).")
    ] = False

    def __post_init__(self) -> None:
        if self.log_samples and self.output is None:
            raise ValueError("--log-samples writes files; say where to with --output")


@dataclass(frozen=True)
class PromptArguments:
    """How prompts are made, in the user's words; a group of options (see grouped.py)."""

    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the choice of few-shot examples. Default: lm-eval's own.", show_default=False),
    ] = None
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Put prompts into the tokenizer's chat template.")
    ] = False


@grouped
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="What to evaluate: a checkpoint folder, edited or not, a name on the Hugging Face hub, demo, or a "
            "recipe (.yaml), whose program is then applied to its model.",
            show_default=False,
        ),
    ],
    *,
    on: SubjectArguments,
    text: TextArguments,
    asking: TaskArguments,
    files: ResultFiles,
    program: ProgramOption = None,
    prompts: PromptArguments,
    device: Annotated[
        str,
        typer.Option(help="cpu, cuda (one GPU where the model fits, else all), or auto: cuda where there is one."),
    ] = "auto",
) -> None:
    """Measure a model's perplexity on a text (--data) and its accuracy on tasks with lm-eval (--tasks).

    The form of a .jsonl file follows from the keys of its rows: query, choices, gold (multiple choice);
    context_options, continuation, gold (one text after several contexts); context, continuation (LAMBADA); context,
    answer, and if there is one chain_of_thought (a number, as in GSM8K). Its few-shot examples are its other rows.
    """
    from surgeon.opened import choose_device, open_candidate
    from surgeon.quality.tasks import TaskSettings
    from surgeon.quality.tasks_load import Seeds, load_tasks, split_names

    seeds = Seeds.all(prompts.seed)
    settings = TaskSettings(asking.limit, asking.batch_size, prompts.apply_chat_template, seeds)
    choose_device(device)
    candidate = open_candidate(model, program)
    if files.output is not None:
        files.output.mkdir(parents=True, exist_ok=True)
    # What is wrong with the text or the tasks is said before anything is measured.
    windows = None if on.data is None else _windows(candidate, on.data, text)
    original = None if on.data is None or on.against is None else open_candidate(on.against)
    names = split_names(on.tasks or [])
    loaded = load_tasks(names, candidate.positions, asking.num_fewshot, seeds) if on.tasks else None
    with _factors(candidate, files.output) as candidate:
        if windows is not None:
            with _factors(original, None) if original is not None else nullcontext() as compared:
                _on_text(candidate, compared, windows, device, files.output)
        if loaded is not None:
            _on_tasks(candidate, loaded, settings, device, files)


@contextmanager
def _factors(candidate: UnloadedModel, output: Path | None) -> Iterator[UnloadedModel]:
    """The candidate with a folder for factors of its program's ranks: they are made once, as its recipe says."""
    from surgeon.analysis.factors.recipe_factors import make_recipe_factors
    from surgeon.checkpoint.factor_cache import FactorCache
    from surgeon.language.recipe import parse_recipe
    from surgeon.models.weights import TruncatedSVD

    if candidate.program is None or not any(sublayer.ranks for sublayer in candidate.program.sublayers()):
        yield candidate
        return
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) if output is None else output / "factors"
        recipe = None if candidate.recipe is None else parse_recipe(candidate.recipe, candidate.name)
        made = None if recipe is None else make_recipe_factors(recipe, candidate.checkpoint, folder)
        if made is None:
            yield replace(candidate, factors=FactorCache(TruncatedSVD(), Path(scratch)))
        else:
            warn(made.found.notes)
            yield replace(candidate, factors=made.found.source, factors_identity=made.identity)


def _windows(candidate: UnloadedModel, data: str, text: TextArguments) -> Windows:
    """The text that perplexity is measured on."""
    from surgeon.quality.data import load_windows, window_for

    size = window_for(candidate.config, text.window)
    return load_windows(candidate.tokenizer, data, size, text.tokens, text.separator)


def _on_text(
    candidate: UnloadedModel, original: UnloadedModel | None, windows: Windows, device: str, output: Path | None
) -> None:
    """Print and write perplexity, and divergence where there is something to compare with."""
    from surgeon.models.edit import edit, restore
    from surgeon.provenance import write_json
    from surgeon.quality.text import logits_of, text_quality

    warn(windows.notes)
    loaded, program = candidate.load(device), candidate.program
    model, compared = logits_of(loaded), None
    if original is not None:
        compared = logits_of(original.load(device))
    elif program is not None:  # the same weights, with and without the program
        edited = program

        def model(ids: Any) -> Any:
            return logits_of(edit(loaded, edited, factors=candidate.factors))(ids)

        def compared(ids: Any) -> Any:
            return logits_of(restore(loaded))(ids)

    found = text_quality(model, windows.ids, compared)
    print(found.line())
    if output is not None:
        more = windows.record() | {"window": windows.ids.shape[1]} | found.to_json()
        record = candidate.provenance(candidate.checkpoint.model_hash(), **more)
        write_json(output / "text.json", record | ({} if original is None else {"against": original.name}))


def _on_tasks(
    candidate: UnloadedModel,
    loaded: Tasks,
    settings: TaskSettings,
    device: str,
    files: ResultFiles,
) -> None:
    """Print and write lm-eval's results."""
    from surgeon.quality.tasks import run_tasks
    from surgeon.quality.tasks_model import Answers, TaskModel
    from surgeon.results.tasks import scores, table, write_results

    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    weights = candidate.checkpoint.model_hash()
    with Answers(files.output, candidate.identity(weights, device)) as answers:
        lm = TaskModel(candidate.load(device), candidate.tokenizer, answers, settings.batch_size)
        results = run_tasks(lm, loaded, candidate.name, settings)
    if lm.cut:
        print(
            f"note: {lm.cut:,} of {len(lm.asked):,} requests were longer than the model's {candidate.positions:,} "
            "positions, and lost their beginning",
            file=sys.stderr,
        )
    print(table(scores(results)))
    if files.output is not None:
        record = candidate.provenance(weights, files=loaded.files, requests=len(lm.asked), requests_cut=lm.cut)
        for path in write_results(files.output, results, record, files.log_samples):
            print(path)


evaluate.__name__ = "eval"  # the command's name, which as a function's would hide Python's own
