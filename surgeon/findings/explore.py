"""Exploration: the steps with their times, and the commands that go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from surgeon.findings.check import Check
from surgeon.findings.result import Block, Code, Finding, RunResult, Table, TableFile
from surgeon.findings.scan import Scan
from surgeon.findings.search import SearchResult
from surgeon.findings.similarity import Similarity
from surgeon.progress import clock
from surgeon.words import hang_indent


@dataclass(frozen=True)
class NextStep:
    """Something worth doing, its use, and its command with the paths that the user gave."""

    what: str
    why: str
    command: str


@dataclass(frozen=True, repr=False)
class Exploration(RunResult):
    """The result of `explore`.

    Attributes:
        steps: as in `explore.csv`: `step`, `did` (on how much text, with which result), `seconds`.
        checked: `surgeon.check` of the model; this and all else is of an exploration just made.
        scan, similarity, search: the passes; None where one cannot be done or had no time (`left_out`).
        page: all of it.
    """

    COMMAND = "explore"
    RECORD = "explore.json"
    TITLE = "What to do next"
    OF_SURGERY = False

    steps: pd.DataFrame = field(
        default_factory=lambda: pd.DataFrame(columns=["step", "did", "seconds"]),
        metadata={"file": TableFile("explore.csv", ("seconds",), ("step", "did"), may_be_empty=True)},
    )
    checked: Check | None = None
    scan: Scan | None = None
    similarity: Similarity | None = None
    search: SearchResult | None = None
    page: Any = None

    @property
    def minutes(self) -> float:
        return float(self.record["minutes"])

    @property
    def seconds_spent(self) -> float:
        """Seconds, of all of its commands."""
        return float(self.record["spent"])

    @property
    def left_out(self) -> Sequence[str]:
        return [str(line) for line in self.record.get("left_out", ())]

    @property
    def next_steps(self) -> Sequence[NextStep]:
        return [NextStep(**one) for one in self.record.get("next", ())]

    @property
    def heading(self) -> str:
        return f"{self.label}, explored in {clock(self.seconds_spent)} of {self.minutes:g} minutes"

    def __str__(self) -> str:
        lines = [self.heading, ""]
        rows = [
            *zip(self.steps["step"], self.steps["did"], strict=True),
            *(("left out", one) for one in self.left_out),
        ]
        width = max((len(step) for step, _ in rows), default=0) + 2
        lines += [hang_indent(f"{step:<{width}}", did) for step, did in rows]
        for number, one in enumerate(self.next_steps, start=1):
            lines += ["", hang_indent(f"{number}. ", f"{one.what}. {one.why}"), f"   {one.command}"]
        return "\n".join(lines)

    def section(self) -> Iterator[Block]:
        for number, one in enumerate(self.next_steps, start=1):
            yield Code(f"{number}. {one.what}", one.command, one.why)
        yield "Commands are for the folder in which the exploration was started."
        steps = self.steps
        rows = [
            [str(name), clock(float(seconds)), str(did)]
            for name, seconds, did in zip(steps["step"], steps["seconds"], steps["did"], strict=True)
        ]
        caption = f"What was done in {clock(self.seconds_spent)} of {self.minutes:g} minutes"
        yield Table(caption, ["step", "time", "on what, and what it gave"], rows, left=(2,))

    def summary(self) -> Iterator[Finding]:
        tokens = self.record.get("plan", {}).get("tokens")
        if tokens:
            spent = f"{clock(self.seconds_spent)} of {self.minutes:g} minutes"
            text = (
                f"In {spent}, on {tokens:,} tokens of {self.record['data']}. What to do next is below."
            )
            yield Finding("Explored", text)

    def list_missing(self) -> Iterator[str]:
        for line in self.left_out:
            yield f"{line[:1].upper()}{line[1:]}."
