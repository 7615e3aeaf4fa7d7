"""What scripts about searches are given on their command lines, as far as several are given the same."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path

import optuna

from surgeon.searches.samplers import SURGEON, make_sampler
from surgeon.searches.search import Search
from surgeon.searches.study import counted, run_trials
from surgeon.searches.trial import Trial


def to_output(description: str | None) -> ArgumentParser:
    """Of a script that keeps what it finds in a folder."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser


def to_heal(description: str | None) -> ArgumentParser:
    """Of one that heals a model's programs on a text, and judges them on another."""
    parser = to_output(description)
    parser.add_argument("model")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--heal-data", required=True)
    return parser


def to_search_cells(description: str | None, cells: int) -> ArgumentParser:
    """Of one that searches models on texts, each for some of so many questions."""
    parser = to_output(description)
    parser.add_argument("models", nargs="+", metavar="MODEL=TEXT")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--cells", type=int, nargs="*", default=range(cells), help=f"which of the {cells}, from 0")
    return parser


def try_programs(
    search: Search,
    trials: int,
    sampler: str = SURGEON,
    seed: int = 0,
    tell: Callable[[object], object] = lambda _: None,
) -> list[Trial]:
    """Run a search in a study in memory."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    directions = ["minimize"] * len(search.question.settings.recorded)
    study = optuna.create_study(directions=directions, sampler=make_sampler(search, sampler, seed))
    run_trials(study, search.objective, trials, None, tell)
    return search.finished(counted(study))
