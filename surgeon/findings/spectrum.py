"""What a spectrum has found: singular values of matrices, ranks, and the damage of cutting matrices down."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from surgeon.findings.drawing import finish
from surgeon.findings.maps import COLOURS, colour_bar, draw_map, label_map
from surgeon.findings.result import RunResult, TableFile, base_of
from surgeon.words import aligned

METHODS = {"plain": "", "whitened": "_whitened"}  # and how their columns end
_PANELS_ACROSS = 4
_RANKS_ACROSS = 4
_DECADES = 5  # of damage, below the worst, that have colours of their own
_MOST_NUMBERS = 40  # layers, beyond which the cells of a map are too low for numbers
_INCHES_PER_LETTER = 0.09  # of a title
_LEAST_VALUE = 1e-4  # of the largest singular value
_LINES = ListedColormap(matplotlib.colormaps[COLOURS](np.linspace(0, 0.92, 256)))  # yellow is faint on white


@dataclass(frozen=True)
class TargetRank:
    """A rank as the user asks for it.

    Attributes:
        number: of singular values, or a share of all that a matrix has.
        is_share: which of the two.
    """

    number: Fraction
    is_share: bool

    def __str__(self) -> str:
        return f"{self.number.numerator}/{self.number.denominator}" if self.is_share else str(self.number)

    def of(self, full_rank: int) -> int:
        """The rank for a matrix with this many singular values; a share is rounded, to at least 1."""
        return max(1, int(self.number * full_rank + Fraction(1, 2))) if self.is_share else int(self.number)


@dataclass(frozen=True, repr=False)
class Spectrum(RunResult):
    """The result of `spectrum`; layers count from 0.

    Attributes:
        matrices: one row per matrix, as in `spectrum.csv`.
        damage: one row per truncation, as in `damage.csv`; no rows if none was measured.
        values: every singular value, as in `singular_values.csv`.
        base_perplexity: of the model as it is.
    """

    COMMAND = "spectrum"
    RECORD = "spectrum.json"
    TABLES: ClassVar = {
        "matrices": TableFile(
            "spectrum.csv",
            ("full_rank", *(f"{name}95{ending}" for ending in METHODS.values() for name in ("rank", "kept"))),
            ("weight",),
            ("layer",),
        ),
        "damage": TableFile(
            "damage.csv",
            ("rank", "full_rank", "kept", "perplexity", "divergence", "tokens"),
            ("weight", "method"),
            ("layer",),
            optional=True,
            may_be_empty=True,
        ),
        "values": TableFile("singular_values.csv", ("index", "value"), ("weight", "method"), ("layer",), optional=True),
    }

    matrices: pd.DataFrame
    damage: pd.DataFrame = field(default_factory=pd.DataFrame)
    values: pd.DataFrame = field(default_factory=pd.DataFrame)
    base_perplexity: float = math.nan

    @classmethod
    def facts(cls, record: dict[str, Any], file: Path) -> dict[str, Any]:
        # A table beside it may be of an earlier run that measured damage.
        return {"base_perplexity": base_of(record, file, cls.COMMAND)} | (
            {} if record.get("ranks") else {"damage": pd.DataFrame()}
        )

    def shares(self, method: str) -> pd.DataFrame:
        """The matrices with `share`, the rank that holds 95% of the energy, by a method, over the full rank."""
        return self.matrices.assign(share=self.matrices[f"rank95{METHODS[method]}"] / self.matrices["full_rank"])

    def truncations(self) -> Iterator[tuple[TargetRank, pd.DataFrame]]:
        """The rows of `damage` for each of the ranks that were asked for: one of each matrix."""
        for rank in parse_ranks(",".join(self.record["ranks"])) if len(self.damage) else ():
            part = self.damage[self.damage["rank"] == self.damage["full_rank"].map(rank.of)]
            if len(part):
                yield rank, part

    def pictures(self) -> dict[str, Figure]:
        """`damage`, if it was measured; `rank95`; `singular-values-plain` and `singular-values-whitened`."""
        found = {"damage": self._damage()} if len(self.damage) else {}
        found["rank95"] = self._ranks()
        if len(self.values):
            found |= {f"singular-values-{method}": self._values(method) for method in METHODS}
        return found

    def _damage(self) -> Figure:
        """Divergence by layer (down) and matrix (across), a panel for each rank, all under one colour scale."""
        panels = list(self.truncations())
        weights = list(dict.fromkeys(self.damage["weight"]))
        across = min(_PANELS_ACROSS, len(panels))
        down = math.ceil(len(panels) / across)
        height = _height(self.damage["layer"].nunique())
        size = (across * max(2.1, 0.42 * len(weights)) + 1.4, down * height + 0.9)
        figure = Figure(figsize=size, layout="constrained", dpi=160)
        axes = figure.subplots(down, across, squeeze=False)
        scale = _damage_scale(self.damage["divergence"])
        low, high = scale.vmin or 0.0, scale.vmax or 1.0
        for panel in axes.flat[len(panels) :]:
            panel.set_axis_off()
        for place, (rank, part) in enumerate(panels):
            panel = axes.flat[place]
            # Infinity and zero, which have no logarithm, would be left blank like cells that were not measured.
            _map(panel, by_layer(part, "divergence").clip(low / 2, high * 2), scale)
            kept = part.groupby("weight")["kept"].mean()
            panel.set_xticks(range(len(weights)), [f"{w}\n{kept[w]:.0%}" for w in weights], fontsize=7)
            panel.set_title(f"rank {rank} of full" if rank.is_share else f"rank {rank}", fontsize=10)
            if place % across == 0:
                panel.set_ylabel("layer", fontsize=9)
        divergence = self.damage["divergence"]
        above, below = bool(np.isinf(divergence).any()), bool((divergence < low).any())
        bar = colour_bar(figure, list(axes.flat), scale, above, below=below, shrink=0.85, pad=0.02)
        bar.set_label("divergence, nats per token", fontsize=9)
        method = self.damage["method"].iloc[0]
        self._title(figure, f"one matrix at a lower rank ({method}); below its name, the parameters kept")
        return figure

    def _ranks(self) -> Figure:
        """The rank that holds 95% of the energy, as a share of the full rank: plain beside whitened."""
        weights = list(dict.fromkeys(self.matrices["weight"]))
        layers = self.matrices["layer"].nunique()
        size = (2 * max(2.4, 0.5 * len(weights)) + 1.4, _height(layers) + 0.9)
        figure = Figure(figsize=size, layout="constrained", dpi=160)
        axes = figure.subplots(1, 2, sharey=True)
        scale = Normalize(0, 1)
        for panel, method in zip(axes, METHODS, strict=True):
            values = by_layer(self.shares(method), "share")
            _map(panel, values, scale)
            for (row, column), value in np.ndenumerate(values.to_numpy()) if layers <= _MOST_NUMBERS else ():
                colour = "white" if value < 0.6 else "black"
                panel.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=6, color=colour)
            panel.set_xticks(range(len(weights)), weights, fontsize=8)
            panel.set_title(method, fontsize=10)
        axes[0].set_ylabel("layer", fontsize=9)
        bar = colour_bar(figure, list(axes), scale, False, shrink=0.85, pad=0.02)
        bar.set_label("rank / full rank", fontsize=9)
        self._title(figure, "rank with 95% of the energy")
        return figure

    def _values(self, method: str) -> Figure:
        """Singular values relative to the largest one, a panel for each weight, a line for each layer."""
        values = self.values[self.values["method"] == method]
        weights = list(dict.fromkeys(values["weight"]))
        across = min(_PANELS_ACROSS, len(weights))
        down = math.ceil(len(weights) / across)
        figure = Figure(figsize=(2.9 * across + 1.2, 2.5 * down + 0.6), layout="constrained", dpi=150)
        axes = figure.subplots(down, across, squeeze=False, sharey=True)
        layers = sorted(values["layer"].unique())
        scale = Normalize(layers[0], max(layers[-1], layers[0] + 1))
        least = 1.0
        for panel in axes.flat[len(weights) :]:
            panel.set_axis_off()
        for place, weight in enumerate(weights):
            panel = axes.flat[place]
            for layer, line in values[values["weight"] == weight].groupby("layer"):
                relative = (line["value"] / line["value"].max()).to_numpy()
                least = min(least, float(relative[relative > 0].min(initial=1.0)))
                shown = np.where(relative > 0, relative, np.nan)
                panel.plot(line["index"] + 1, shown, color=_LINES(scale(layer)), lw=0.9)
            panel.set_title(weight, fontsize=10)
            panel.set_yscale("log")
            finish(panel)
            if place + across >= len(weights):
                panel.set_xlabel("number", fontsize=9)
            if place % across == 0:
                panel.set_ylabel("relative to the largest", fontsize=9)
        axes[0, 0].set_ylim(max(_LEAST_VALUE, least / 1.3), 1.3)
        bar = figure.colorbar(ScalarMappable(scale, _LINES), ax=list(axes.flat), pad=0.02)
        bar.locator = MaxNLocator(nbins=10, integer=True)
        bar.ax.tick_params(labelsize=8)
        bar.set_label("layer", fontsize=9)
        self._title(figure, f"singular values, {method}")
        return figure

    def _title(self, figure: Figure, words: str) -> None:
        """Above all panels, on as many lines as it takes to fit."""
        wide = int(figure.get_figwidth() / _INCHES_PER_LETTER)
        figure.suptitle(textwrap.fill(f"{self.label}: {words}", wide), fontsize=11)

    def __str__(self) -> str:
        """For each weight medians over layers, of the rank with 95% of the energy and of divergence; in 80 columns."""
        parts = ["Medians over layers: rank with 95% of the energy, as a share of the full rank"]
        if len(self.damage):
            parts.append("(whitened: weighed by the inputs); divergence at lower ranks, nats per token")
        truncations = list(self.truncations())
        for start in range(0, max(1, len(truncations)), _RANKS_ACROSS):
            shown = truncations[start : start + _RANKS_ACROSS]
            lines = [["", "", *["rank95"] * len(METHODS), *["at rank"] * len(shown)]]
            lines.append(["weight", "out x in", *METHODS, *(f"{rank}" + " full" * rank.is_share for rank, _ in shown)])
            for weight, rows in self.matrices.groupby("weight", sort=False):
                first = rows.iloc[0]
                medians = [(rows[f"rank95{ending}"] / rows["full_rank"]).median() for ending in METHODS.values()]
                cells = [f"{first['out_features']} x {first['in_features']}", *(f"{share:.2f}" for share in medians)]
                at = (part.loc[part["weight"] == weight, "divergence"].median() for _, part in shown)
                lines.append([str(weight), *cells, *(f"{divergence:.3g}" for divergence in at)])
            parts.append(aligned(lines) + "\n")
        return "\n".join(parts)


def parse_ranks(text: str) -> tuple[TargetRank, ...]:
    """Ranks from a list such as "1/8,0.5,32", each once.

    Raises:
        ValueError: naming what is no rank, and why.
    """
    ranks = [_parse_rank(part.strip()) for part in text.split(",") if part.strip()]
    if not ranks:
        raise ValueError("no rank is given; write shares of the full rank such as 1/8,1/2, or whole numbers")
    return tuple(dict.fromkeys(ranks))


def _parse_rank(text: str) -> TargetRank:
    is_share = "." in text or "/" in text
    try:
        number = Fraction(text) if is_share else Fraction(int(text))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{text!r} is no rank; write a share such as 1/8 or 0.5, or a whole number") from error
    if number <= 0:
        raise ValueError(f"rank {text} must be more than 0")
    if is_share and number > 1:
        raise ValueError(f"rank {text} is above the full rank; a share is at most 1.0, a whole number has no point")
    return TargetRank(number, is_share)


def by_layer(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Values by layer and weight, in the order of the table; NaN where there is none."""
    table = rows.pivot_table(index="layer", columns="weight", values=column, sort=False, dropna=False)
    return table.reindex(columns=list(dict.fromkeys(rows["weight"]))).sort_index()


def _damage_scale(divergence: pd.Series[float]) -> Normalize:
    """Logarithmic, over the last few decades up to the worst finite value."""
    finite = divergence[np.isfinite(divergence) & (divergence > 0)]
    if finite.empty:
        return Normalize(0, 1)
    worst = float(finite.max())
    return LogNorm(max(float(finite.min()), worst / 10**_DECADES) * (1 - 1e-9), worst * (1 + 1e-9))


def _map(axes: Axes, values: pd.DataFrame, scale: Normalize) -> None:
    draw_map(axes, values, scale, aspect="auto")
    label_map(axes, values, len(values.columns), 20, 8)


def _height(layers: int) -> float:
    """Inches of a map: more for more layers, so that a cell stays visible."""
    return min(9.0, max(2.4, 0.17 * layers + 0.8))
