"""What training has found: of a healed model beside the original and the edited one, or of one from scratch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from surgeon.findings.drawing import Chart, chart, points, rule, scale
from surgeon.findings.exported import from_scratch
from surgeon.findings.result import RunResult, TableFile
from surgeon.words import TIMES, known, number

_INTERVALS = tuple(f"{name}_{end}" for name in ("perplexity", "divergence") for end in ("low", "high"))
NO_INTERVAL = (math.nan, math.nan)
PARTS = {"logits": "logits' part", "hidden": "hidden states' part", "text": "text's part"}  # of a distillation's loss
UNITS = {"divergence": "divergence (nats per token)", "perplexity": "perplexity"}
_MOST_BANDS = 3  # curves whose intervals can be told apart as areas
_MEANS = 50  # points of the smoothed loss; with fewer rows it is drawn as it is
_FLAT = 5.0  # times the height of the curves: intervals beyond would make lines of them
_WIDE = 20.0  # from this ratio on an axis is logarithmic
_ROW_STYLE = 7


@dataclass(frozen=True, repr=False)
class TrainingRun(RunResult):
    """A run that trained a model.

    Attributes:
        held_out: a row for each time that it was measured on held-out text, as in `held_out.csv`.
        training: a row for each step that was written down, as in `training.csv`.
    """

    RECORD = "run.json"
    TABLES: ClassVar = {
        "held_out": TableFile("held_out.csv", ("step", "seconds", "perplexity", "divergence", *_INTERVALS)),
        "training": TableFile(
            "training.csv", ("step", "tokens", "seconds", "loss", "learning_rate"), may_be_empty=True
        ),
    }
    LAST: ClassVar[str]  # what the record of a run that has ended has
    BEFORE: ClassVar[str]  # what was measured at step 0
    LOG_FROM: ClassVar[float]  # ratio of the highest to the lowest quality from which an axis is logarithmic

    held_out: pd.DataFrame
    training: pd.DataFrame

    @classmethod
    def facts(cls, record: dict[str, Any], file: Path) -> dict[str, Any]:
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
        return float(self.record["tokens"]) / steps if steps > 0 else math.nan

    def charts(self, name: str) -> Iterator[Chart]:
        """Held-out quality, loss and learning rate of the run, which has a name in them."""
        yield from held_out_charts({name: self})
        if len(self.training):
            yield from (loss_chart(self.training), rate_chart(self.training))

    def pictures(self) -> dict[str, Figure]:
        """Of everything in `charts`, by its title in small letters."""
        return {chart.title.lower().replace(" ", "-"): chart.figure for chart in self.charts(self.label)}


@dataclass(frozen=True, repr=False)
class HealRun(TrainingRun):
    """The result of `heal`.

    Attributes:
        healing: the three models on the same held-out text.
    """

    COMMAND = "heal"
    LAST = "healed"
    BEFORE = "the edited model before training"
    LOG_FROM = 20.0

    @classmethod
    def is_ours(cls, record: dict[str, Any]) -> bool:
        return bool(record.get("identity", {}).get("task", "heal") == "heal")

    healing: Healing

    @classmethod
    def facts(cls, record: dict[str, Any], file: Path) -> dict[str, Any]:
        return super().facts(record, file) | {"healing": Healing.of(record)}

    @property
    def original(self) -> float | None:
        original = self.healing.original
        return None if original is None else original.perplexity.value


@dataclass(frozen=True, repr=False)
class ScratchRun(TrainingRun):
    """The result of `train`."""

    COMMAND = "train"
    LAST = "trained"
    BEFORE = "the model with random weights"
    LOG_FROM = 2.0  # its first value is far above all others

    @classmethod
    def is_ours(cls, record: dict[str, Any]) -> bool:
        """Whether it is of a whole model's run; each of a model's racks has one of its own beside."""
        identity = record.get("identity", {})
        return identity.get("task") == "train" and "rack" not in identity

    @classmethod
    def model_of(cls, record: dict[str, Any]) -> tuple[str, str]:
        return from_scratch(record.get("data")), ""


@dataclass(frozen=True)
class WithInterval:
    """A number with the ends of its 95% interval; NaN where they are not known."""

    value: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        """Whether it is known how far off it may be."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def overlaps(self, other: WithInterval) -> bool:
        """Whether both intervals are known and have a value in common."""
        known = self.has_interval and other.has_interval
        return known and self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class OnHeldOut:
    """A model on held-out text: as it was, as edited, or as healed.

    Attributes:
        divergence: from the original, whose own is 0; NaN where the original is not known.
        greedy_acceptance, sampled_acceptance: as its draft, as of `TextQuality`; NaN where they were not measured.
    """

    perplexity: WithInterval
    divergence: WithInterval
    tokens: int
    greedy_acceptance: WithInterval
    sampled_acceptance: WithInterval

    @classmethod
    def of(cls, stored: dict[str, Any], original: bool = False) -> OnHeldOut:
        """From what `TextQuality.to_json` wrote.

        Raises:
            ValueError: if a perplexity is not above 0.
        """
        perplexity = _measured(stored, "perplexity")
        divergence = WithInterval(0.0, 0.0, 0.0) if original else _measured(stored, "divergence")
        if not perplexity.value > 0:
            raise ValueError(f"a perplexity of {perplexity.value:g} is not above 0")
        accepted = (_measured(stored, f"{how}_acceptance") for how in ("greedy", "sampled"))
        return cls(perplexity, divergence, int(stored["tokens"]), *accepted)


def _measured(stored: dict[str, Any], name: str) -> WithInterval:
    ends = stored.get(f"{name}_interval") or NO_INTERVAL
    low, high = (float(end) for end in ends)
    value = stored.get(name)
    return WithInterval(math.nan if value is None else float(value), low, high)


@dataclass(frozen=True)
class Regained:
    """How much of what the edit lost is back.

    Attributes:
        share: 0 as edited, 1 as good as the original; below 0 training has made it worse. NaN where nothing was lost.
        low, high: the least and the most that it can be with both numbers inside their intervals, which is a wider
            range than a 95% interval of the share; NaN where that is not known.
        certain: the loss itself lies outside what the intervals leave open. Where it does not, a share of it says
            little.
    """

    share: float
    low: float
    high: float
    certain: bool

    @property
    def is_known(self) -> bool:
        """Whether anything was lost of which a share could be told."""
        return math.isfinite(self.share)


NOTHING = Regained(math.nan, math.nan, math.nan, certain=False)


@dataclass(frozen=True)
class Healing:
    """One run: the three models on the same held-out text; the original is None where it is not known."""

    original: OnHeldOut | None
    edited: OnHeldOut
    healed: OnHeldOut

    @classmethod
    def of(cls, record: dict[str, Any]) -> Healing:
        """From `run.json`; errors as in `OnHeldOut.of`."""
        original = None if record["original"] is None else OnHeldOut.of(record["original"], original=True)
        return cls(original, OnHeldOut.of(record["edited"]), OnHeldOut.of(record["healed"]))

    @property
    def of_perplexity(self) -> Regained | None:
        """Of log-perplexity, (edited - healed) / (edited - original); None where the original is not known.

        The intervals are of each model by itself over the same windows, and so much wider than that of a difference;
        no range of the share follows from them.
        """
        if self.original is None:
            return None
        original, edited, healed = (s.perplexity for s in (self.original, self.edited, self.healed))
        lost = _log(edited.value) - _log(original.value)
        if not (math.isfinite(lost) and lost > 0):
            return NOTHING
        share = (_log(edited.value) - _log(healed.value)) / lost
        return Regained(share, *NO_INTERVAL, certain=edited.has_interval and not edited.overlaps(original))

    @property
    def of_divergence(self) -> Regained | None:
        """Of divergence, (edited - healed) / edited: that of the original from itself is 0."""
        edited, healed = self.edited.divergence, self.healed.divergence
        if math.isnan(edited.value):
            return None
        if not (math.isfinite(edited.value) and edited.value > 0):
            return NOTHING
        certain = edited.has_interval and edited.low > 0
        ends = (1 - healed.high / edited.low, 1 - healed.low / edited.high) if certain else NO_INTERVAL
        return Regained(1 - healed.value / edited.value, *ends, certain=certain)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def loss_chart(training: pd.DataFrame) -> Chart:
    """The training loss at every step that was written down, smoothed where there are many, and its parts."""
    written = training.dropna(axis="columns", how="all")
    parts = {"loss": "loss"} | {name: words for name, words in PARTS.items() if name in written}
    if len(parts) == 2:
        parts = {"loss": "loss"}  # the only part is the loss itself
    few = len(training) <= _MEANS
    drawn = training if few else _means(training, list(parts))
    figure, axes = _over_steps(training["step"])
    values = pd.concat([drawn[name] for name in parts] + ([] if few else [training["loss"]]))
    _value_axis(axes, values.tolist(), "loss")
    several = len(parts) > 1 or not few
    if not few:
        points(axes, training["step"], training["loss"], _tips(training, "loss", "loss"), _ROW_STYLE,
               "loss, each row", line=False)  # fmt: skip
    for place, (name, words) in enumerate(parts.items()):
        label = words if few else f"{words}, mean of {_span(training)} rows"
        points(axes, drawn["step"], drawn[name], _tips(drawn, name, words), place, label if several else "", marks=few)
    return Chart(figure, "Loss while it trained")


def rate_chart(training: pd.DataFrame) -> Chart:
    """The learning rate."""
    rates = training["learning_rate"]
    highest = max((rate for rate in rates if math.isfinite(rate)), default=0.0)
    power = math.floor(math.log10(highest)) if highest > 0 else 0
    scaled = rates * 10.0**-power  # so that numbers on the axis are short
    figure, axes = _over_steps(training["step"])
    axes.set_ylabel(f"learning rate ({TIMES} 1e{power})" if power else "learning rate")
    scale(axes, "y", scaled.tolist(), zero=True)
    tips = _tips(training, "learning_rate", "learning rate")
    points(axes, training["step"], scaled, tips, marks=len(scaled) <= _MEANS)
    return Chart(figure, "Learning rate")


def losses_chart(runs: Mapping[str, pd.DataFrame], together: str) -> Chart:
    """The training losses of several runs by their names, smoothed where there are many rows.

    Args:
        together: ends the title.
    """
    drawn = {name: one if len(one) <= _MEANS else _means(one, ["loss"]) for name, one in runs.items()}
    figure, axes = _over_steps(pd.concat([training["step"] for training in runs.values()]))
    _value_axis(axes, pd.concat([one["loss"] for one in drawn.values()]).tolist(), "loss")
    for place, (name, training) in enumerate(drawn.items()):
        points(axes, training["step"], training["loss"], (), place, name, marks=False)
    return Chart(figure, f"Loss while they trained{together}")


def held_out_charts(runs: Mapping[str, TrainingRun], together: str = "") -> Iterator[Chart]:
    """Perplexity and divergence on held-out text, a line for each run by its name.

    Args:
        runs: of one kind.
        together: ends the titles of charts of several runs.
    """
    kind = type(next(iter(runs.values())))
    per_step = {run.tokens_per_step for run in runs.values()}
    by_tokens = len(per_step) > 1 and all(math.isfinite(tokens) for tokens in per_step)
    tables = pd.concat([run.held_out for run in runs.values()])
    steps = pd.concat([run.held_out["step"] * (run.tokens_per_step if by_tokens else 1) for run in runs.values()])
    originals = {run.original for run in runs.values()}
    band = len(runs) <= _MOST_BANDS
    has_divergence = tables["divergence"].notna().any()
    for name in ("perplexity", "divergence") if has_divergence else ("perplexity",):
        original = next(iter(originals)) if name == "perplexity" and len(originals) == 1 else None
        values = [*tables[name], *filter(None, [original])]
        ends = [*tables[f"{name}_low"], *tables[f"{name}_high"]]
        too_wide = _span_of([*values, *ends]) > _FLAT * _span_of(values) > 0
        figure, axes = _over_steps(steps, "tokens trained on" if by_tokens else "step")
        _value_axis(axes, values if too_wide else [*values, *ends], UNITS[name], kind.LOG_FROM)
        if original is not None:
            rule(axes, original)
        for place, (run_name, run) in enumerate(runs.items()):
            table, apart = run.held_out, run.tokens_per_step if by_tokens else 1.0
            tips = [f"{run_name}, step {row['step']:g}: {name} {known(row, name)}" for _, row in table.iterrows()]
            interval_of = None if too_wide else (table[f"{name}_low"], table[f"{name}_high"])
            label = run_name if len(runs) > 1 else ""
            points(axes, table["step"] * apart, table[name], tips, place, label, ends=interval_of, band=band)
        dashed = "" if original is None else f" Dashed: the original's {name}, {number(original)}."
        drawn = f"{'areas' if band else 'bars'} are 95% intervals"
        shown = "95% intervals are far wider than the picture" if too_wide else drawn
        title = f"{name.capitalize()} on held-out text{together}"
        yield Chart(figure, title, f"Step 0 is {kind.BEFORE}; {shown}.{dashed}")


def _span_of(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) - min(finite) if finite else 0.0


def _tips(training: pd.DataFrame, column: str, words: str) -> list[str]:
    rows = zip(training["step"], training[column], strict=True)
    return [f"step {step:g}: {words} {number(value)}" for step, value in rows]


def _span(training: pd.DataFrame) -> int:
    return math.ceil(len(training) / _MEANS)


def _means(training: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Means of neighbouring rows, at the last one's step."""
    parts = pd.Series(range(len(training)), index=training.index) // _span(training)
    return training.groupby(parts).agg({"step": "last", **dict.fromkeys(columns, "mean")})


def _over_steps(steps: pd.Series[float], title: str = "step") -> tuple[Figure, Axes]:
    last = float(steps.max())
    if not 0 <= last < math.inf:
        raise ValueError(f"a step of {last} is none")
    figure, axes = chart(title, "")
    scale(axes, "x", [0.0, max(1.0, last)], zero=True)
    return figure, axes


def _value_axis(axes: Axes, values: Sequence[float], title: str, log_from: float = _WIDE) -> None:
    finite = [value for value in values if math.isfinite(value)]
    log = bool(finite) and min(finite) > 0 and max(finite) > log_from * min(finite)
    axes.set_ylabel(title)
    scale(axes, "y", finite, log, zero=not log and title == UNITS["divergence"])
