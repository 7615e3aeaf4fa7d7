"""`surgeon.evaluate`: a model's quality on texts, and its accuracy on tasks, by lm-eval."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pandas as pd

from surgeon.analysis.factors.recipe_factors import with_factors
from surgeon.checkpoint.factor_cache import FactorCache
from surgeon.errors import needs_extra
from surgeon.findings.tasks import scores, table, write_results
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.library.opening import as_list, warn
from surgeon.models.edit import edit, restore
from surgeon.models.verified import DraftOnText, NoVerifiedKeys, draft_on_text
from surgeon.models.weights import TruncatedSVD
from surgeon.named import split_values
from surgeon.opened import EditedModel, Model, choose_device, open_edited
from surgeon.processes.files import make_folder, write_json
from surgeon.quality.data import DEFAULT_TOKENS, Windows, load_windows, window_for
from surgeon.quality.summary import Quality
from surgeon.quality.text import OWN, logits_of, text_quality
from surgeon.words import hanging, plural

if TYPE_CHECKING:  # they need lm-eval, which comes with an extra and takes seconds to import
    from surgeon.quality.tasks import TaskSettings
    from surgeon.quality.tasks_load import Tasks


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What was measured of a model.

    Attributes:
        text: on the text; None where none was given.
        tasks: lm-eval's results; None where none were asked for.
        files: what was written of tasks.
    """

    text: Quality | None = None
    tasks: dict[str, Any] | None = None
    files: tuple[Path, ...] = ()

    def table(self) -> pd.DataFrame:
        """One row per number: of the text, then of each task and metric, as a `Score` has them."""
        found = [] if self.tasks is None else scores(self.tasks)
        text = [] if self.text is None else self.text.table().assign(task="text").to_dict("records")
        return pd.DataFrame([*text, *map(asdict, found)])

    def __repr__(self) -> str:
        return f"<Evaluation: {plural(len(self.table()), 'number')}>"

    def _repr_html_(self) -> str:
        return self.table().to_html(index=False)

    def __str__(self) -> str:
        tasks = "" if self.tasks is None else table(scores(self.tasks))
        text = [] if self.text is None else [hanging("", line) for line in (self.text.line(), self.text.as_draft())]
        return "\n".join(filter(None, [*text, tasks]))


def evaluate(
    model: str | Path | Recipe | Model | EditedModel,
    data: str | Path | None = None,
    *,
    tasks: str | Path | Sequence[str | Path] = (),
    program: Program | str | None = None,
    against: str | Path | Model | None = None,
    tokens: int = DEFAULT_TOKENS,
    window: int | None = None,
    separator: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    seed: int | None = None,
    apply_chat_template: bool = False,
    device: str = "auto",
    output: str | Path | None = None,
    log_samples: bool = False,
) -> Evaluation:
    """Measure perplexity, divergence and acceptance as a draft on a text, and accuracy on tasks.

    Args:
        model: a checkpoint's folder, edited or not, a hub name, "demo", a recipe or its path (.yaml), or a model that
            is open, edited (`surgeon.edit`) or not.
        data: a text file, a table or a dataset (docs/texts.md), or "demo".
        tasks: one or several names of lm-eval's tasks and groups, "paper", or paths of .jsonl and YAML files.
        program: to run in place of the model's own.
        against: the model that the divergence is from; by default, of a recipe or a program, the model without it.
        tokens: of the text, in windows of `window`; documents are apart at `separator`.
        num_fewshot: examples for every task; by default the task's own number.
        limit: rows of each task, from its start.
        batch_size: requests to run together.
        seed: of the choice of few-shot examples; by default lm-eval's own.
        apply_chat_template: put prompts into the tokenizer's chat template.
        device: "cpu", "cuda", or "auto".
        output: folder for results; answers are kept in it as they come.
        log_samples: write every row's prompts and answers, too.

    Raises:
        FileNotFoundError, ValueError: if there is nothing to measure, or the model, the text or a task cannot be used.
        OSError: if the output cannot be written.
    """
    if not tasks and data is None:
        raise ValueError("there is nothing to measure; give tasks, data or both")
    if log_samples and output is None:
        raise ValueError("log_samples writes files; say where to by an output folder")
    if num_fewshot is not None and num_fewshot < 0:
        raise ValueError(f"num_fewshot must be at least 0 examples, not {num_fewshot}")
    folder = None if output is None else Path(output)
    choose_device(device)
    candidate = open_edited(model, program)
    if folder is not None:
        make_folder(folder)
    # What is wrong with the text or the tasks is said before anything is measured.
    windows = None
    if data is not None:
        size = window_for(candidate.model.config, window)
        windows = load_windows(candidate.model.tokenizer, str(data), size, tokens, separator)
    original = None
    if data is not None and against is not None:
        original = open_edited(against)
    elif data is not None and candidate.asked is not None and candidate.model.own is not None:
        original = EditedModel(candidate.model.name, candidate.model)  # it runs a program itself, not the stored layers
    positions = candidate.model.positions
    asked = (
        _load_tasks(as_list(tasks), positions, num_fewshot, limit, batch_size, apply_chat_template, seed)
        if tasks
        else None
    )
    found = Evaluation()
    with _factors(candidate, folder) as candidate:
        if windows is not None:
            with _factors(original, None) if original is not None else nullcontext() as compared:
                found = replace(found, text=_on_text(candidate, compared, windows, device, folder))
        if asked is not None:
            results, files = _on_tasks(candidate, *asked, device, folder, log_samples)
            found = replace(found, tasks=results, files=tuple(files))
    return found


@contextmanager
def _factors(candidate: EditedModel, output: Path | None) -> Iterator[EditedModel]:
    """The candidate with its recipe's choice of units, and a folder for factors, which are made once as that says."""
    asked = () if candidate.asked is None else tuple(candidate.asked.sublayers())
    changed = any(sublayer.ranks or sublayer.width is not None for sublayer in asked)
    if not changed or candidate.factors is not None:
        yield candidate
        return
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) if output is None else output / "factors"
        made = with_factors(candidate, folder)
        kept = made.factors if isinstance(made.factors, FactorCache) else None
        yield replace(made, factors=kept or FactorCache(made.factors or TruncatedSVD(), Path(scratch)))


def _on_text(
    candidate: EditedModel, original: EditedModel | None, windows: Windows, device: str, output: Path | None
) -> Quality:
    """Perplexity, and divergence and acceptance where there is something to compare with; text.json.

    A program over a model's own weights is judged as its draft by the model's keys and values of earlier tokens.
    """
    warn(windows.notes)
    loaded, program = candidate.load(device), candidate.asked
    model, compared = logits_of(loaded), None
    draft: DraftOnText | None = None
    if original is not None:
        compared = logits_of(original.load(device))
    elif program is not None:  # the same weights, with and without the program
        edited = program

        def model(ids: Any) -> Any:
            return logits_of(edit(loaded, edited, factors=candidate.factors))(ids)

        def compared(ids: Any) -> Any:
            return logits_of(restore(loaded))(ids)

        try:
            draft = draft_on_text(loaded, edited, candidate.factors)
        except NoVerifiedKeys as error:
            warn([f"acceptance is judged by the program's own keys and values: {error}"])

    found = text_quality(model, windows.ids, compared, draft=draft)
    if found.knows("greedy_acceptance") and draft is None:
        found = replace(found, acceptance_keys=OWN)
    if output is not None:
        more = windows.record() | {"window": windows.ids.shape[1]} | found.to_json()
        said = candidate.provenance(**more) | ({} if original is None else {"against": original.name})
        write_json(output / "text.json", said)
    return found


def _load_tasks(
    tasks: Sequence[str | Path],
    positions: int,
    shots: int | None,
    limit: int | None,
    batch_size: int,
    chat: bool,
    seed: int | None,
) -> tuple[Tasks, TaskSettings]:
    with needs_extra("tasks", "measuring tasks"):
        from surgeon.quality.tasks import TaskSettings
        from surgeon.quality.tasks_load import Seeds, load_tasks

    seeds = Seeds.all(seed)
    settings = TaskSettings(limit, batch_size, chat, seeds)
    return load_tasks(split_values(map(str, tasks)), positions, shots, seeds), settings


def _on_tasks(
    candidate: EditedModel, loaded: Tasks, settings: TaskSettings, device: str, output: Path | None, log_samples: bool
) -> tuple[dict[str, Any], list[Path]]:
    """lm-eval's results, and the files that have them."""
    from surgeon.quality.tasks import run_tasks
    from surgeon.quality.tasks_model import Answers, TaskModel

    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    with Answers(output, candidate.identity(device)) as answers:
        lm = TaskModel(candidate.load(device), candidate.model.tokenizer, answers, settings.batch_size)
        results = run_tasks(lm, loaded, candidate.name, settings)
    if lm.cut:
        print(
            f"note: {lm.cut:,} of {len(lm.asked):,} requests were longer than the model's "
            f"{candidate.model.positions:,} positions, and lost their beginning",
            file=sys.stderr,
        )
    if output is None:
        return results, []
    record = candidate.provenance(files=loaded.files, requests=len(lm.asked), requests_cut=lm.cut)
    return results, list(write_results(output, results, record, log_samples))
