"""Each thing of a command is said in one place: its result is one type, an option that several have one declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from surgeon.commands.app import COMMANDS
from surgeon.commands.command import Declaration, declared


def declarations(function: Callable[..., Any]) -> Iterator[Declaration]:
    """Of a command or of what makes a parameter of options."""
    for one in declared(function):
        if one.option.made_by is None:
            yield one.option
        else:
            yield from declarations(one.option.made_by)


def commands() -> dict[str, Callable[..., Any]]:
    return {command.__name__: command for command, _ in COMMANDS}


def test_a_command_has_one_type_of_result() -> None:
    results = {name: inspect.unwrap(command).__annotations__["return"] for name, command in commands().items()}
    assert results == {
        "explore": "Exploration",
        "check": "Check",
        "families": "FamilyTable",
        "search": "SearchResult",
        "scan": "Scan",
        "similarity": "Similarity",
        "sensitivity": "Sensitivity",
        "spectrum": "Spectrum",
        "heal": "HealRun | None",
        "train": "ScratchRun | None",
        "export": "Exported",
        "show": "None",
        "card": "Path",
        "evaluate": "Evaluation",
        "generate": "Generation",
        "chat": "Conversation",
        "serve": "None",
        "bench": "Benchmark",
        "predict": "Predictions",
        "calibrate": "Hardware",
        "report": "ReportPage",
        "demo": "None",
    }


def test_an_option_is_declared_in_one_place() -> None:
    places: dict[str, set[int]] = {}
    for command in commands().values():
        for one in declarations(command):
            places.setdefault(one.help, set()).add(id(one))
    assert [text for text, declared_at in places.items() if len(declared_at) > 1] == []
