"""Explorations: what to do next, with the commands for it, and what was done in which time."""

from __future__ import annotations

from collections.abc import Iterator

from surgeon.findings.blocks import Block, Code, Finding, Paragraph, Table
from surgeon.findings.explore import ExploreRun
from surgeon.findings.runs import Kind, Run
from surgeon.progress import clock


def _show(run: Run[ExploreRun]) -> Iterator[Block]:
    for number, one in enumerate(run.found.next_steps, start=1):
        yield Code(f"{number}. {one.what}", one.command, one.why)
    yield Paragraph("Commands are for the folder in which the exploration was started.")
    steps = run.found.steps
    rows = [
        [str(name), clock(float(seconds)), str(did)]
        for name, seconds, did in zip(steps["step"], steps["seconds"], steps["did"], strict=True)
    ]
    caption = f"What was done in {clock(run.found.spent)} of {run.found.minutes:g} minutes"
    yield Table(caption, ["step", "time", "on what, and what it gave"], rows, left=frozenset({2}))


def _findings(run: Run[ExploreRun]) -> Iterator[Finding]:
    tokens = run.record.get("plan", {}).get("tokens")
    if tokens:
        spent = f"{clock(run.found.spent)} of {run.found.minutes:g} minutes"
        text = f"In {spent}, on {tokens:,} tokens of {run.record['data']}. What to do next is below."
        yield Finding("Explored", text)


def _missing(run: Run[ExploreRun]) -> Iterator[str]:
    for line in (*run.found.left_out, *filter(None, [run.found.slowed])):
        yield f"{line[:1].upper()}{line[1:]}."


EXPLORATION = Kind(ExploreRun, "What to do next", _show, _findings, _missing, of_surgery=False)
