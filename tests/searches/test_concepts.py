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
            if "search" in module.name and not module.name.endswith("search_worker"):
                own = vars(importlib.import_module(module.name)).values()
                found |= {one for one in own if isinstance(one, type) and dataclasses.is_dataclass(one)}
    return found


def test_a_question_is_one_type() -> None:
    asking = {one for one in records() if {field.name for field in dataclasses.fields(one)} & WORDS == WORDS}
    assert asking == {Question}


def test_a_question_goes_to_workers_as_json() -> None:
    question = Question("pair", "depth=3", using=("a", "b"), trials=7)
    assert Question.from_json(json.loads(json.dumps(dataclasses.asdict(question)))) == question
