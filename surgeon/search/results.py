"""The files a search leaves: recipe.yaml, trials.csv, search.json and quality-against-depth.png."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from surgeon.provenance import write_json, write_table, write_text
from surgeon.recipe import Expect, Recipe
from surgeon.search.space import as_operation
from surgeon.search.study import MeasuredProgram, PairStudy, Trial

RECIPE_FILE, TRIALS_FILE, RECORD_FILE = "recipe.yaml", "trials.csv", "search.json"


def found_recipe(model: str, model_hash: str, study: PairStudy, trial: Trial) -> Recipe:
    """The recipe that makes a trial's program of the model, bound to the weights it was found on."""
    operations = (as_operation(trial.pairs),) if trial.pairs else ()
    program = study.program(trial.pairs)
    expect = Expect(effective_depth=program.effective_depth(study.steps_per_layer), sync_points=program.sync_points(2))
    return Recipe(model, operations, expect, model_hash)


def write_recipe(path: Path, model: str, study: PairStudy, record: dict[str, Any]) -> None:
    """Write the best trial so far as a recipe, with what was measured in comments."""
    best, dense = study.best(), study.profile()[float(study.num_layers)]
    measured = best.measured
    low, high = measured.divergence_low, measured.divergence_high
    lines = [
        f"# Found by: {record['command']}",
        f"# The best of {len(study.finished())} trials: number {best.number}, {best.source}.",
        f"# On {measured.tokens:,} tokens:",
        f"# divergence {measured.divergence:.4g} nats per token,",
        *([f"# its 95% interval {low:.4g} to {high:.4g},"] if math.isfinite(high) else []),
        f"# perplexity {measured.perplexity:.4g}; the original's is {dense.perplexity:.4g}.",
    ]
    write_text(path, "\n".join(lines) + "\n" + found_recipe(model, record["model_hash"], study, best).to_yaml())


def trials_table(study: PairStudy) -> pd.DataFrame:
    """One row per finished trial, in the order they were asked for; `layers` as a recipe has it."""
    rows = []
    for trial in study.finished():
        program = study.program(trial.pairs)
        rows.append(
            {
                "trial": trial.number,
                "source": trial.source,
                "depth": program.effective_depth(study.steps_per_layer),
                "pairs": " ".join(f"{first}+{first + 1}" for first in trial.pairs),
                **vars(trial.measured),
                "program": str(program),
            }
        )
    return pd.DataFrame(rows)


def write_results(folder: Path, model: str, study: PairStudy, record: dict[str, Any]) -> None:
    """Write the recipe, the table and the provenance; each file is whole at any time."""
    write_recipe(folder / RECIPE_FILE, model, study, record)
    write_table(folder / TRIALS_FILE, trials_table(study), missing="")
    best = study.best()
    found = {"trial": best.number, "program": str(study.program(best.pairs)), **_finite(best.measured)}
    original = _finite(study.profile()[float(study.num_layers)])
    write_json(folder / RECORD_FILE, record | {"trials": len(study.finished()), "best": found, "original": original})


def _finite(measured: MeasuredProgram) -> dict[str, float | None]:
    """The numbers as JSON holds them."""
    return {name: value if math.isfinite(value) else None for name, value in vars(measured).items()}
