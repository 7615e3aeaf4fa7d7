"""A program as a picture that notebooks show: boxes in the order in which they run, side by side what reads alike."""

from __future__ import annotations

from html import escape

from surgeon.language.program import Node, Program, Step
from surgeon.language.sublayer import ATTENTION

_COLOURS = {True: "#cfe2f3", False: "#fce5cd"}  # attentions, and MLPs
_BOX = "border:1px solid #888;border-radius:3px;padding:1px 5px;margin:1px;color:#000;white-space:nowrap;"
_COLUMN = "display:inline-flex;flex-direction:column;vertical-align:middle;margin:2px;"


def program_html(program: Program) -> str:
    """HTML without scripts: sublayers of one step in a column (late ones dashed), branches of a fork in rows."""
    steps = f"{len(program.nodes)} steps and forks, {program.effective_depth(1):g} one after the other"
    return f'<div style="font:12px monospace;line-height:1.5">{_row(program.nodes)}<div>{steps}</div></div>'


def _row(nodes: tuple[Node, ...]) -> str:
    return "".join(_step(node) if isinstance(node, Step) else _fork(node.branches) for node in nodes)


def _step(step: Step) -> str:
    border = "border-style:dashed;" if step.late else ""
    boxes = (
        f'<span style="{_BOX}{border}background:{_COLOURS[one.kind == ATTENTION]}">{escape(str(one))}</span>'
        for one in step.sublayers
    )
    return f'<span style="{_COLUMN}" title="{escape(str(step))}">{"".join(boxes)}</span>'


def _fork(branches: tuple[tuple[Node, ...], ...]) -> str:
    rows = "".join(f"<span>{_row(branch)}</span>" for branch in branches)
    return f'<span style="{_COLUMN}border:1px solid #888;border-radius:6px;padding:2px">{rows}</span>'
