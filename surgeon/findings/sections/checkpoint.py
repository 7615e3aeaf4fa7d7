"""Exported checkpoints: what was done, and how it was proven."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surgeon.findings.blocks import Block, Code, Finding, Paragraph, Table
from surgeon.findings.exported import ExportRun
from surgeon.findings.runs import Kind, Run
from surgeon.words import number, plural


def _show(run: Run[ExportRun]) -> Iterator[Block]:
    record = run.record
    yield Paragraph(f"A checkpoint in {record['form']} form: {record.get('reason', '')}.")
    layers = record["source"].get("num_layers")
    depth = record.get("effective_depth")
    rows = [
        ["effective depth", f"{depth:g} of {layers} layers" if isinstance(depth, int | float) and layers else ""],
        ["synchronisations on two ranks", str(record.get("sync_points_on_two_ranks", ""))],
        [
            "trained" if record["source"].get("model") is None else "trained after the edit",
            _training(record.get("trained")),
        ],
        *_proof(record.get("proof", {})),
    ]
    yield Table("What was written", ["", ""], [row for row in rows if row[1]], left=frozenset({1}))
    yield Code("Program", str(record.get("program", "")))
    if record.get("recipe"):
        yield Code("Recipe", str(record["recipe"]))


def _training(said: Any) -> str:
    if not isinstance(said, dict) or not all(isinstance(said.get(name), int) for name in ("steps", "tokens")):
        return ""
    return f"{plural(said['steps'], 'step')} on {said['tokens']:,} tokens of {said.get('data')}, {said.get('method')}"


def _proof(proof: dict[str, Any]) -> list[list[str]]:
    words = {
        "exact": "largest logit difference, relative, before rounding",
        "written": "largest logit difference, relative, as written",
        "tokens": "random tokens both were run on",
        "dtype": "weights that had to be computed are stored as",
    }
    return [
        [text, v if isinstance(v := proof.get(key, ""), str) else number(float(v), 3)] for key, text in words.items()
    ]


def _findings(run: Run[ExportRun]) -> Iterator[Finding]:
    record = run.record
    depth, layers = record.get("effective_depth"), record["source"].get("num_layers")
    if isinstance(depth, int | float) and layers:
        syncs = record.get("sync_points_on_two_ranks")
        waits = f" and {plural(syncs, 'synchronisation')} on two ranks" if isinstance(syncs, int) else ""
        text = f"{run.name}: {record['form']} form, with an effective depth of {depth:g} of {layers}{waits}."
        yield Finding("Exported", text)


CHECKPOINT = Kind(ExportRun, "Checkpoint", _show, _findings)
