"""Options of several values: with commas between, or the option again, in every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from surgeon.commands.app import app, main
from surgeon.named import split_values

# Whose values are texts of their own, with commas that mean something.
WHOLE = {"--prompt", "--stop", "--trainer-arg"}
NUMBERS = {("check", "--ranks"), ("calibrate", "--ranks"), ("bench", "--batch"), ("predict", "--batch")}
GROUP: Any = typer.main.get_command(app)
OPTIONS = [
    pytest.param(name, option, id=f"{name} {option.opts[0]}")
    for name, command in GROUP.commands.items()
    for option in command.params
    if getattr(option, "multiple", False)
]


def given(name: str, option: Any, *values: str) -> list[str]:
    """What a command gets of an option that is there once for each of some values."""
    arguments = [part for value in values for part in (option.opts[0], value)]
    context = GROUP.commands[name].make_context(name, arguments, resilient_parsing=True)
    return [*map(str, context.params[option.name])]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_every_list_takes_commas_and_repeats(name: str, option: Any) -> None:
    if (name, option.opts[0]) in NUMBERS:
        assert given(name, option, "1", "2,4") == ["1", "2", "4"]
        return
    split = ["b,c"] if option.opts[0] in WHOLE else ["b", "c"]
    assert given(name, option, "a", "b,c") == ["a", *split]


def test_options_whose_help_speaks_of_several_take_several() -> None:
    single = [
        f"{name} {option.opts[0]}"
        for name, command in GROUP.commands.items()
        for option in command.params
        if "by commas" in (getattr(option, "help", None) or "") and not option.multiple
    ]
    assert single == []
    assert {parameter.id for parameter in OPTIONS} >= {
        "scan --operation",
        "search --space",
        "search --budget",
        "search --objective",
        "search --using",
        "eval --tasks",
        "spectrum --ranks",
        "spectrum --weights",
        "check --ranks",
        "calibrate --ranks",
        "bench --batch",
        "predict --sweep",
        "heal --racks",
        "heal --data",
    }


def test_values_that_hold_commas_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a, b.jsonl").touch()
    program = "A0@q8,k4 F0@gate8,up8 [A1 A2]"
    assert split_values([program, "lp,tracks:4"]) == [program, "lp", "tracks:4"]
    assert split_values(["a, b.jsonl", "a, b.jsonl:text", "a, b.jsonl=0.7"]) == [
        "a, b.jsonl",
        "a, b.jsonl:text",
        "a, b.jsonl=0.7",
    ]
    assert split_values(["x.txt=0.7, y.txt=0.3,", "z"]) == ["x.txt=0.7", "y.txt=0.3", "z"]


def test_numbers_of_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    (batch,) = (option for option in GROUP.commands["bench"].params if option.opts[0] == "--batch")
    assert given("bench", batch, "8", "1", "8") == ["8", "1"]
    for wrong in ("0", "-1", "x", "1.5"):
        assert main(["bench", "demo", "--batch", f"1,{wrong}"]) == 2
        assert (
            f"error: Invalid value for '--batch': '{wrong}' is no whole number from 1; write numbers such as"
            in capsys.readouterr().err
        )
