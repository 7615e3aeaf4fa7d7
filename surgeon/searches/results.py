"""Results of a search: quality against a cost with its knee, tables, recipes, and a record."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from optuna.trial import FrozenTrial

from surgeon.checkpoint.tensor_file import read_json
from surgeon.findings.search import SearchResult
from surgeon.findings.trials import MOST_DIVERGENCE
from surgeon.language.recipe import Recipe
from surgeon.processes.files import finite, write_text
from surgeon.quality.head import GREEDY
from surgeon.quality.summary import ACCEPTANCES, CONFIDENCE, Quality, interval
from surgeon.searches.evaluate import Terms
from surgeon.searches.mixture import Trial
from surgeon.searches.optimise import Numbers
from surgeon.searches.pricing import Pricing, non_dominated
from surgeon.searches.quantities import DEPTH, Aspect
from surgeon.searches.question import PricedQuestion
from surgeon.searches.search import SUBLAYERS
from surgeon.searches.winners import Winner, quality_json
from surgeon.words import WIDTH, plural

RESAMPLES = 2000
SENSITIVITY = 1.0  # S of Kneedle
TOGETHER = "all together"  # the curve of all spaces


@dataclass(frozen=True)
class CurvePoint:
    """The best trial at some cost.

    Attributes:
        low, high: the 95% interval of its divergence.
    """

    cost: float
    trial: Trial | None
    divergence: float
    low: float
    high: float


@dataclass(frozen=True)
class QualityCurve:
    """The front of divergence against a cost, of programs of one space or of several together.

    Attributes:
        name: of the space, or `TOGETHER`.
        points: the unedited model, then the best of each cost, the dearest first.
        knee: its cost, within what was measured (deeper cuts move it); None where the curve has none: it is straight,
            or has too few points.
        low, high: the 95% interval of the knee, by resampling windows.
        share: of the resamples that have one.
    """

    along: Aspect
    name: str
    points: tuple[CurvePoint, ...]
    knee: float | None
    low: float
    high: float
    share: float

    def line(self) -> str:
        show = self.along.show
        first = self.along.quantity.show(self.points[0].cost)
        last = min(point.cost for point in self.points if point.divergence <= MOST_DIVERGENCE)
        if self.knee is None:
            return f"{self.name}: no knee between {self.along.name} {first} and {show(last)}"
        ends = sorted([self.low, self.high], reverse=self.along.quantity.upward)
        if self.share:
            certainty = f"95% interval {' to '.join(map(self.along.quantity.show, ends))}"
        else:
            certainty = "no interval"
        if self.share < CONFIDENCE:
            unsure = f", in {self.share:.0%} of the resamples"
        else:
            unsure = ""
        looked = f"looked for as far as {show(last)}, within a divergence of {MOST_DIVERGENCE:g} nat"
        return (
            f"{self.name}: the knee is at {show(self.knee)} of {first} ({certainty}{unsure}), {looked}"
        )


def quality_curves(
    along: Aspect,
    trials: Sequence[Trial],
    original: Quality,
    pricing: Pricing,
    resamples: int = RESAMPLES,
) -> list[QualityCurve]:
    """Curves of quality against a cost, of each space alone, and of all together, last."""
    dense = pricing.price(along, pricing.model.program)
    prices = {t.number: pricing.price(along, t.program) for t in trials}
    whole = [t for t in trials if t.measured.whole and t.choice and math.isfinite(prices[t.number])]
    spaces = dict.fromkeys(edit.space for trial in whole for edit in trial.choice)
    groups = {name: [t for t in whole if {edit.space for edit in t.choice} == {name}] for name in spaces}
    if len(spaces) > 1:
        groups[TOGETHER] = whole
    curves = []
    for name, own in groups.items():
        costs = np.array([dense, *(prices[trial.number] for trial in own)])
        if not (costs < dense).any():  # a space that does not lessen it
            continue
        windows = np.array(
            [
                np.zeros(len(original.by_window("divergence"))),
                *(one.measured.by_window("divergence") for one in own),
            ]
        )
        means = np.where(np.isfinite(windows).all(axis=1), windows.mean(axis=1), math.inf)
        points = []
        for row in non_dominated(np.stack([costs, means], axis=1))[::-1]:
            low, high = interval(windows[row])
            trial = None if row == 0 else own[row - 1]
            points.append(CurvePoint(float(costs[row]), trial, float(means[row]), max(0.0, low), high))
        curves.append(
            QualityCurve(
                along, name, tuple(points), *bootstrapped_knee(costs, windows, resamples=resamples)
            )
        )
    return curves


def bootstrapped_knee(
    costs: Numbers, windows: Numbers, resamples: int = RESAMPLES
) -> tuple[float | None, float, float, float]:
    """The knee of the lower envelope of programs' divergence, with its interval.

    For every resample of the windows (Efron 1979, with replacement) the means, the envelope and the knee are found
    anew, so that the interval covers the choice of the best program by the same windows.

    Args:
        costs: (programs,).
        windows: (programs, windows), the divergence of each.

    Returns:
        As `QualityCurve` has them, its cost, both ends of the interval, and the share of resamples that have one.
    """
    finite = np.isfinite(windows).all(axis=1)
    costs = costs[finite]
    windows = windows[finite]
    count = windows.shape[1]
    weights = np.random.default_rng(0).multinomial(count, [1 / count] * count, resamples) / count
    found = [knee_of(*lower_envelope(costs, means)) for means in weights @ windows.T]
    knees = np.array([one for one in found if one is not None])
    ends = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(knees, ends) if len(knees) else (math.nan, math.nan)
    return (
        knee_of(*lower_envelope(costs, windows.mean(axis=1))),
        float(low),
        float(high),
        len(knees) / resamples,
    )


def lower_envelope(costs: Numbers, divergence: Numbers) -> tuple[Numbers, Numbers]:
    """The costs that occur, falling, and the least divergence of programs as cheap as each, up to `MOST_DIVERGENCE`."""
    levels, place = np.unique(costs, return_inverse=True)  # ascending
    least = np.full(len(levels), math.inf)
    np.minimum.at(least, place, divergence)
    least = np.minimum.accumulate(least)
    shown = least <= MOST_DIVERGENCE
    return levels[shown][::-1], least[shown][::-1]


def knee_of(costs: Numbers, divergence: Numbers) -> float | None:
    """The knee of a curve that rises as the cost falls, by Kneedle (Satopaa et al. 2011); None if there is none.

    Both axes are scaled to the unit square, x the cost that is given up, y the divergence. The knee is where x - y is
    largest, if it falls below that largest value less S times the mean step of x before the curve ends. The curve is
    an envelope, and not smoothed; the bootstrap covers its noise.

    Args:
        costs: (points,), falling.
        divergence: (points,), rising.
    """
    if len(costs) < 3 or divergence[-1] <= divergence[0]:
        return None
    x = (costs[0] - costs) / (costs[0] - costs[-1])
    y = (divergence - divergence[0]) / (divergence[-1] - divergence[0])
    difference = x - y
    best = int(np.argmax(difference))
    if difference[best] <= 0:  # giving it up hurts most at first
        return None
    threshold = difference[best] - SENSITIVITY * float(np.mean(np.diff(x)))
    if (difference[best:] < threshold).any():
        return float(costs[best])
    return None


FRONT_FOLDER = "front"


def trials_table(question: PricedQuestion, trials: Sequence[Trial]) -> pd.DataFrame:
    """One row per trial, in order: its edits, costs, quality and program."""
    aspects = dict.fromkeys([DEPTH, *question.pricing.aspects])
    rows = []
    for trial in trials:
        level = trial.level
        row = {
            "trial": trial.number,
            "source": trial.source,
            "level": math.nan if level is None else level,
            "edits": trial.edits,
            **{
                str(aspect): aspect.natural(question.pricing.price(aspect, trial.program))
                for aspect in aspects
            },
            **_quality(trial.measured),
            "tokens": trial.measured.tokens,
            "whole": trial.measured.whole,
            "within": trial.measured.whole and question.is_met(trial),
            **trial.measured.more,
            "program": trial.key,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def terms_table(question: PricedQuestion, terms: Terms) -> pd.DataFrame:
    """One row per edit: its divergence, its mean correlation, and its savings (of a speedup, in parts of the time)."""
    mixture = question.mixture
    pricing = question.pricing
    dense = {
        aspect: pricing.price(aspect, mixture.model.program)
        for aspect in dict.fromkeys([DEPTH, *pricing.aspects])
    }
    rows = []
    for place, (edit, program) in enumerate(zip(mixture.edits, mixture.single_edits, strict=True)):
        others = np.delete(terms.correlation[place], place)
        row = {
            "edit": str(edit),
            "space": edit.space,
            "first": edit.first,
            "last": edit.stop - 1,
            "option": edit.option,
            "divergence": terms.divergence[place],
            "correlation_mean": float(others.mean()) if len(others) else math.nan,
            **{f"{aspect}_saved": own - pricing.price(aspect, program) for aspect, own in dense.items()},
        }
        rows.append(row)
    return pd.DataFrame(rows)


def write_front(
    folder: Path, front: Sequence[Trial], question: PricedQuestion, model: str, model_hash: str
) -> pd.DataFrame:
    """Write a recipe for each point of a front, `front/NN-recipe.yaml`; those of an earlier front are removed.

    Returns:
        One row per point: its costs, the trial, its quality, whether it keeps the budget, its recipe.
    """
    (folder / FRONT_FOLDER).mkdir(parents=True, exist_ok=True)
    rows = []
    for number, trial in enumerate(front, 1):
        name = f"{FRONT_FOLDER}/{number:02d}-recipe.yaml"
        costs = question.pricing.costs(question.traded_aspects, trial)
        values = {
            str(one): one.natural(cost) for one, cost in zip(question.traded_aspects, costs, strict=True)
        }
        lines = [f"# Point {number} of {len(front)} of a Pareto front: trial {trial.number}."]
        lines += [f"# {one} {value:.5g}" for one, value in values.items()]
        lines.append(question.mixture.recipe(trial.choice, model, model_hash).to_yaml())
        write_text(folder / name, "\n".join(lines))
        row = {
            "point": number,
            **values,
            "trial": trial.number,
            "depth": question.pricing.depth(trial.program),
            **_quality(trial.measured),
            "within": question.is_met(trial),
            "source": trial.source,
            "edits": trial.edits,
            "program": trial.key,
            "recipe": name,
        }
        rows.append(row)
    for old in folder.glob(f"{FRONT_FOLDER}/*-recipe.yaml"):
        if f"{FRONT_FOLDER}/{old.name}" not in {row["recipe"] for row in rows}:
            old.unlink()
    return pd.DataFrame(rows)


def quality_table(curves: Sequence[QualityCurve]) -> pd.DataFrame:
    """One row per point of each curve; the knee's has its interval."""
    rows = []
    for curve in curves:
        natural = curve.along.natural
        low, high = sorted([natural(curve.low), natural(curve.high)])
        knee = {"knee_low": low, "knee_high": high, "knee_share": curve.share}
        for point in curve.points:
            is_knee = point.cost == curve.knee
            row = {
                "along": str(curve.along),
                "space": curve.name,
                "cost": natural(point.cost),
                "divergence": point.divergence,
                "divergence_low": point.low,
                "divergence_high": point.high,
                "knee": is_knee,
                **(knee if is_knee else dict.fromkeys(knee)),
                "trial": None if point.trial is None else point.trial.number,
                "edits": "" if point.trial is None else point.trial.edits,
            }
            rows.append(row)
    if rows:
        return pd.DataFrame(rows).astype({"trial": "Int64"})
    return pd.DataFrame()


def _quality(measured: Quality) -> dict[str, float]:
    names = ("divergence", "divergence_low", "divergence_high", "perplexity")
    accepted = [name for name in ACCEPTANCES if name == GREEDY or measured.knows(name)]
    return {name: getattr(measured, name) for name in (*names, *accepted)}


def lost_trials(folder: Path, study: str, place: str, finished: int) -> list[str]:
    """Warn where a study has fewer finished trials than the record of its search."""
    try:
        record = read_json(folder / SearchResult.RECORD)
    except (FileNotFoundError, ValueError):
        return []  # it is written again
    trials = record.get("trials")
    if record.get("study") != study or not isinstance(trials, int) or trials <= finished:
        return []
    return [
        f"{place} has {finished} of the {trials} trials that {SearchResult.RECORD} tells of; the others are tried again"
    ]


def comment_recipe(
    recipe: Recipe, question: PricedQuestion, winner: Winner, record: Mapping[str, Any]
) -> str:
    """Write the winner's recipe with measurements in comments."""
    trial = winner.trial
    measured = trial.measured
    lines = [
        f"Found by: {record['command']}",
        f"{winner.why}: trial {trial.number} of {record['trials']}, {trial.source}.",
        f"On {measured.tokens:,} tokens:",
        f"divergence {measured.divergence:.4g} nats per token,",
    ]
    if math.isfinite(measured.divergence_high):
        low = measured.divergence_low
        lines.append(f"its 95% interval {low:.4g} to {measured.divergence_high:.4g},")
    lines.append(
        f"perplexity {measured.perplexity:.4g}; the original's is {question.original.perplexity:.4g}."
    )
    if winner.draft is not None:
        lines += ["As a draft:", *winner.draft.lines()]
    if winner.comparison is not None:
        lines += ["On text that the search did not see:", *winner.comparison.lines()]
    if winner.healing is not None:
        lines += ["On the same text, healed:", *winner.healing.table(), *winner.healing.lines()]
    # Comments fit a terminal, and a command in them can still be copied, word by word.
    comment = textwrap.TextWrapper(
        WIDTH,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([*map(comment.fill, lines), recipe.to_yaml()])


def describe_work(terms: Terms | None, stored: Iterable[FrozenTrial]) -> dict[str, Any]:
    """Record the sublayers that all workers of a search ran over the text, for single edits and for trials."""
    together = math.fsum(one.user_attrs.get(SUBLAYERS, 0.0) for one in stored)
    edits = tokens = 0  # where a sampler does not go by single edits
    alone = 0.0
    if terms is not None:
        edits = len(terms.divergence)
        tokens = terms.tokens
        alone = terms.sublayers
    total = alone + together
    sentence = f"{total:,.0f} sublayers over the text"
    if edits and total:
        sentence += f", {alone / total:.0%} for {plural(edits, 'single edit')} on {tokens:,} tokens each"
    return {
        "edits": edits,
        "tokens_of_edits": tokens,
        "sublayers": {"single_edits": round(alone, 1), "trials": round(together, 1)},
        "sentence": sentence,
    }


def found_json(
    question: PricedQuestion, winner: Winner, curves: Sequence[QualityCurve]
) -> dict[str, Any]:
    """Record the findings as JSON values; None for what is not finite."""
    trial = winner.trial
    more = trial.measured.more
    best = {"trial": trial.number, "why": winner.why, "program": trial.key}
    found: dict[str, Any] = {
        "best": best | quality_json(trial.measured) | finite(more),
        "original": quality_json(question.original) | finite(question.original.more),
    }
    if winner.comparison is not None:
        missed = winner.missed_unseen(question.settings.of_quality)
        found["held_out"] = dict(winner.text) | winner.comparison.to_json() | {"limits_missed": missed}
    if winner.healing is not None:
        found["healing"] = winner.healing.to_json()
    if winner.draft is not None:
        found["draft"] = winner.draft.to_json()
    if question.mixture.refusals:
        found["refused"] = [
            {"space": space, "edits": edits, "reason": reason}
            for space, reasons in question.mixture.refusals.items()
            for reason, edits in reasons.most_common()
        ]
    if curves:
        found["knees"] = [curve.line() for curve in curves]
    return found
