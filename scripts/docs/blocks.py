"""Blocks of code in Markdown pages, and the commands in them.

A fenced block that is marked `bash` or `python` is run by `scripts/docs/run`, unless a comment `<!-- not run: why -->`
stands before it; other blocks (`sh`, `text`, `yaml`, indented ones, code within a sentence) are only read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, groupby
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PATTERNS = ("*.md", "docs/*.md", "recipes/*.md")
SHELL = ("", "sh", "bash")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n) {4}[^\n]*\n(?: {4}[^\n]*\n|\n(?= {4}))*")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_NOT_RUN = re.compile(r"<!-- not run: ([^\n]*) -->\s*\Z")
_BETWEEN = {"&", "&&", "|", "||", ";", ">", ">>", "<", "2>"}
# These may stand in front of a command.
_BEFORE = re.compile(r"\w+=.*|exec|time|nice|bash|python3?|\S*/bin/python")


@dataclass(frozen=True)
class Block:
    """Code on a page.

    Attributes:
        page: its path from the project's folder.
        line: where it begins, counted from 1.
        language: of a fence; "" where it is indented or has none.
        output: what the page says that it prints: the block marked `text` behind it, if there is one.
        not_run: why it is not run, where the page says so.
    """

    page: str
    line: int
    language: str
    code: str
    output: str | None = None
    not_run: str | None = None


def pages() -> list[str]:
    """The pages for readers, by their paths from the project's folder; the changelog tells of commands that were."""
    found = (
        path.relative_to(PROJECT).as_posix() for pattern in PATTERNS for path in PROJECT.glob(pattern)
    )
    return sorted(page for page in found if page != "CHANGELOG.md")


def blocks(page: str) -> list[Block]:
    """Fenced and indented blocks of a page, in their order."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    fences = list(_FENCE.finditer(text))
    found = []
    for place, fence in enumerate(fences):
        behind = fences[place + 1] if place + 1 < len(fences) else None
        output = (
            _outdented(behind[3], len(behind[1])) if behind is not None and behind[2] == "text" else None
        )
        before = _NOT_RUN.search(text[: fence.start()])
        line = text.count("\n", 0, fence.start()) + 2
        code = _outdented(fence[3], len(fence[1]))
        found.append(Block(page, line, fence[2], code, output, None if before is None else before[1]))
    unfenced = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    found += [
        Block(page, unfenced.count("\n", 0, part.start()) + 1, "", _outdented(part[0], 4))
        for part in _INDENTED.finditer(unfenced)
    ]
    return sorted(found, key=lambda one: one.line)


def spans(page: str) -> Iterator[str]:
    """Code within the sentences of a page, each on one line."""
    text = _FENCE.sub("", (PROJECT / page).read_text(encoding="utf-8"))
    yield from (" ".join(span.split()).replace("\\|", "|") for span in _SPAN.findall(text))


def commands(code: str) -> Iterator[list[str]]:
    """The words of each command of shell code, without comments, and without what stands in front of its name."""
    for line in code.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a sentence with an apostrophe
            continue
        for between, part in groupby(words, _BETWEEN.__contains__):
            if not between and (command := list(dropwhile(_BEFORE.fullmatch, part))):
                yield command


def calls(words: list[str]) -> Iterator[list[str]]:
    """What a command gives to `surgeon`, also where torchrun or `bash -c` starts it; the name of ours comes first."""
    if "surgeon.commands" in words:
        yield words[words.index("surgeon.commands") + 1 :]
    elif "--no-python" in words:
        yield words[words.index("--no-python") + 2 :]
    elif words[0] == "surgeon":
        yield words[1:]
    for word in words[1:]:
        if " surgeon" in word:
            yield from (call for command in commands(word) for call in calls(command))


def script(words: list[str]) -> tuple[Path, list[str]] | None:
    """The script of the project that a command runs, with its arguments; None where it runs none."""
    name = words[0].removeprefix("./")
    if name.startswith("scripts/"):
        return (PROJECT / name, words[1:])
    return None


def _outdented(code: str, by: int) -> str:
    if by:
        return re.sub(rf"^ {{1,{by}}}", "", code, flags=re.MULTILINE)
    return code
