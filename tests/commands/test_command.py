"""One declaration: options of the command line, the section Args, and checks follow from a function's signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import pytest
import typer
from typer.testing import CliRunner

from surgeon.commands.command import command, line_of, option, several

SEEN: list[Any] = []


def _colour(
    red: Annotated[int, option("How red.", "--red")] = 0, warm: Annotated[bool, option("Warm.")] = False
) -> str:
    return f"{red} {'warm' if warm else 'cold'}"


def _show(call: Callable[[], str], twice: Annotated[bool, option("Say it twice.")] = False) -> int:
    said = call()
    print(said, said if twice else "")
    return 3


class Weather(TypedDict, total=False):
    wind: Annotated[int, option("How strong.", least=0, default=3)]


@command(_show)
def paint(
    wall: Annotated[str | Path, option("The wall.", kind=str)],
    *,
    coats: Annotated[int | None, option("How many, as --tools allow.", least=1)] = None,
    tools: Annotated[str | Sequence[str], several("What with.", "--tool")] = ("brush",),
    sizes: Annotated[Sequence[int], several("Of them.")] = (1, 2),
    dry: Annotated[bool, option("Let it not dry.")] = True,
    how: Annotated[Literal["fast", "slow"], option("How.")] = "fast",
    colour: Annotated[str | int, option("The colour.", made_by=_colour)] = 5,
    on_end: Callable[[], None] | None = None,
    **weather: Unpack[Weather],
) -> str:
    """Paint a wall.

    Well.

    Raises:
        ValueError: if there is none.
    """
    SEEN[:] = [wall, coats, tools, sizes, dry, how, colour, on_end, weather.get("wind")]
    return f"painted {wall}"


APP = typer.Typer()
APP.command()(line_of(paint))


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["north"], ["north", None, ("brush",), (1, 2), True, "fast", "5 cold", None, 3]),
        (
            [
                "--coats",
                "3",
                "--tool",
                "a,b",
                "--tool",
                "c",
                "--no-dry",
                "--warm",
                "--sizes",
                "8,1,8",
                "south",
            ],
            ["south", 3, ["a", "b", "c"], [8, 1], False, "fast", "5 warm", None, 3],
        ),
    ],
)
def test_the_function_gets_the_options(arguments: list[str], seen: list[Any]) -> None:
    result = CliRunner().invoke(APP, arguments, standalone_mode=False)
    assert (result.return_value, SEEN) == (3, seen)


def test_options_of_the_command_line_alone() -> None:
    assert CliRunner().invoke(APP, ["north", "--twice"]).output == "painted north painted north\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["north", "--coats", "0"],
        ["north", "--how", "well"],
        *(["north", "--sizes", sizes] for sizes in ("0", "x", ",")),
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(APP, arguments).exit_code == 2


def test_it_stays_a_function() -> None:
    assert paint("east", coats=2, tools="roller", colour="red", dry=False) == "painted east"
    assert SEEN == ["east", 2, "roller", (1, 2), False, "fast", "red", None, None]
    with pytest.raises(ValueError, match="coats must be a number, not '2'"):
        paint("north", coats="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tools must be a text or a sequence, not 5"):
        paint("north", tools=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sizes must be a sequence, not '12'"):
        paint("north", sizes="12")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wall must be a text or a path, not None"):
        paint(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="coats must be at least 1, not 0"):
        paint("east", coats=0)
    with pytest.raises(ValueError, match="wind must be at least 0, not -1"):
        paint("east", wind=-1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'coat'"):
        paint("east", coat=1)  # type: ignore[call-arg]


def test_the_docstring_has_the_help() -> None:
    assert paint.__doc__ is not None
    assert paint.__doc__.startswith(
        "Paint a wall.\n\nWell.\n\nArgs:\n    wall: The wall.\n    coats: How many, as `tools` "
    )
    assert "as `tools` allow." in paint.__doc__
    assert paint.__doc__.endswith(
        "\n    colour: The colour.\n    wind: How strong.\n\nRaises:\n    ValueError: if there is none."
    )
    assert "Raises" not in CliRunner().invoke(APP, ["--help"]).output


def test_an_empty_name_of_an_output_is_refused() -> None:
    """As of a variable of the shell that is not set; it would be the folder that one is in."""

    @command()
    def write(output: Annotated[str | Path, option("Where.", "--output", "-o")] = "there") -> str:
        return str(output)

    app = typer.Typer()
    app.command()(line_of(write))
    assert CliRunner().invoke(app, ["-o", "."]).output == ".\n"
    assert str(CliRunner().invoke(app, ["-o", ""]).exception) == "output is empty; say where to write"
    with pytest.raises(ValueError, match="output is empty; say where to write"):
        write("")


def test_a_text_from_python_is_one() -> None:
    @command()
    def call(
        name: Annotated[str, option("Of whom.")], budget: Annotated[str | None, option("Up to.")] = None
    ) -> str:
        return f"{name} {budget}"

    assert call("one", "two") == "one two"
    with pytest.raises(ValueError, match="name must be a text, not 5"):
        call(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget must be a text, not 5"):
        call("one", 5)  # type: ignore[arg-type]
