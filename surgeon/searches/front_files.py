"""The files of a front: front.csv and a recipe for each of its points; depths.csv, the least divergence by depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from surgeon.processes.files import write_table, write_text
from surgeon.searches.front import DepthCurve, DepthPoint, FrontPoint
from surgeon.searches.mixture import Mixture
from surgeon.searches.quantities import Aspect
from surgeon.searches.trial import Trial

FRONT_FILE, FRONT_FOLDER, DEPTHS_FILE = "front.csv", "front", "depths.csv"


def write_front(
    folder: Path,
    front: Sequence[FrontPoint],
    objectives: Sequence[Aspect],
    mixture: Mixture,
    model: str,
    model_hash: str,
) -> pd.DataFrame:
    """Write front.csv and a recipe for each point, `front/NN-recipe.yaml`; those of an earlier front are removed.

    Returns:
        What is in front.csv.
    """
    recipes = folder / FRONT_FOLDER
    recipes.mkdir(parents=True, exist_ok=True)
    rows, written = [], set()
    for number, point in enumerate(front, 1):
        name = f"{number:02d}-recipe.yaml"
        values = {str(one): one.natural(cost) for one, cost in zip(objectives, point.costs, strict=True)}
        said = [f"# Point {number} of {len(front)} of a Pareto front: trial {point.trial.number}."]
        said += [f"# {one} {value:.5g}" for one, value in values.items()]
        text = mixture.recipe(point.trial.proposal.choice, model, model_hash).to_yaml()
        write_text(recipes / name, "\n".join(said) + "\n" + text)
        written.add(name)
        rows.append({"point": number, **values, **_row(point.trial, mixture), "recipe": f"{FRONT_FOLDER}/{name}"})
    for old in recipes.glob("*-recipe.yaml"):
        if old.name not in written:
            old.unlink()
    table = pd.DataFrame(rows)
    write_table(folder / FRONT_FILE, table, missing="")
    return table


def _row(trial: Trial, mixture: Mixture) -> dict[str, float | str]:
    measured, program = trial.measured, trial.program
    return {
        "trial": trial.number,
        "depth": program.effective_depth(mixture.model.family.steps_per_layer),
        "divergence": measured.divergence,
        "divergence_low": measured.divergence_low,
        "divergence_high": measured.divergence_high,
        "perplexity": measured.perplexity,
        "source": trial.proposal.source,
        "edits": "; ".join(map(str, trial.proposal.choice)),
        "program": trial.proposal.key,
    }


def _knee(curve: DepthCurve, point: DepthPoint) -> dict[str, float | bool | None]:
    """Whether it is the curve's knee, and how sure that is."""
    knee, is_knee = curve.knee, point.depth == curve.knee.depth
    known = {"knee_low": knee.low, "knee_high": knee.high, "knee_share": knee.share}
    return {"knee": is_knee} | {name: value if is_knee else None for name, value in known.items()}


def write_depths(folder: Path, curves: Sequence[DepthCurve]) -> pd.DataFrame:
    """Write depths.csv, a row for each point of each curve; returns what is in it."""
    rows = [
        {
            "space": curve.name,
            "depth": point.depth,
            "divergence": point.divergence,
            "divergence_low": point.low,
            "divergence_high": point.high,
            **_knee(curve, point),
            "trial": None if point.trial is None else point.trial.number,
            "edits": "" if point.trial is None else "; ".join(map(str, point.trial.proposal.choice)),
        }
        for curve in curves
        for point in curve.points
    ]
    table = pd.DataFrame(rows).astype({"trial": "Int64"})
    write_table(folder / DEPTHS_FILE, table, missing="")
    return table
