"""Measurements for a model card, from `surgeon eval` and `surgeon search`.

Only those of the checkpoint are taken: of itself under its own program, or of its source under the exported program,
which computes the same; beside them those of the source under its unedited program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from surgeon.findings.result import SHORT_HASH, Record, name_file_in_errors, read_record
from surgeon.findings.tasks import PROVENANCE_KEY, scores
from surgeon.language.program import Program
from surgeon.named import public
from surgeon.quality.summary import Quality

TEXT_FILE = "text.json"
SEARCH_FILE = "search.json"
TASK_FILES = "results_*.json"
PATTERNS = (TEXT_FILE, TASK_FILES, SEARCH_FILE)
PERPLEXITY = "perplexity"
DIVERGENCE = "divergence"
_LONGEST_PROGRAM = 80  # characters of it in an error


@dataclass(frozen=True)
class Identity:
    """The model and programs that measurements must be of.

    Attributes:
        model_hash: of the checkpoint; None while it is not written yet.
        program: over its own layers.
        source_hash: of its source; None if an earlier version's surgeon.json does not have it.
        source_program, dense: the exported and the unedited program, over the source's layers.
        trained: whether its weights were trained after the edit, so that no measurement of the source's holds.
    """

    name: str
    model_hash: str | None
    program: Program
    source_hash: str | None
    source_program: Program
    dense: Program
    trained: bool = False

    def is_edited(self, path: Path, model_hash: str, program: Program) -> bool:
        """True for a measurement of the checkpoint, False for one of its unedited source.

        Raises:
            ValueError: if it is of neither, saying of which.
        """
        if (model_hash, program) == (self.model_hash, self.program):
            return True
        if (model_hash, program) == (self.source_hash, self.dense):
            return self.source_program == self.dense and not self.trained
        if (model_hash, program) == (self.source_hash, self.source_program):
            if not self.trained:
                return True
            raise ValueError(
                f"{path} was measured on the source of {self.name} under its program, and {self.name} was trained "
                "since; measure it itself"
            )
        if model_hash in (self.model_hash, self.source_hash):
            text = shorten(str(program), _LONGEST_PROGRAM, placeholder="...")
            raise ValueError(
                f"{path} was measured under another program than that of {self.name}: {text}"
            )
        own = "its source is not known"
        if self.source_hash is not None:
            own = f"its source has {_short(self.source_hash)}"
        if self.model_hash is not None:
            own = f"it has {_short(self.model_hash)}, {own}"
        else:
            own += "; what was measured on an exported checkpoint itself is for surgeon card"
        raise ValueError(
            f"{path} was measured on another model ({_short(model_hash)}) than {self.name}: {own}"
        )


@dataclass(frozen=True)
class CardScore:
    """One number of quality, of the checkpoint or of its unedited source, on a text or task that `key` tells apart."""

    edited: bool
    metric: str
    on: str
    key: str
    shown: str


def read_measured(paths: Sequence[Path], identity: Identity) -> tuple[CardScore, ...]:
    """Read result files, or all that lie in folders; a ValueError names one that is damaged or of something else."""
    scores: list[CardScore] = []
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(
                f"there are no results {path}; give folders or files that surgeon commands wrote"
            )
        found = [path]
        if not path.is_file():
            found = [file for pattern in PATTERNS for file in sorted(path.glob(pattern))]
        if not found:
            raise ValueError(
                f"{path} holds no results of surgeon eval or search; looked for {', '.join(PATTERNS)} in it"
            )
        files += found
    for file in files:
        record = read_record(file)
        results = record.get("results")
        own = record
        ran = record
        if isinstance(results, dict) and isinstance(record.get(PROVENANCE_KEY), dict):
            kind = "eval --tasks"
            read = _tasks
            own = record[PROVENANCE_KEY]
            ran = own
        elif isinstance(record.get("best"), dict):
            kind = "search"
            read = _search
            ran = record["best"]
        elif PERPLEXITY in record:
            kind = "eval --data"
            read = _text
        else:
            raise ValueError(f"{file} holds no results of surgeon eval or search")
        with name_file_in_errors(file, kind):
            edited = identity.is_edited(file, own["model_hash"], Program.parse(ran["program"]))
            scores += read(record, edited)
    # Of what was measured twice the later one counts.
    return tuple({(one.edited, one.metric, one.key): one for one in scores}.values())


def _text(record: Record, edited: bool) -> Iterator[CardScore]:
    against = "the original"
    if record.get("against") is not None:
        against = public(record["against"])
    yield from _on_text(record, Quality.from_json(record), edited, against)


def _search(record: Record, edited: bool) -> Iterator[CardScore]:
    if not edited:
        return
    best = record["best"]
    original = record["original"]
    held = record.get("held_out")
    text = record
    seen = ""
    if held is not None:
        # The best of many trials is best in part by luck on the text that it was chosen on: only other text is fair.
        best = winner_unseen(record)
        original = held["original"]
        text = {"data": held["data"], "data_hash": held["data_hash"]}
        seen = " that the search did not see"
    for values, is_best in ((best, True), (original, False)):
        yield from _on_text(text, Quality.from_json(values), is_best, "the original", seen)


def winner_unseen(record: Record) -> Record:
    """The quality of a search's winner, healed where it was, on held-out text."""
    held = record["held_out"]
    finalists = {one["trial"]: one for one in (held["searched"], *held["runners_up"])}
    found: Record = finalists[(record.get("healing") or held)["winner"]]["unseen"]
    return found


def _on_text(
    record: Record, quality: Quality, edited: bool, against: str, which: str = ""
) -> Iterator[CardScore]:
    """Numbers on a text; an unedited model's divergence from itself is left out."""
    source = str(record["data"])
    on = f"{public(source)}, {quality.tokens:,} tokens{which}"
    key = f"{record['data_hash']} {quality.tokens}"
    metrics = {PERPLEXITY: PERPLEXITY}
    if edited:
        metrics[DIVERGENCE] = f"divergence from {against}, nats per token"
    for name, metric in metrics.items():
        if quality.knows(name):
            shown = quality.words(name, 4, 3)
            yield CardScore(edited, metric, on, key, shown)


def _tasks(record: Record, edited: bool) -> Iterator[CardScore]:
    for one in scores(record):
        shots = ""
        if one.shots is not None:
            shots = f"{one.shots}-shot, "
        shown = f"{one.value:.4g}" + ("" if one.stderr is None else f" ± {one.stderr:.2g}")
        on = f"{public(one.task)}, {shots}{one.rows:,} row{'' if one.rows == 1 else 's'}"
        yield CardScore(edited, one.name, on, on, shown)


def _short(model_hash: str) -> str:
    return f"sha256:{model_hash[:SHORT_HASH]}..."
