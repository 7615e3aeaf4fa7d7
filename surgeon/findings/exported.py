"""Exported checkpoint: its report, surgeon.json, with its proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from surgeon.findings.result import Block, Finding, Record, RunResult, Table, record_codes
from surgeon.language.program import Program
from surgeon.machine import show_size
from surgeon.words import number, plural

_PROOF = {
    "exact": "largest logit difference, relative, before rounding",
    "written": "largest logit difference, relative, as written",
    "tokens": "random tokens both were run on",
    "dtype": "weights that had to be computed are stored as",
}


@dataclass(frozen=True, repr=False)
class ExportRun(RunResult):
    """The result of `export`: a checkpoint that was written and proven.

    Attributes:
        proof: and the following of an export just made.
        size: of its weights, in bytes.
    """

    COMMAND = "export"
    RECORD = "surgeon.json"
    TITLE = "Checkpoint"

    proof: Any = None
    size: int = 0

    @classmethod
    def is_ours(cls, record: Record) -> bool:
        return isinstance(record.get("form"), str) and isinstance(record.get("source"), dict)

    @classmethod
    def model_of(cls, record: Record) -> tuple[str, str]:
        source = record["source"]
        trained = record.get("trained")
        if "model" in source and source["model"] is None and isinstance(trained, dict):
            return from_scratch(trained.get("data")), ""
        return super().model_of(source)

    @property
    def folder(self) -> Path:
        return self.files[0].parent

    @property
    def form(self) -> str:
        return str(self.record["form"])

    @property
    def reason(self) -> str:
        return str(self.record["reason"])

    @property
    def program(self) -> Program:
        """The program over the layers of the original."""
        return Program.parse(self.record["program"])

    @property
    def depth(self) -> float:
        """Number of layers one after the other."""
        return float(self.record["effective_depth"])

    def table(self) -> pd.DataFrame:
        """One row, as `surgeon show` says it first."""
        row = {
            "folder": str(self.folder),
            "form": self.form,
            "depth": self.depth,
            "syncs": self.program.sync_points(2),
            "bytes": self.size,
            "program": str(self.program),
        }
        return pd.DataFrame([row])

    def __str__(self) -> str:
        return (
            f"effective depth {self.depth:g}, {self.program.sync_points(2)} synchronisations per forward pass on two "
            f"ranks, {show_size(self.size)} of weights.\nProof: on {self.proof.tokens} random tokens the logits "
            f"differ from the original's under this program\n{self.proof.differ}"
        )

    def section(self) -> Iterator[Block]:
        record = self.record
        yield f"A checkpoint in {record['form']} form: {record.get('reason', '')}."
        layers = record["source"].get("num_layers")
        depth = record.get("effective_depth")
        when = "trained after the edit"
        if record["source"].get("model") is None:
            when = "trained"
        training = ""
        said = record.get("trained")
        if isinstance(said, dict) and all(
            isinstance(said.get(name), int) for name in ("steps", "tokens")
        ):
            steps = plural(said["steps"], "step")
            training = (
                f"{steps} on {said['tokens']:,} tokens of {said.get('data')}, {said.get('method')}"
            )
        rows = [
            [
                "effective depth",
                f"{depth:g} of {layers} layers" if isinstance(depth, int | float) and layers else "",
            ],
            ["synchronisations on two ranks", str(record.get("sync_points_on_two_ranks", ""))],
            [when, training],
        ]
        proof = record.get("proof", {})
        for key, text in _PROOF.items():
            value = proof.get(key, "")
            if not isinstance(value, str):
                value = number(float(value), 3)
            rows.append([text, value])
        yield Table("What was written", ["", ""], [row for row in rows if row[1]], left=(1,))
        yield from record_codes(record, program="Program", recipe="Recipe")

    def summary(self) -> Iterator[Finding]:
        record = self.record
        depth = record.get("effective_depth")
        layers = record["source"].get("num_layers")
        if isinstance(depth, int | float) and layers:
            syncs = record.get("sync_points_on_two_ranks")
            waits = ""
            if isinstance(syncs, int):
                waits = f" and {plural(syncs, 'synchronisation')} on two ranks"
            text = f"{self.name}: {record['form']} form, with an effective depth of {depth:g} of {layers}{waits}."
            yield Finding("Exported", text)


def from_scratch(data: Any) -> str:
    """The name of models from scratch, in place of an original's: their training text."""
    return f"models from scratch on {data}"
