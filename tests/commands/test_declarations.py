"""Each thing of a command is said in one place: its result is one type, an option that several have one declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from surgeon.commands.app import COMMANDS
from surgeon.commands.command import Declaration, declared_options
from surgeon.commands.heal import TrainFlags
from surgeon.commands.options import SamplingFlags, ServiceFlags
from surgeon.quality import DEFAULT_TOKENS, data
from surgeon.runtime.batching.request import Sampling
from surgeon.runtime.service import ServiceOptions
from surgeon.searches.question import Question
from surgeon.training.settings import TrainSettings


def declarations(function: Callable[..., Any]) -> Iterator[Declaration]:
    """Of a command or of what makes a parameter of options."""
    for one in declared_options(function):
        if one.option.made_by is None:
            yield one.option
        else:
            yield from declarations(one.option.made_by)


def commands() -> dict[str, Callable[..., Any]]:
    return {command.__name__: command for command, _ in COMMANDS}


def test_a_command_has_one_type_of_result() -> None:
    results = {
        name: inspect.unwrap(command).__annotations__["return"] for name, command in commands().items()
    }
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
        "export": "ExportRun",
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


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("generate", ServiceOptions),
        ("generate", Sampling),
        ("serve", ServiceOptions),
        ("search", Question),
    ],
)
def test_options_have_the_defaults_of_what_they_are_passed_on_to(command: str, kind: Any) -> None:
    """Of those that only the command says something else of, the field's own is not looked at."""
    own = {"generate": ("max_batch", "max_new_tokens"), "serve": (), "search": ("output",)}[command]
    fields = {
        name: one.default for name, one in inspect.signature(kind).parameters.items() if name not in own
    }
    given = {
        one.name: one.default for one in declared_options(commands()[command]) if one.name in fields
    }
    expected = {name: fields[name] for name in given} | ({"ranks": 1} if kind is ServiceOptions else {})
    assert given | ({"repetition_penalty": 1.0} if kind is Sampling else {}) == expected


def test_a_group_is_passed_on_whole() -> None:
    assert set(ServiceFlags.__annotations__) <= set(inspect.signature(ServiceOptions).parameters)
    assert set(SamplingFlags.__annotations__) <= set(inspect.signature(Sampling).parameters)
    assert set(TrainFlags.__annotations__) <= set(inspect.signature(TrainSettings).parameters)
    assert data.DEFAULT_TOKENS == DEFAULT_TOKENS
    for name in ("generate", "chat", "serve"):
        assert set(ServiceFlags.__annotations__) <= set(inspect.signature(commands()[name]).parameters)
