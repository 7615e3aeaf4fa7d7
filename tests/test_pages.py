"""The pages for readers: every link leads somewhere, and every command that they show is one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter, Exit
from typer.main import get_command

from scripts.docs import blocks as code
from surgeon.commands.app import COMMANDS, app
from surgeon.language.operations import OPERATIONS

(UsageError,) = BadParameter.__bases__  # of typer's own click, whose module is private

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
    for heading in re.findall(
        r"^#+ (.*)$", _FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE
    ):
        words = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        again = sum(
            name == words or re.fullmatch(rf"{re.escape(words)}-\d+", name) is not None for name in found
        )
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


@cache
def parser() -> Any:
    return get_command(app)


def wrong_call(words: list[str], whole: bool) -> str | None:
    """What the command line would refuse of arguments that a page gives to surgeon, by its real parser.

    Args:
        whole: it is to be run as it stands; else an example of some options, which may lack what is required.
    """
    name, *arguments = words or [""]
    if not re.fullmatch(r"[a-z]+", name):  # `surgeon` itself, COMMAND, --help
        return None
    if name not in parser().commands:
        return f"there is no command {name}"
    try:
        parser().commands[name].make_context(name, arguments)
    except Exit:  # --help
        return None
    except UsageError as error:
        lacks = type(error).__name__ == "MissingParameter" or "requires an argument" in str(error)
        return None if lacks and (not whole or "..." in words) else error.format_message()
    return None


def wrong_flags(path: Path, arguments: list[str]) -> list[str]:
    """The options that a script does not have, by its source and by that of the scripts that it imports."""
    if not path.exists():
        return [f"there is no {path.relative_to(PROJECT)}"]
    if path.is_dir():
        return []
    files = [*sources(path), *([PROJECT / "tests" / "conftest.py"] if path.name == "test" else [])]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    flags = {word.partition("=")[0] for word in arguments if word.startswith("--") and word != "--help"}
    return [
        flag
        for flag in sorted(flags)
        if not re.search(rf"{re.escape(flag)}\b|\b{flag[2:].replace('-', '_')}=", source)
    ]


def sources(path: Path, seen: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """A script, what it hands its arguments to, and the scripts that these import."""
    if path in seen or not path.is_file():
        return
    yield path
    for other in re.findall(r"scripts[./](\w+)[./](\w+)", path.read_text(encoding="utf-8")):
        yield from sources(PROJECT / "scripts" / other[0] / f"{other[1]}.py", seen | {path})
    if not path.suffix:
        yield from (
            file
            for file in path.parent.glob("*.py")
            if f"{file.name}" in path.read_text(encoding="utf-8")
        )


def shown(page: str) -> Iterator[tuple[list[str], bool]]:
    """The commands of a page, and whether they stand in a block."""
    for block in code.blocks(page):
        if block.language in code.SHELL:
            yield from ((words, True) for words in code.commands(block.code))
    yield from ((words, False) for span in code.spans(page) for words in code.commands(span))


@pytest.mark.parametrize("page", code.pages())
def test_commands_are_what_the_parser_takes(page: str) -> None:
    found = []
    for words, whole in shown(page):
        found += [(call, wrong) for call in code.calls(words) if (wrong := wrong_call(call, whole))]
        if (script := code.script(words)) is not None:
            found += [(words, wrong) for wrong in wrong_flags(*script)]
    assert found == []


def test_commands_are_found_and_wrong_ones_are_noticed() -> None:
    shown_calls = [
        call
        for page in code.pages()
        for words, whole in shown(page)
        if whole
        for call in code.calls(words)
    ]
    assert len(shown_calls) > 70
    assert {call[0] for call in shown_calls} >= {
        "scan",
        "search",
        "export",
        "heal",
        "train",
        "serve",
        "predict",
    }
    started, _ = code.commands(
        "torchrun --nnodes 2 bash -c 'x=1 exec surgeon eval demo --dota demo' & wait"
    )
    assert "No such option: --dota" in str(wrong_call(*code.calls(started), True))
    assert wrong_call(["scan", "demo", "--batch", "many"], True) is not None
    assert wrong_call(["heal", "...", "--lora", "8"], True) is None
    assert wrong_call(["export", "recipe.yaml"], True) is not None
    assert wrong_call(["export", "recipe.yaml"], False) is None
    assert wrong_call(["scam", "demo"], False) == "there is no command scam"
    assert wrong_flags(PROJECT / "scripts/bench/drafts.py", ["--linkz", "1ms", "--batch", "1"]) == [
        "--linkz"
    ]
    assert wrong_flags(PROJECT / "scripts/bench/gone.py", []) == ["there is no scripts/bench/gone.py"]


def rows(page: str, column: str) -> dict[str, str]:
    """The rows of a page's table with that first column, by the names in code that they begin with."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    table = text.partition(f"\n| {column} |")[2].partition("\n\n")[0]
    found = (row.strip("|").partition("|") for row in table.splitlines()[2:])
    return {name: rest for names, _, rest in found for name in re.findall(r"`([^`]+)`", names)}


def test_the_page_of_recipes_has_every_operation_with_its_parameters() -> None:
    found = rows("docs/recipes.md", "operation")
    assert found.keys() == OPERATIONS.keys()
    for name, row in found.items():
        named = set(re.findall(r"`(\w+)`", row.rpartition("|")[2]))
        takes = OPERATIONS[name].parameters.model_fields.keys() - {"layers", "shapes"}
        assert named <= takes, f"{name} does not take {named - takes}"
        assert takes - named <= {"allocation"}, f"{name} takes {takes - named}, too"


def test_the_readme_is_short_and_has_every_command() -> None:
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 200
    assert len((PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 150
    listed = {name.removeprefix("surgeon ") for name in rows("README.md", "command")}
    assert listed == {
        "eval" if function.__name__ == "evaluate" else function.__name__ for function, _ in COMMANDS
    }


def test_the_index_leads_to_every_page_of_docs() -> None:
    index = {
        target.partition("#")[0]
        for target in links((PROJECT / "docs/README.md").read_text(encoding="utf-8"))
    }
    assert {path.name for path in PROJECT.glob("docs/*.md")} - {"README.md"} <= index
