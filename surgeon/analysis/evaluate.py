"""A model's quality on a text, and its accuracy on tasks by lm-eval, as `surgeon.evaluate` measures them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pandas as pd

from surgeon.analysis.factors.make_factors import with_factors
from surgeon.checkpoint.factor_cache import FactorCache
from surgeon.findings.tasks import scores, scores_table, write_results
from surgeon.models.edit import edit, restore
from surgeon.models.verified import DraftOnText, NoVerifiedKeys, draft_on_text
from surgeon.models.weights import TruncatedSVD
from surgeon.opened import EditedModel
from surgeon.processes.files import write_json
from surgeon.quality.data import Windows
from surgeon.quality.head import OWN, logits_of, require_one_vocabulary, text_quality
from surgeon.quality.summary import Quality
from surgeon.words import hang_indent, plural

if TYPE_CHECKING:  # they need lm-eval, which comes with an extra and takes seconds to import
    from surgeon.quality.tasks import Tasks, TaskSettings


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Measurements of a model.

    Attributes:
        text: on the text; None where none was given.
        tasks: lm-eval's results; None where none were asked for.
        files: of tasks.
    """

    text: Quality | None = None
    tasks: dict[str, Any] | None = None
    files: tuple[Path, ...] = ()

    def table(self) -> pd.DataFrame:
        """One row per number: of the text, then of each task and metric, as a `Score` has them."""
        found: list[Any] = []
        if self.text is not None:
            found = self.text.table().assign(task="text").to_dict("records")
        if self.tasks is not None:
            found += map(asdict, scores(self.tasks))
        return pd.DataFrame(found)

    def __repr__(self) -> str:
        return f"<Evaluation: {plural(len(self.table()), 'number')}>"

    def _repr_html_(self) -> str:
        return self.table().to_html(index=False)

    def __str__(self) -> str:
        found: list[str] = []
        if self.text is not None:
            found = [hang_indent("", line) for line in (self.text.line(), self.text.as_draft())]
        if self.tasks is not None:
            found.append(str(scores_table(scores(self.tasks))))
        return "\n".join(filter(None, found))


@contextmanager
def factors_of(candidate: EditedModel, output: Path | None) -> Iterator[EditedModel]:
    """The candidate with its recipe's choice of units, and a folder for factors, which are made once."""
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


def on_text(
    candidate: EditedModel,
    original: EditedModel | None,
    windows: Windows,
    device: str,
    output: Path | None,
) -> Quality:
    """Measure perplexity, and divergence and acceptance where there is something to compare with; write text.json.

    A program over a model's own weights is judged as its draft by the model's keys and values of earlier tokens.
    """
    for note in windows.notes:
        warnings.warn(note, stacklevel=1)
    if original is not None:
        require_one_vocabulary(*(one.model.shapes.vocabulary for one in (original, candidate)))
    loaded = candidate.load(device)
    program = candidate.asked
    model = logits_of(loaded)
    reference = None
    draft: DraftOnText | None = None
    if original is not None:
        reference = logits_of(original.load(device))
    elif program is not None:  # the same weights, with and without the program
        edited = program

        def model(ids: Any) -> Any:
            return logits_of(edit(loaded, edited, factors=candidate.factors))(ids)

        def reference(ids: Any) -> Any:
            return logits_of(restore(loaded))(ids)

        try:
            draft = draft_on_text(loaded, edited, candidate.factors)
        except NoVerifiedKeys as error:
            warnings.warn(
                f"acceptance is judged by the program's own keys and values: {error}", stacklevel=1
            )

    found = text_quality(model, windows.ids, reference, draft=draft)
    if found.knows("greedy_acceptance") and draft is None:
        found = replace(found, acceptance_keys=OWN)
    if output is not None:
        more = windows.record() | {"window": windows.ids.shape[1]} | found.to_json()
        said = candidate.provenance(**more) | ({} if original is None else {"against": original.name})
        write_json(output / "text.json", said)
    return found


def on_tasks(
    candidate: EditedModel,
    loaded: Tasks,
    settings: TaskSettings,
    device: str,
    output: Path | None,
    log_samples: bool,
) -> tuple[dict[str, Any], list[Path]]:
    """Run lm-eval, and write its results to files."""
    from surgeon.quality.tasks import Answers, TaskModel, run_tasks

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
