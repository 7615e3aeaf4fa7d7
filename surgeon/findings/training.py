"""Training: runs that heal an edited model and runs from scratch, with curves, alone and side by side."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import pandas as pd
from matplotlib.axes import Axes

from surgeon.findings.drawing import COLOURS, Chart, Picture, points, rule, scale
from surgeon.findings.exported import from_scratch
from surgeon.findings.result import Block, Finding, Record, RunResult, Table, record_codes, table_file
from surgeon.progress import clock
from surgeon.quality.summary import Quality
from surgeon.words import NO_VALUE, interval, join_words, number, plural, value_with_interval

_INTERVALS = tuple(f"{name}_{end}" for name in ("perplexity", "divergence") for end in ("low", "high"))
# Parts of a distillation's loss.
PARTS = {"logits": "logits' part", "hidden": "hidden states' part", "text": "text's part"}
UNITS = {"divergence": "divergence (nats per token)", "perplexity": "perplexity"}
_MOST_BANDS = 3  # curves whose intervals can be told apart as areas
_MEANS = 50  # points of the smoothed loss; with fewer rows it is drawn as it is
_FLAT = 5.0  # times the height of the curves: intervals beyond would make lines of them
_WIDE = 20.0  # from this ratio on an axis is logarithmic
_ROW_STYLE = 7
_OF_ONE = ("95% interval", "regained")
_HEAD = ["", "tokens", "perplexity", *_OF_ONE, "divergence", *_OF_ONE]
_UNKNOWN = "The original is not known, and so not what was lost."
_NOTE = (
    "Regained, of what the edit lost: in log-perplexity (edited \N{MINUS SIGN} healed) / (edited \N{MINUS SIGN} "
    "original), in divergence from the original 1 \N{MINUS SIGN} healed / edited."
)


@dataclass(frozen=True, repr=False)
class TrainingRun(RunResult):
    """A run that trained a model.

    Attributes:
        held_out: a row for each measurement on held-out text, as in `held_out.csv`.
        training: a row for each logged step, as in `training.csv`.
    """

    RECORD = "run.json"
    LAST: ClassVar[str]  # what the record of a run that has ended has
    BEFORE: ClassVar[str]  # what was measured at step 0
    # Ratio of the highest to the lowest quality from which an axis is logarithmic.
    LOG_FROM: ClassVar[float]

    held_out: pd.DataFrame = table_file(
        "held_out.csv", ("step", "seconds", "perplexity", "divergence", *_INTERVALS)
    )
    training: pd.DataFrame = table_file(
        "training.csv", ("step", "tokens", "seconds", "loss", "learning_rate"), may_be_empty=True
    )

    @classmethod
    def facts(cls, record: Record, file: Path) -> Record:
        if "identity" in record and cls.LAST not in record:
            raise ValueError(
                f"{file} is of a run that has not ended; give the same surgeon {cls.COMMAND} command again, which goes "
                "on where it was"
            )
        return {}

    @property
    def original(self) -> float | None:
        """The unedited model's perplexity on the held-out text; None where it is not known."""
        return None

    @property
    def tokens_per_step(self) -> float:
        """NaN where nothing was trained."""
        steps = float(self.record["steps"])
        if steps > 0:
            return float(self.record["tokens"]) / steps
        return math.nan

    def charts(self) -> Iterator[Chart]:
        yield from held_out_charts({self.name: self})
        training = self.training
        if training.empty:
            return
        # The loss at every logged step, smoothed where there are many, and its parts.
        written = training.dropna(axis="columns", how="all")
        parts = {"loss": "loss"} | {name: words for name, words in PARTS.items() if name in written}
        if len(parts) == 2:
            parts = {"loss": "loss"}  # the only part is the loss itself
        few = len(training) <= _MEANS
        drawn = training
        if not few:
            places = pd.Series(range(len(training)), index=training.index) // math.ceil(
                len(training) / _MEANS
            )
            drawn = training.groupby(places).agg({"step": "last", **dict.fromkeys(parts, "mean")})

        def draw(axes: Axes) -> None:
            _steps_across(axes, training["step"])
            values = pd.concat([drawn[name] for name in parts] + ([] if few else [training["loss"]]))
            _value_axis(axes, values.tolist())
            if not few:
                tip = partial(_step_tip, "loss", "loss")
                points(axes, training, "step", "loss", tip, _ROW_STYLE, "loss, each row", line=False)
            for place, (name, words) in enumerate(parts.items()):
                label = ""
                if not few:
                    label = f"{words}, mean of {math.ceil(len(training) / _MEANS)} rows"
                elif len(parts) > 1:
                    label = words
                tip = partial(_step_tip, name, words)
                points(axes, drawn, "step", name, tip, place, label, marks=few)

        yield Chart("Loss while it trained", draw, "step", "loss", name="loss-while-it-trained")


def held_out_charts(runs: Mapping[str, TrainingRun], together: str = "") -> Iterator[Chart]:
    """Perplexity and divergence on held-out text, a line for each run by its name; `together` ends the titles."""
    has_divergence = any(run.held_out["divergence"].notna().any() for run in runs.values())
    for name in ("perplexity", "divergence") if has_divergence else ("perplexity",):
        yield _held_out_chart(name, runs, together)


def _held_out_chart(name: str, runs: Mapping[str, TrainingRun], together: str) -> Chart:
    first = next(iter(runs.values()))
    per_step = {run.tokens_per_step for run in runs.values()}
    by_tokens = len(per_step) > 1 and all(math.isfinite(tokens) for tokens in per_step)
    originals = {run.original for run in runs.values()}
    original = None
    if name == "perplexity" and len(originals) == 1:
        original = first.original
    tables = {
        run_name: run.held_out.assign(
            run=run_name, place=run.held_out["step"] * (run.tokens_per_step if by_tokens else 1.0)
        )
        for run_name, run in runs.items()
    }
    every = pd.concat(tables.values())
    values = [*every[name], *filter(None, [original])]
    ends = [*every[f"{name}_low"], *every[f"{name}_high"]]
    too_wide = _span_of([*values, *ends]) > _FLAT * _span_of(values) > 0
    band = len(runs) <= _MOST_BANDS

    def tip(row: Any) -> str:
        return f"{row['run']}, step {row['step']:g}: {name} {value_with_interval(row, name)}"

    def draw(axes: Axes) -> None:
        _steps_across(axes, every["place"])
        _value_axis(
            axes, values if too_wide else [*values, *ends], first.LOG_FROM, zero=name == "divergence"
        )
        if original is not None:
            rule(axes, original)
        for style, (run_name, table) in enumerate(tables.items()):
            label = ""
            if len(runs) > 1:
                label = run_name
            points(axes, table, "place", name, tip, style, label, intervals=not too_wide, band=band)

    shown = f"{'areas' if band else 'bars'} are 95% intervals"
    if too_wide:
        shown = "95% intervals are far wider than the picture"
    caption = f"Step 0 is {first.BEFORE}; {shown}."
    if original is not None:
        caption += f" Dashed: the original's {name}, {number(original)}."
    title = f"{name.capitalize()} on held-out text{together}"
    file = ""
    if not together:
        file = f"{name}-on-held-out-text"
    return Chart(title, draw, "tokens trained on" if by_tokens else "step", UNITS[name], caption, file)


def _span_of(values: Sequence[float]) -> float:
    finite = [*filter(math.isfinite, values)] or [0.0]
    return max(finite) - min(finite)


def _step_tip(column: str, words: str, row: Any) -> str:
    return f"step {row['step']:g}: {words} {number(row[column])}"


def _steps_across(axes: Axes, steps: pd.Series[float]) -> None:
    last = float(steps.max())
    if not 0 <= last < math.inf:
        raise ValueError(f"a step of {last} is none")
    scale(axes, "x", [0.0, max(1.0, last)], zero=True)


def _value_axis(
    axes: Axes, values: Sequence[float], log_from: float = _WIDE, zero: bool = False
) -> None:
    finite = [value for value in values if math.isfinite(value)]
    log = bool(finite) and min(finite) > 0 and max(finite) > log_from * min(finite)
    scale(axes, "y", finite, log, zero=zero and not log)


def trained_on(record: Record) -> str:
    """Steps, text and time of a run."""
    text = f"{plural(int(record['steps']), 'step')} on {int(record['tokens']):,} tokens"
    if record.get("data"):
        text += f" of {record['data']}"
    return f"{text} in {clock(float(record['seconds']))}"


_LONGEST_PROGRAM = 28  # characters of it in a table


@dataclass(frozen=True, repr=False)
class ScratchRun(TrainingRun):
    """The result of `train`."""

    COMMAND = "train"
    TITLE = "Training from scratch"
    OF_SURGERY = False
    LAST = "trained"
    BEFORE = "the model with random weights"
    LOG_FROM = 2.0  # its first value is far above all others

    @classmethod
    def is_ours(cls, record: Record) -> bool:
        """True for a run of the whole model, False for one of its racks."""
        identity = record.get("identity", {})
        return identity.get("task") == "train" and "rack" not in identity

    @classmethod
    def model_of(cls, record: Record) -> tuple[str, str]:
        return from_scratch(record.get("data")), ""

    def section(self) -> Iterator[Block]:
        record = self.record
        yield (
            f"A model of {int(record['parameters']):,} parameters ({record['architecture']}) with random weights was "
            f"trained for {trained_on(record)}. Before and after, {int(record['trained']['tokens']):,} held-out "
            f"tokens were predicted ({record['held_out']})."
        )
        rows = [
            [name, *_loss_cells(record[stage])]
            for stage, name in (("untrained", "untrained"), ("trained", "trained"))
        ]
        yield Table(
            "Before and after",
            ["", "loss", "perplexity", "95% interval"],
            rows,
            "Loss in nats per token.",
        )
        if record.get("racks") is not None:
            rows = []
            for each in record["racks"]["each"]:
                before = Quality.from_json(each["before"])
                loss, perplexity, interval_of = _loss_cells(each["after"])
                layers = f"layers {each['layers']}"
                rows.append([layers, loss, number(before.perplexity), perplexity, interval_of])
            note = (
                f"Each by its own coda of {plural(int(record['racks']['coda']), 'layer')}; the last rack's are the "
                "model's own last layers, and the curves below are its."
            )
            yield Table("Racks", ["", "loss", "perplexity before", "after", "95% interval"], rows, note)
        yield Picture(list(self.charts()))
        yield from record_codes(record, program="Program", configuration="Configuration")

    @classmethod
    def together(cls, runs: Sequence[Self]) -> list[Block]:
        if len(runs) < 2:
            return []
        texts = {run.record.get("held_out_hash") for run in runs}
        first = runs[0]
        head = [
            "",
            "program",
            "parameters",
            "tokens",
            "seed",
            "loss",
            "perplexity",
            f"loss minus {first.name}'s",
        ]
        rows = []
        for run in runs:
            record = run.record
            program = textwrap.shorten(str(record["program"]), _LONGEST_PROGRAM, placeholder="…")
            counts = [f"{int(record[name]):,}" for name in ("parameters", "tokens")]
            seed = str(record["settings"]["seed"])
            apart = ""
            if run.loss != first.loss:
                apart = f"{run.loss - first.loss:+.3f}"
            quality = number(run.loss), number(math.exp(run.loss)), apart
            rows.append([run.name, program, *counts, seed, *quality])
        note = "Losses on held-out text, nats per token; a run's interval stands in its section."
        if len(texts) != 1:
            note += " The runs were measured on different texts, and cannot be compared."
        charts = list(held_out_charts({run.name: run for run in runs[: len(COLOURS)]}, ", side by side"))
        caption = ""
        if len(runs) > len(COLOURS):
            caption = f"The first {len(COLOURS)} runs are drawn."
        return [Table("Side by side", head, rows, note, left=(1,)), Picture(charts, caption)]

    @property
    def loss(self) -> float:
        """Loss of the trained model on held-out text, nats per token."""
        return math.log(float(self.record["trained"]["perplexity"]))

    def summary(self) -> Iterator[Finding]:
        record = self.record
        before, after = (float(record[stage]["perplexity"]) for stage in ("untrained", "trained"))
        text = (
            f"{plural(int(record['steps']), 'step')} on {int(record['tokens']):,} tokens of {record['data']} brought a "
            f"model with random weights from a perplexity of {number(before)} to {number(after)} on held-out text."
        )
        yield Finding("Trained from scratch", text, number(after), "held-out perplexity")


def _loss_cells(stored: Record) -> list[str]:
    quality = Quality.from_json(stored)
    return [
        number(math.log(quality.perplexity)),
        number(quality.perplexity),
        interval(*quality.ends("perplexity")),
    ]


@dataclass(frozen=True)
class Healing:
    """Three models on the same held-out text; the original is None where it is not known."""

    original: Quality | None
    edited: Quality
    healed: Quality

    @classmethod
    def of(cls, record: Record) -> Healing:
        """Read a `run.json`; a ValueError says which perplexity is not above 0."""
        found = {
            name: record[name] and Quality.from_json(record[name])
            for name in ("original", "edited", "healed")
        }
        for quality in filter(None, found.values()):
            if not quality.perplexity > 0:
                raise ValueError(f"a perplexity of {quality.perplexity:g} is not above 0")
        return cls(**found)

    @property
    def of_perplexity(self) -> float | None:
        """The regained share of the lost log-perplexity; NaN where none was lost, None without the original."""
        if self.original is None:
            return None
        edited, healed, original = (
            math.log(one.perplexity) for one in (self.edited, self.healed, self.original)
        )
        lost = edited - original
        if not (math.isfinite(lost) and lost > 0):
            return math.nan
        return (edited - healed) / lost

    @property
    def of_divergence(self) -> float | None:
        """The regained share of divergence; None where it is not known."""
        lost = self.edited.divergence
        if math.isnan(lost):
            return None
        if not (math.isfinite(lost) and lost > 0):
            return math.nan
        return 1 - self.healed.divergence / lost


@dataclass(frozen=True, repr=False)
class HealRun(TrainingRun):
    """The result of `heal`.

    Attributes:
        healing: the three models on the same held-out text.
    """

    COMMAND = "heal"
    TITLE = "Healing"
    WITHOUT = "No healing: how much of what an edit loses comes back with training is not known (surgeon heal)."
    LAST = "healed"
    BEFORE = "the edited model before training"
    LOG_FROM = 20.0

    @classmethod
    def is_ours(cls, record: Record) -> bool:
        return bool(record.get("identity", {}).get("task", "heal") == "heal")

    healing: Healing = field(kw_only=True)

    @classmethod
    def facts(cls, record: Record, file: Path) -> Record:
        return super().facts(record, file) | {"healing": Healing.of(record)}

    @property
    def original(self) -> float | None:
        original = self.healing.original
        if original is None:
            return None
        return original.perplexity

    def section(self) -> Iterator[Block]:
        record = self.record
        text = f"The edited model was trained for {trained_on(record)}."
        text += f" Before and after, {int(record['healed']['tokens']):,} held-out tokens were predicted"
        if record.get("held_out"):
            text += f" ({record['held_out']})"
        yield f"{text}."
        yield _side_by_side("Before and after", {"healed": self})
        yield Picture(list(self.charts()))
        yield from record_codes(record, program="The program that was healed", recipe="Recipe")

    @classmethod
    def together(cls, runs: Sequence[Self]) -> list[Block]:
        """All healings of a model side by side, and their curves in one picture."""
        if len(runs) < 2:
            return []
        named = {run.name: run for run in runs}
        table = _side_by_side("All healings side by side", named)
        return [table, Picture(list(held_out_charts(named, ", all healings")))]

    def summary(self) -> Iterator[Finding]:
        record = self.record
        healing = self.healing
        edited = healing.edited
        healed = healing.healed
        steps = plural(int(record["steps"]), "step")
        time = clock(float(record["seconds"]))
        text = (
            f"{steps} of training ({int(record['tokens']):,} tokens, {time}) brought the edited model's perplexity "
            f"from {number(edited.perplexity)} to {number(healed.perplexity)}"
        )
        if healing.original:
            text += f", the original's being {number(healing.original.perplexity)}"
        if healing.of_divergence:
            text += (
                f", and its divergence from {number(edited.divergence)} to {number(healed.divergence)}"
            )
        text += "."
        back = healing.of_divergence
        figure = ""
        if back and math.isfinite(back):
            figure = _percent(back)
        label = "of the edit's divergence regained by healing"
        yield Finding("Trained", text, figure, label if figure else "")


def _side_by_side(caption: str, runs: Mapping[str, HealRun]) -> Table:
    """Table what runs began with and reached; those of one edited model on one text stand together."""
    same_text = len({run.record.get("held_out_hash") for run in runs.values()}) == 1
    original = next(iter(runs.values())).healing.original
    rows = []
    if same_text and original:
        rows = [["original", "", *_cells(original)[:2]]]
    edits: dict[str, dict[str, HealRun]] = {}
    for name, run in runs.items():
        edited = [run.record.get(key) for key in ("program", "recipe", "held_out_hash", "edited")]
        edits.setdefault(str(edited), {})[name] = run
    marked: list[tuple[int, int]] = []
    for of_one_edit in edits.values():
        which = ""
        if len(edits) > 1:
            which = f", for {join_words(of_one_edit)}"
        rows.append([f"edited{which}", "", *_cells(next(iter(of_one_edit.values())).healing.edited)])
        for name, run in of_one_edit.items():
            shares = _share(run.healing.of_perplexity), _share(run.healing.of_divergence)
            marked += [
                (len(rows), column) for column, share in zip((4, 7), shares, strict=True) if share
            ]
            rows.append([name, f"{int(run.record['tokens']):,}", *_cells(run.healing.healed, *shares)])
    note = _UNKNOWN
    if marked:
        note = _NOTE
    if not same_text:
        note += " The runs were measured on different texts: only shares can be compared."
    return Table(caption, _HEAD, rows, note, marked=marked)


def _cells(state: Quality, *shares: str) -> list[str]:
    found = []
    for name, share in zip(("perplexity", "divergence"), shares or ("", ""), strict=True):
        found += [number(getattr(state, name)), interval(*state.ends(name)), share]
    return found


def _share(regained: float | None) -> str:
    if regained is None:
        return ""
    if math.isnan(regained):
        return "nothing lost"
    if math.isinf(regained):
        return NO_VALUE
    return _percent(regained)


def _percent(share: float) -> str:
    text = f"{100 * abs(share):.0f}%"
    if share >= 0 or text == "0%":
        return text
    return f"\N{MINUS SIGN}{text}"
