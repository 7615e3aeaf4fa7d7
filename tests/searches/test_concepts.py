"""A concept of a search has one type."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil

import surgeon.commands
import surgeon.searches
from surgeon.searches.question import Question

WORDS = {"space", "budget", "objective"}  # of a user's question


def records() -> set[type]:
    """All dataclasses of the rooms of a search."""
    found: set[type] = set()
    for room in (surgeon.searches, surgeon.commands):
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            if "search" in module.name:
                own = vars(importlib.import_module(module.name)).values()
                found |= {one for one in own if isinstance(one, type) and dataclasses.is_dataclass(one)}
    return found


def test_a_question_is_one_type() -> None:
    asking = {
        one for one in records() if {field.name for field in dataclasses.fields(one)} & WORDS == WORDS
    }
    assert asking == {Question}


def test_what_is_asked_and_what_it_costs_are_few_types() -> None:
    """A user's words; the same on a model; and what programs of the model cost, which has the limits to keep, too."""
    own = [one for one in records() if one.__module__.startswith("surgeon.searches")]
    words = ("Question", "Pric", "Budget", "Setting", "Problem", "Asked")
    named = {one.__name__ for one in own if any(word in one.__name__ for word in words)}
    assert named == {"Question", "PricedQuestion", "Pricing"}
    limited = {one.__name__ for one in own if "limits" in vars(one) or hasattr(one, "shortfalls")}
    assert limited == {"Question", "Pricing"}


def test_a_question_goes_to_workers_as_json() -> None:
    question = Question("pair", "depth=3", using=("a", "b"), trials=7)
    assert Question.from_json(json.loads(json.dumps(dataclasses.asdict(question)))) == question
