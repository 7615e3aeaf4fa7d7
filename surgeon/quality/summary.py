"""From values per window to the numbers that are reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

CONFIDENCE = 0.95

Values = NDArray[np.float64]  # (windows,)


def perplexity(nll: Values) -> float:
    """Exp of the mean negative log-likelihood; infinity where that overflows or is NaN."""
    return _exp(float(np.mean(nll)))


def pool_windows(values: Values, counts: Values) -> Values:
    """Weight means of windows with different counts, for use as if counts were equal.

    Their mean is that over all that was counted, m, with the same scatter (the ratio estimator's linearisation): m + c
    (x - m), with c a window's count over the mean count.
    """
    shares = counts / counts.mean()
    mean = (shares * values).mean()
    return np.asarray(mean + shares * (values - mean), np.float64)


def mean_divergence(divergence: Values) -> float:
    """The mean over windows, nats per token, at least 0 (rounding can make it less); infinity where it is no number."""
    mean = float(np.mean(divergence))
    if math.isfinite(mean):
        return max(0.0, mean)
    return math.inf


def interval(values: Values, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Student's t interval of the mean of values per window; infinite where it is unknown."""
    from scipy import stats  # half a second that who only reads qualities need not wait

    if len(values) < 2 or not np.isfinite(values).all():
        return -math.inf, math.inf

    error = float(stats.sem(values))
    if error == 0:
        return float(values[0]), float(values[0])
    low, high = stats.t.interval(confidence, len(values) - 1, loc=float(np.mean(values)), scale=error)
    return float(low), float(high)


def known_interval(
    values: Values, least: float = -math.inf, most: float = math.inf
) -> tuple[float, float]:
    """The interval within `least` and `most`; NaN where it is unknown."""
    return _within(interval(values), least, most)


def perplexity_interval(nll: Values) -> tuple[float, float] | None:
    """The 95% interval of the perplexity; None where it is unknown."""
    low, high = estimate(nll).ends("perplexity")
    if math.isnan(low):
        return None
    return low, high


@dataclass(frozen=True)
class Quality:
    """Quality of a program on a text, with 95% intervals over windows; NaN where unknown.

    Attributes:
        divergence: KL(original || program) in nats per token; NaN without an original.
        tokens: predicted.
        greedy_acceptance: share of tokens at which both models have the same likeliest token: how often a drafted token
            is the original's own.
        sampled_acceptance: mean over tokens of sum_v min(p_v, q_v), the chance that a sampled draft token is accepted
            (Leviathan et al. 2023, corollary 3.6).
        acceptance_keys: whose keys and values of earlier tokens acceptance rests on: "verified", the original's, as for
            drafts, or the program's "own"; None if unknown.
        windows: values of the windows that were run, in the order of the text, by name: "nll", "divergence",
            acceptances; and "blocks", the divergence of smaller parts, where windows are few. Records have none, and
            equal qualities may differ in them.
        whole: whether these are all windows; else the numbers are estimates.
        more: further numbers by name: a task's accuracy, say.
    """

    perplexity: float
    perplexity_low: float = math.nan
    perplexity_high: float = math.nan
    divergence: float = math.nan
    divergence_low: float = math.nan
    divergence_high: float = math.nan
    tokens: int = 0
    greedy_acceptance: float = math.nan
    greedy_acceptance_low: float = math.nan
    greedy_acceptance_high: float = math.nan
    sampled_acceptance: float = math.nan
    sampled_acceptance_low: float = math.nan
    sampled_acceptance_high: float = math.nan
    acceptance_keys: str | None = None
    windows: Mapping[str, tuple[float, ...]] = field(default_factory=dict, compare=False)
    whole: bool = True
    more: Mapping[str, float] = field(default_factory=dict)

    def by_window(self, name: str) -> Values:
        """Values of the windows that were run; empty where not kept."""
        return np.array(self.windows.get(name, ()), dtype=np.float64)

    @property
    def estimates(self) -> dict[str, float]:
        """Perplexity and divergence with their intervals, as columns of a table."""
        return {name: getattr(self, name) for name in ESTIMATE_COLUMNS}

    def knows(self, metric: str) -> bool:
        return not math.isnan(getattr(self, metric))

    def ends(self, metric: str) -> tuple[float, float]:
        return getattr(self, f"{metric}_low"), getattr(self, f"{metric}_high")

    def words(self, metric: str, digits: int, of_ends: int = 0) -> str:
        """Format a metric with its interval in brackets, whose ends have `of_ends` digits where given."""
        low, high = self.ends(metric)
        text = f"{getattr(self, metric):.{digits}{'f' if metric in ACCEPTANCES else 'g'}}"
        if math.isnan(low):
            return text
        how = f".{of_ends or digits}g"
        return f"{text} ({low:{how}} to {high:{how}})"

    def table(self) -> pd.DataFrame:
        metrics = [metric for metric in METRICS if self.knows(metric)]
        rows = [(metric, getattr(self, metric), *self.ends(metric)) for metric in metrics]
        return pd.DataFrame(rows, columns=["metric", "value", "low", "high"])

    def line(self) -> str:
        text = f"perplexity {self.words('perplexity', 4)}"
        if self.knows("divergence"):
            text += f", divergence {self.words('divergence', 3)}"
        return f"{text} over {self.tokens:,} tokens"

    def as_draft(self) -> str:
        """Describe it as a draft for the original, in one line; empty where acceptance is unknown."""
        if not self.knows("sampled_acceptance"):
            return ""
        by = ""
        if self.acceptance_keys is not None:
            by = f", by {self.acceptance_keys} keys and values"
        greedy = self.words("greedy_acceptance", 3)
        return (
            f"as a draft: acceptance {greedy} greedy, {self.words('sampled_acceptance', 3)} sampled{by}"
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values: each metric, and its interval as a pair; None where unknown."""
        found: dict[str, Any] = {}
        for metric in METRICS:
            ends = self.ends(metric)
            found[metric] = getattr(self, metric) if self.knows(metric) else None
            found[f"{metric}_interval"] = None if math.isnan(ends[0]) else list(ends)
        return found | {"tokens": self.tokens, "acceptance_keys": self.acceptance_keys}

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> Quality:
        """Read `to_json`'s values, or rows with a column for each end of an interval."""
        numbers: dict[str, Any] = {"perplexity": math.nan}
        for metric in METRICS:
            if entries.get(metric) is not None:
                numbers[metric] = float(entries[metric])
            columns = entries.get(f"{metric}_low"), entries.get(f"{metric}_high")
            low, high = entries.get(f"{metric}_interval") or columns
            if low is not None and high is not None:
                numbers |= {f"{metric}_low": float(low), f"{metric}_high": float(high)}
        return cls(
            **numbers, tokens=int(entries["tokens"]), acceptance_keys=entries.get("acceptance_keys")
        )


def quality_of(
    values: Mapping[str, Values], tokens: int, whole: bool = True, beside: Quality | None = None
) -> Quality:
    """Summarise a program's values by window, which are kept.

    Args:
        values: by name, as of `Quality.windows`.
        tokens: predicted.
        whole: whether all windows were run.
        beside: another program, on all windows, to estimate nll and divergence of a stopped one by, as in `estimate`.
    """
    numbers: dict[str, Any] = {}
    for name in ("nll", *METRICS[1:]):
        if name in values:
            base = None
            if not (whole or beside is None or name in ACCEPTANCES):
                base = beside.by_window(name)
            numbers |= _estimate(name, values[name], base, range(len(values[name])))
    windows = {name: tuple(own.tolist()) for name, own in values.items()}
    return Quality(**numbers, tokens=tokens, windows=windows, whole=whole)


ACCEPTANCES = ("greedy_acceptance", "sampled_acceptance")  # of what a program drafts
METRICS = ("perplexity", "divergence", *ACCEPTANCES)
ESTIMATE_COLUMNS = [f"{metric}{end}" for metric in METRICS[:2] for end in ("", "_low", "_high")]


def estimate(
    nll: Values,
    divergence: Values | None = None,
    base: Values | None = None,
    windows: Sequence[int] | None = None,
) -> Quality:
    """Estimate perplexity and divergence from values on all windows, or on some, each (windows,).

    On all windows perplexity is exp of the mean nll, and its interval exp of that of the mean (Student's t over
    windows). On fewer it is the base perplexity on all windows times exp of the mean difference of nll to the base on
    these: texts differ in difficulty by far more than programs do, and this way cells on different windows can be
    compared. With b the base's nll, d the difference, n of N windows, the variance of that estimate is Var(b + d)/N +
    Var(d)(1/n - 1/N), which on all windows is Var(nll)/N. Divergence is the mean over the windows.

    Args:
        base: the unedited model's nll on all windows; not needed if the values are on all of them.
        windows: numbers of the windows of these values.
    """
    numbers = _estimate("nll", nll, base, windows)
    if divergence is not None:
        numbers |= _estimate("divergence", divergence)
    return Quality(**numbers)


def _estimate(
    name: str, values: Values, base: Values | None = None, windows: Sequence[int] | None = None
) -> dict[str, Any]:
    """Estimate what values by window come to, with the ends of its interval, as fields of `Quality`."""
    mean = float(np.mean(values, dtype=np.float64))
    ends = interval(values)
    if not (base is None or windows is None or len(values) == len(base)):
        difference = values - base[list(windows)]
        mean = float(base.mean() + difference.mean())
        count = len(values)
        if math.isfinite(ends[1]):
            from scipy import stats

            part = 1 / count - 1 / len(base)
            variance = np.var(values, ddof=1) / len(base) + np.var(difference, ddof=1) * part
            half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * math.sqrt(variance)
            ends = (mean - half, mean + half)
    low, high = _within(ends, 0.0, 1.0 if name in ACCEPTANCES else math.inf)
    if name == "nll":
        name = "perplexity"
        mean = _exp(mean)
        if math.isfinite(high):
            low, high = map(_exp, (low, high))
    elif name == "divergence":
        mean = max(0.0, mean) if math.isfinite(mean) else math.inf
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _within(ends: tuple[float, float], least: float, most: float = math.inf) -> tuple[float, float]:
    if not math.isfinite(ends[1]):
        return math.nan, math.nan
    low, high = (min(most, max(least, end)) for end in ends)
    return low, high


def _exp(value: float) -> float:
    if value < 700:
        return math.exp(value)
    return math.inf
