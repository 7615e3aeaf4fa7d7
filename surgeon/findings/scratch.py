"""Training from scratch: how the loss of a model fell, and of several side by side."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from surgeon.findings.blocks import Block, Code, Finding, Paragraph, Table
from surgeon.findings.drawing import COLOURS, Picture
from surgeon.findings.exported import from_scratch
from surgeon.findings.training import TrainingRun, held_out_charts, trained_on
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
        yield Code("Program", str(record["program"]))
        yield Code("Configuration", str(record["configuration"]))

    @classmethod
    def together(cls, runs: Sequence[Self]) -> list[Block]:
        if len(runs) < 2:
            return []
        texts = {run.record.get("held_out_hash") for run in runs}
        first = runs[0]
        head = ["", "program", "parameters", "tokens", "seed", "loss", "perplexity", f"loss minus {first.name}'s"]
        rows = [run.row(first.loss) for run in runs]
        note = "Losses on held-out text, nats per token; a run's interval stands in its section."
        if len(texts) != 1:
            note += " The runs were measured on different texts, and cannot be compared."
        charts = list(held_out_charts({run.name: run for run in runs[: len(COLOURS)]}, ", side by side"))
        caption = ""
        if len(runs) > len(COLOURS):
            caption = f"The first {len(COLOURS)} runs are drawn."
        return [Table("Side by side", head, rows, note, left=frozenset({1})), Picture(charts, caption)]

    @property
    def loss(self) -> float:
        """Of the trained model on held-out text, nats per token."""
        return math.log(float(self.record["trained"]["perplexity"]))

    def row(self, base: float) -> list[str]:
        """The run in a table of several, of which the first has the loss `base`."""
        record = self.record
        program = textwrap.shorten(str(record["program"]), _LONGEST_PROGRAM, placeholder="…")
        sizes = [f"{int(record['parameters']):,}", f"{int(record['tokens']):,}", str(record["settings"]["seed"])]
        apart = ""
        if self.loss != base:
            apart = f"{self.loss - base:+.3f}"
        return [self.name, program, *sizes, number(self.loss), number(math.exp(self.loss)), apart]

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
