"""Spectrum: singular values of matrices, the rank that each needs, and the damage of lower ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize

from surgeon.findings.drawing import HALF, ORDERED, Chart, Legend, Map, Picture, damage_legend, scale
from surgeon.findings.result import Block, Finding, Record, RunResult, base_of, table_file
from surgeon.words import align_columns, change, join_words, number

METHODS = {"plain": "", "whitened": "_whitened"}  # and how their columns end
_RANKS_ACROSS = 4  # in a table of a terminal
_LEAST_VALUE = 1e-4  # of the largest singular value
_LINES = LinearSegmentedColormap.from_list("layers", ORDERED)


@dataclass(frozen=True)
class TargetRank:
    """A rank as the user asks for it: a number of singular values, or a share of all."""

    number: Fraction
    is_share: bool

    def __str__(self) -> str:
        if self.is_share:
            return f"{self.number.numerator}/{self.number.denominator}"
        return str(self.number)

    def resolve(self, full_rank: int) -> int:
        """The rank for a matrix with this many singular values; a share is rounded, to at least 1."""
        if self.is_share:
            return max(1, int(self.number * full_rank + Fraction(1, 2)))
        return int(self.number)


@dataclass(frozen=True, repr=False)
class Spectrum(RunResult):
    """The result of `spectrum`; layers count from 0.

    Attributes:
        matrices: one row per matrix, as in `spectrum.csv`.
        damage: one row per truncation, as in `damage.csv`; no rows if none was measured.
        values: every singular value, as in `singular_values.csv`.
        base_perplexity: of the unedited model.
        curves: ranks are shared out by them; of a spectrum just found.
    """

    COMMAND = "spectrum"
    RECORD = "spectrum.json"
    TITLE = "Spectrum"
    WITHOUT = "No spectrum: how low the rank of matrices can be is not known (surgeon spectrum)."

    matrices: pd.DataFrame = table_file(
        "spectrum.csv",
        (
            "full_rank",
            *(f"{name}95{ending}" for ending in METHODS.values() for name in ("rank", "kept")),
        ),
        ("weight",),
        ("layer",),
    )
    damage: pd.DataFrame = table_file(
        "damage.csv",
        ("rank", "full_rank", "kept", "perplexity", "divergence", "tokens"),
        ("weight", "method"),
        ("layer",),
        optional=True,
        may_be_empty=True,
    )
    values: pd.DataFrame = table_file(
        "singular_values.csv", ("index", "value"), ("weight", "method"), ("layer",), optional=True
    )
    base_perplexity: float = math.nan
    curves: tuple[Any, ...] = ()

    @classmethod
    def facts(cls, record: Record, file: Path) -> Record:
        # A table beside it may be of an earlier run that measured damage.
        return {"base_perplexity": base_of(record, file, cls.COMMAND)} | (
            {} if record.get("ranks") else {"damage": pd.DataFrame()}
        )

    def shares(self, method: str) -> pd.DataFrame:
        return self.matrices.assign(
            share=self.matrices[f"rank95{METHODS[method]}"] / self.matrices["full_rank"]
        )

    def truncations(self) -> Iterator[tuple[TargetRank, str, pd.DataFrame]]:
        """The ranks that were asked for, each in words, and its rows of `damage`: one of each matrix."""
        if self.damage.empty:
            return
        for rank in parse_ranks(",".join(self.record["ranks"])):
            part = self.damage[self.damage["rank"] == self.damage["full_rank"].map(rank.resolve)]
            if len(part):
                name = f"{rank} of the rank" if rank.is_share else f"rank {rank}"
                yield rank, f"{name} ({part['method'].iloc[0]})", part

    def section(self) -> Iterator[Block]:
        yield (
            "The rank that holds 95% of a matrix's energy (the sum of its squared singular values), as a share of its "
            "full rank. Two factors of rank r have fewer parameters than the matrix only below about half of the full "
            "rank of a square one."
        )
        if len(self.damage):
            base = self.base_perplexity
            legend = damage_legend(
                f"Colours: perplexity over {number(base)}", self.damage["perplexity"], base
            )
            fields = {
                "perplexity": "perplexity",
                "divergence": "divergence",
                "kept": "parameters kept",
            }
            cut = [
                _map(part, f"One matrix cut down to {name}", fields, legend)
                for _, name, part in self.truncations()
            ]
            caption = (
                "Perplexity with one matrix alone at a lower rank, over that of the unedited model, "
                f"{number(base)}."
            )
            yield Picture(cut, caption, "damage")
        legend = Legend(Normalize(0, 1), "Colours: share of the full rank")
        maps = []
        for method, ending in METHODS.items():
            fields = {
                "share": "share of the full rank",
                f"rank95{ending}": "rank",
                f"kept95{ending}": "parameters kept",
            }
            which = "on its inputs"
            if method == "plain":
                which = "itself"
            title = f"Rank with 95% of the energy of the matrix {which} ({method})"
            maps.append(_map(self.shares(method), title, fields, legend))
        yield Picture(maps, name="rank95")

    def pictures(self) -> dict[str, Picture]:
        """`damage`, if it was measured; `rank95`; `singular-values-plain` and `singular-values-whitened`."""
        found = super().pictures()
        for method in METHODS if len(self.values) else ():
            values = self.values[self.values["method"] == method]
            panels = [_decay(str(weight), own) for weight, own in values.groupby("weight", sort=False)]
            found[f"singular-values-{method}"] = Picture(
                panels, f"Singular values ({method}), a line for each layer."
            )
        return found

    def summary(self) -> Iterator[Finding]:
        share = self.shares("whitened").groupby("weight", sort=False)["share"].mean().sort_values()
        text = (
            f"On the inputs it gets, {share.index[0]} needs least rank for 95% of its energy "
            f"({share.iloc[0]:.0%} of the full rank on average), {share.index[-1]} most ({share.iloc[-1]:.0%})."
        )
        yield Finding("Low rank", text)
        if self.damage.empty:
            return
        sentences = []
        for _, name, part in self.truncations():
            ratio = (part["perplexity"] / self.base_perplexity).to_numpy()
            worst = part.iloc[int(ratio.argmax())]
            at_most = (
                f"at most {change(float(ratio.max()))}, layer {int(worst['layer'])}, {worst['weight']}"
            )
            sentences.append(f"{name} {change(float(np.median(ratio)))} ({at_most})")
        text = "In the median over all matrices, the perplexity with one of them cut down changes by"
        yield Finding("Cutting one matrix down", f"{text}: {join_words(sentences)}.")

    def list_missing(self) -> Iterator[str]:
        if self.damage.empty:
            yield "What lower ranks cost was not measured (surgeon spectrum without --no-damage)."
        else:
            yield "Each matrix was cut down alone: what several at once cost is not known."

    def __str__(self) -> str:
        """For each weight medians over layers, of the rank with 95% of the energy and of divergence; in 80 columns."""
        parts = [
            f"base perplexity {self.base_perplexity:.4g} over {self.record['tokens_predicted']:,} predicted tokens\n",
            "Medians over layers: rank with 95% of the energy, as a share of the full rank",
        ]
        if len(self.damage):
            parts.append("(whitened: weighed by the inputs); divergence at lower ranks, nats per token")
        truncations = list(self.truncations())
        for start in range(0, max(1, len(truncations)), _RANKS_ACROSS):
            shown = truncations[start : start + _RANKS_ACROSS]
            lines = [["", "", *["rank95"] * len(METHODS), *["at rank"] * len(shown)]]
            lines.append(
                [
                    "weight",
                    "out x in",
                    *METHODS,
                    *(f"{rank}" + " full" * rank.is_share for rank, _, _ in shown),
                ]
            )
            for weight, rows in self.matrices.groupby("weight", sort=False):
                first = rows.iloc[0]
                medians = [
                    (rows[f"rank95{ending}"] / rows["full_rank"]).median() for ending in METHODS.values()
                ]
                cells = [
                    f"{first['out_features']} x {first['in_features']}",
                    *(f"{share:.2f}" for share in medians),
                ]
                at = (part.loc[part["weight"] == weight, "divergence"].median() for _, _, part in shown)
                lines.append([str(weight), *cells, *(f"{divergence:.3g}" for divergence in at)])
            parts.append(align_columns(lines) + "\n")
        return "\n".join(parts)


def parse_ranks(text: str) -> tuple[TargetRank, ...]:
    """Parse ranks from a list such as "1/8,0.5,32", each once.

    Raises:
        ValueError: naming the wrong entry, and why.
    """
    ranks = []
    for part in filter(None, map(str.strip, text.split(","))):
        is_share = "." in part or "/" in part
        try:
            number = Fraction(part) if is_share else Fraction(int(part))
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"{part!r} is no rank; write a share such as 1/8 or 0.5, or a whole number"
            ) from error
        if number <= 0:
            raise ValueError(f"rank {part} must be more than 0")
        if is_share and number > 1:
            raise ValueError(
                f"rank {part} is above the full rank; a share is at most 1.0, a whole number has no point"
            )
        ranks.append(TargetRank(number, is_share))
    if not ranks:
        raise ValueError(
            "no rank is given; write shares of the full rank such as 1/8,1/2, or whole numbers"
        )
    return tuple(dict.fromkeys(ranks))


def _map(table: pd.DataFrame, title: str, fields: Mapping[str, str], legend: Legend) -> Map:
    return Map(title, table, "weight", "layer", fields, legend, flat=HALF)


def _decay(weight: str, values: pd.DataFrame) -> Chart:
    lines = {layer: line["value"] / line["value"].max() for layer, line in values.groupby("layer")}
    last = max(1.0, float(values["layer"].max()))

    def draw(axes: Axes) -> None:
        scale(axes, "x", [0, int(values["index"].max()) + 1], zero=True)
        scale(
            axes,
            "y",
            [max(_LEAST_VALUE, value) for line in lines.values() for value in line if value > 0],
            log=True,
        )
        for layer, line in lines.items():
            shown = line.where(line > 0)
            axes.plot(
                values.loc[line.index, "index"] + 1,
                shown,
                color=_LINES(float(str(layer)) / last),
                lw=0.9,
            )

    return Chart(weight, draw, "number", "relative to the largest")
