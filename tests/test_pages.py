"""The pages for readers: every link leads somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(PROJECT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "recipes/**/*.md")
    for path in PROJECT.glob(pattern)
)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!`)\[[^\][]*\]\(([^()\s]+)\)")


def links(text: str) -> list[str]:
    """The targets of a page's links and pictures, but for those that stand in code."""
    return _LINK.findall(re.sub(r"`[^`\n]*`(?!\])", "", _FENCED.sub("", text)))


@cache
def anchors(path: Path) -> frozenset[str]:
    """What links to the headings of a page, as GitHub makes it of their words."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", _FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        again = sum(name == words or re.fullmatch(rf"{re.escape(words)}-\d+", name) is not None for name in found)
        found.append(f"{words}-{again}" if again else words)
    return frozenset(found)


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    found = []
    for target in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert broken(PROJECT / page) == []


def test_pages_are_found_and_link_to_each_other() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/measured.md", "docs/gpus.md"} <= set(PAGES)
    assert sum(len(links((PROJECT / page).read_text(encoding="utf-8"))) for page in PAGES) > 60


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Two words, and `code`\n## Again\n## Again\n"
        "[a](#two-words-and-code) [b](#again-1) [c](#again-2) [d](page.md)\n"
        "[e](gone.md) [f](page.md#gone) ![g](gone.png) [h](https://x.org/gone) `[i](code.md)` [`j`](gone.txt)\n"
        "```\n# no heading\n[k](gone.md)\n```\n[l](#no-heading)\n"
    )
    assert broken(page) == ["#again-2", "gone.md", "page.md#gone", "gone.png", "gone.txt", "#no-heading"]
