"""What a search has found: its trials, what edits do alone, its front, and quality against depth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pandas as pd

from surgeon.results.result import RunResult, TableFile


@dataclass(frozen=True)
class SearchRun(RunResult):
    """The result of `search`.

    Attributes:
        trials: one row per trial, in the order they were asked for, as in `trials.csv`.
        terms: what each edit does alone, as in `terms.csv`.
        front: the programs that no other is better than, as in `front.csv`; empty with one objective.
        depths: the least divergence at every effective depth, as in `depths.csv`; empty unless it looked along depth.
        recipe: the winner's, as YAML.
    """

    COMMAND = "search"
    RECORD = "search.json"
    TABLES: ClassVar = {
        "trials": TableFile("trials.csv", ("trial", "depth", "perplexity", "divergence"), ("source",), missing=""),
        "terms": TableFile(
            "terms.csv", ("divergence",), ("edit", "space"), ("first", "last"), optional=True, missing=""
        ),
        "front": TableFile(
            "front.csv", ("point", "trial", "divergence"), ("edits",), optional=True, may_be_empty=True, missing=""
        ),
        "depths": TableFile(
            "depths.csv", ("depth", "divergence"), ("space", "edits"), optional=True, may_be_empty=True, missing=""
        ),
    }
    TEXTS: ClassVar = {"recipe": "recipe.yaml"}

    trials: pd.DataFrame
    terms: pd.DataFrame = field(default_factory=pd.DataFrame)
    front: pd.DataFrame = field(default_factory=pd.DataFrame)
    depths: pd.DataFrame = field(default_factory=pd.DataFrame)
    recipe: str = ""
