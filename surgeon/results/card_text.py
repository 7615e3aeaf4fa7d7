"""Pieces of markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

WIDTH = 100


def paragraph(text: str) -> str:
    """A paragraph, in lines that people can read in an editor."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def bullet(text: str) -> str:
    """An entry of a list."""
    return textwrap.indent(paragraph(text), "  ").replace(" ", "-", 1)


def code(text: str, language: str = "") -> str:
    """A block of code."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def joined(words: Iterable[str], width: int) -> Iterator[str]:
    """Lines of words that stay whole, with spaces between them."""
    line = ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}".lstrip()
    yield line


def link(text: str, target: str) -> str:
    """A link; what would end it early is written so that it does not."""
    text = " ".join(text.split()).replace("[", "(").replace("]", ")")
    return f"[{text}](<{target.replace('<', '%3C').replace('>', '%3E')}>)"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table: its first column to the left, the others, which are numbers, to the right."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
