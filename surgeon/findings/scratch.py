"""Training from scratch: how the loss of a model fell, and of several side by side, each perhaps with several seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any, Self

from surgeon.findings.blocks import Block, Code, Finding, Paragraph, Table
from surgeon.findings.drawing import COLOURS, Picture
from surgeon.findings.exported import from_scratch
from surgeon.findings.training import TrainingRun, held_out_charts, losses_chart, settings_table, trained_on
from surgeon.quality.summary import Quality
from surgeon.words import interval, number, plural

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
    def is_ours(cls, record: dict[str, Any]) -> bool:
        """Whether it is of a whole model's run; each of a model's racks has one of its own beside."""
        identity = record.get("identity", {})
        return identity.get("task") == "train" and "rack" not in identity

    @classmethod
    def model_of(cls, record: dict[str, Any]) -> tuple[str, str]:
        return from_scratch(record.get("data")), ""

    def section(self) -> Iterator[Block]:
        record = self.record
        yield Paragraph(
            f"A model of {int(record['parameters']):,} parameters ({record['architecture']}) with random weights was "
            f"trained for {trained_on(record)}. Before and after, {int(record['trained']['tokens']):,} held-out "
            f"tokens were predicted ({record['held_out']})."
        )
        rows = [[name, *_cells(record[stage])] for stage, name in (("untrained", "untrained"), ("trained", "trained"))]
        yield Table("Before and after", ["", "loss", "perplexity", "95% interval"], rows, "Loss in nats per token.")
        yield from _racks(record.get("racks"))
        yield Picture(list(self.charts()))
        yield from settings_table(record.get("settings"))
        yield Code("Program", str(record["program"]))
        yield Code("Configuration", str(record["configuration"]))

    @classmethod
    def together(cls, runs: Sequence[Self]) -> list[Block]:
        models = _by_model(runs)
        if len(runs) < 2:
            return []
        texts = {run.record.get("held_out_hash") for run in runs}
        first = next(iter(models))
        base = _loss(models[first])
        head = [
            "",
            "program",
            "parameters",
            "tokens",
            "seeds",
            "loss",
            "its seeds",
            "perplexity",
            f"loss minus {first}'s",
        ]
        rows = [_row(name, same, None if name == first else base) for name, same in models.items()]
        note = "Losses on held-out text, nats per token, are means over seeds; a run's interval stands in its section."
        if len(texts) != 1:
            note += " The runs were measured on different texts, and cannot be compared."
        shown = list(models.items())[: len(COLOURS)]
        several = any(len(same) > 1 for same in models.values())
        charts = [*held_out_charts({name: same[0] for name, same in shown}, ", side by side")]
        trained = {name: same[0].training for name, same in shown if len(same[0].training)}
        if trained:
            charts += [losses_chart(trained, ", side by side")]
        caption = ""
        if several:
            caption = "Of each model the run with the first seed."
        if len(models) > len(COLOURS):
            caption += f" The first {len(COLOURS)} models are drawn."
        return [Table("Side by side", head, rows, note, left=frozenset({1})), Picture(charts, caption.strip())]

    def summary(self) -> Iterator[Finding]:
        record = self.record
        before, after = (float(record[stage]["perplexity"]) for stage in ("untrained", "trained"))
        text = (
            f"{plural(int(record['steps']), 'step')} on {int(record['tokens']):,} tokens of {record['data']} brought a "
            f"model with random weights from a perplexity of {number(before)} to {number(after)} on held-out text."
        )
        yield Finding("Trained from scratch", text, number(after), "held-out perplexity")


def _racks(record: dict[str, Any] | None) -> Iterator[Table]:
    """What each rack came to, where the model was trained rack by rack."""
    if record is None:
        return
    rows = []
    for each in record["each"]:
        before = Quality.from_json(each["before"])
        loss, perplexity, interval_of = _cells(each["after"])
        rows.append([f"layers {each['layers']}", loss, number(before.perplexity), perplexity, interval_of])
    note = (
        f"Each by its own coda of {plural(int(record['coda']), 'layer')}; the last rack's are the model's own last "
        "layers, and the curves below are its."
    )
    yield Table("Racks", ["", "loss", "perplexity before", "after", "95% interval"], rows, note)


def _cells(stored: dict[str, Any]) -> list[str]:
    quality = Quality.from_json(stored)
    return [number(math.log(quality.perplexity)), number(quality.perplexity), interval(*quality.ends("perplexity"))]


def _by_model(runs: Sequence[ScratchRun]) -> dict[str, list[ScratchRun]]:
    """Runs that differ in their seed alone together, by a name for each."""
    groups: dict[tuple[str, ...], list[ScratchRun]] = {}
    for run in runs:
        settings = {**run.record["settings"], "seed": None}
        known = (run.record["program"], run.record.get("identity", {}).get("model"), settings, run.record["data_hash"])
        groups.setdefault(tuple(map(str, known)), []).append(run)
    named: dict[str, list[ScratchRun]] = {}
    for same in groups.values():
        same.sort(key=lambda run: int(run.record["settings"]["seed"]))
        common = ""
        if len(same) > 1:
            alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*(run.name for run in same), strict=False))
            common = "".join(letters[0] for letters in alike).rstrip("-_. ")
        named[common if common and common not in named else same[0].name] = same
    return named


def _loss(same: Sequence[ScratchRun]) -> float:
    return fmean(math.log(float(run.record["trained"]["perplexity"])) for run in same)


def _row(name: str, same: Sequence[ScratchRun], base: float | None) -> list[str]:
    record = same[0].record
    loss = _loss(same)
    program = str(record["program"])
    cut = program
    if not (len(program) <= _LONGEST_PROGRAM):
        cut = f"{program[: _LONGEST_PROGRAM - 1]}…"
    losses = [_loss([run]) for run in same]
    spread = ""
    if len(same) > 1:
        spread = f"{number(min(losses))} to {number(max(losses))}"
    apart = ""
    if base is not None:
        apart = f"{'+' if loss > base else ''}{number(loss - base, 3)}"
    sizes = [f"{int(record['parameters']):,}", f"{int(record['tokens']):,}", str(len(same))]
    return [name, cut, *sizes, number(loss), spread, number(math.exp(loss)), apart]
