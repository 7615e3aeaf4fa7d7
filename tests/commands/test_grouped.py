"""Groups of options: each field is an option of the command line, and the command gets the group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from surgeon.cli.grouped import grouped


@dataclass(frozen=True)
class Paint:
    """What to paint with."""

    colour: Annotated[str, typer.Option("--colour", help="Which.")]
    coats: Annotated[int, typer.Option(min=1, help="How many.")] = 1


SEEN: list[Any] = []


@grouped
def paint(wall: Annotated[str, typer.Argument()], *, using: Paint, dry: bool = False) -> None:
    """Paint a wall."""
    SEEN[:] = [wall, using, dry]


APP = typer.Typer()
APP.command()(paint)


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["north", "--colour", "red"], ["north", Paint("red", 1), False]),
        (["north", "--coats", "3", "--dry", "--colour", "blue"], ["north", Paint("blue", 3), True]),
    ],
)
def test_the_command_gets_the_group(arguments: list[str], seen: list[Any]) -> None:
    result = CliRunner().invoke(APP, arguments)
    assert (result.exit_code, SEEN) == (0, seen)


def test_fields_are_options_like_all_others() -> None:
    text = CliRunner().invoke(APP, ["--help"]).output
    assert "Paint a wall." in text
    assert text.index("--colour") < text.index("--coats") < text.index("--dry")
    assert CliRunner().invoke(APP, ["north"]).exit_code == 2  # a field without a default is required
    assert CliRunner().invoke(APP, ["north", "--colour", "red", "--coats", "0"]).exit_code == 2


def test_other_code_calls_it_like_any_function() -> None:
    """As `surgeon demo` calls `surgeon generate`: what is left out has its default."""
    paint("south", colour="green", dry=True)
    assert list(SEEN) == ["south", Paint("green", 1), True]
