"""What was predicted of programs on described hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pandas as pd

from surgeon.results.result import RunResult, TableFile


@dataclass(frozen=True)
class PredictRun(RunResult):
    """The result of `predict`.

    Attributes:
        cells: one row per program, ranks and load, as in `predict.csv`.
    """

    COMMAND = "predict"
    RECORD = "predict.json"
    TABLES: ClassVar = {
        "cells": TableFile(
            "predict.csv",
            (
                *("ranks", "batch", "prompt", "new", "first_token_ms", "per_token_ms", "tokens_per_second"),
                *("communication_share", "needed_bytes", "there_bytes", "fits"),
                *("first_token_speedup", "per_token_speedup", "tokens_per_second_speedup"),
            ),
            ("program",),
        )
    }

    cells: pd.DataFrame
