"""From values per window to the numbers that are reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

CONFIDENCE = 0.95
UNKNOWN = (math.nan, math.nan)  # of an interval

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
    low, high = known_interval(nll, least=0.0)
    if math.isnan(low):
        return None
    return (_exp(low), _exp(high))


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
            acceptances; and "blocks", the divergence of smaller parts, where windows are few.
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
    windows: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
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
        known = [metric for metric in METRICS if self.knows(metric)]
        rows = [(metric, getattr(self, metric), *self.ends(metric)) for metric in known]
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
        beside: another program, on all windows, to estimate a stopped one by.
    """
    nll = values["nll"]
    divergence = values["divergence"]
    if whole or beside is None:
        found = estimate(nll, divergence)
    else:
        # The other's on all windows plus the mean difference on these; intervals as in `estimate`.
        count = len(nll)
        found = estimate(nll, divergence, beside.by_window("nll"), range(count))
        base = beside.by_window("divergence")
        difference = divergence - base[:count]
        low, high = _within(_estimate_interval(divergence, difference, base), 0.0)
        mean = mean_divergence(base.mean() + difference)
        found = replace(found, divergence=mean, divergence_low=low, divergence_high=high)
    windows = {name: tuple(own.tolist()) for name, own in values.items()}
    means: dict[str, Any] = {}
    for name in ACCEPTANCES:
        if name in values:
            means[name] = float(np.mean(values[name], dtype=np.float64))
    return replace(found, tokens=tokens, windows=windows, whole=whole, **means)


ACCEPTANCES = ("greedy_acceptance", "sampled_acceptance")  # of what a program drafts
METRICS = ("perplexity", "divergence", *ACCEPTANCES)
ESTIMATE_COLUMNS = [f"{metric}{end}" for metric in METRICS[:2] for end in ("", "_low", "_high")]


def estimate(
    nll: Values, divergence: Values, base: Values | None = None, windows: Sequence[int] | None = None
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
    if base is None or windows is None or len(nll) == len(base):
        value = perplexity(nll)
        low, high = interval(nll)
    else:
        difference = nll - base[list(windows)]
        value = perplexity(base.mean() + difference)
        low, high = _estimate_interval(nll, difference, base)
    return Quality(
        value,
        _exp(low) if math.isfinite(low) else math.nan,
        _exp(high) if math.isfinite(high) else math.nan,
        mean_divergence(divergence),
        *known_interval(divergence, 0.0),
    )


def _within(ends: tuple[float, float], least: float, most: float = math.inf) -> tuple[float, float]:
    if not math.isfinite(ends[1]):
        return UNKNOWN
    low, high = (min(most, max(least, end)) for end in ends)
    return low, high


def _estimate_interval(values: Values, difference: Values, base: Values) -> tuple[float, float]:
    from scipy import stats

    count = len(values)
    of_all = len(base)
    if count < 2 or not np.isfinite(values).all():
        return interval(values)
    variance = np.var(values, ddof=1) / of_all + np.var(difference, ddof=1) * (1 / count - 1 / of_all)

    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * math.sqrt(variance)
    mean = float(base.mean() + difference.mean())
    return mean - half, mean + half


def _exp(value: float) -> float:
    if value < 700:
        return math.exp(value)
    return math.inf
