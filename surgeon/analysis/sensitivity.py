"""What running neighbouring layers as an LP pair should cost, by appendix A of the Layer Parallelism paper, and does.

For every pair: the terms of equation 12 on a few windows (see `surgeon.analysis.lp_error`), the factor by which the
layers after the pair may enlarge an error (equation 13, the product of the operator norms of I + J_f), and the damage
to the model's predictions that is measured with just this pair in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from transformers import PreTrainedModel

from surgeon.analysis.correlation import rank_correlation
from surgeon.analysis.engine.measure import MeasureOptions, measure
from surgeon.analysis.engine.memory import windows_at_once
from surgeon.analysis.engine.program_journal import ProgramJournal
from surgeon.analysis.engine.sharing import share
from surgeon.analysis.engine.walk import Walk
from surgeon.analysis.jacobian import OperatorNorm, PowerIteration, differentiable
from surgeon.analysis.lp_error import TERMS, layer_norm, pair_terms
from surgeon.language.operations.pair import pair
from surgeon.models.edit import program_of, require_unedited
from surgeon.progress import progress
from surgeon.provenance import FORMAT
from surgeon.quality.data import Windows
from surgeon.quality.summary import estimate, perplexity
from surgeon.results.sensitivity import DAMAGES, PREDICTORS, Sensitivity

JOURNAL = "sensitivity.jsonl"
DEFAULT_WINDOWS = 4

Values = NDArray[np.float64]


def sensitivity(
    model: PreTrainedModel,
    windows: Windows,
    folder: Path,
    *,
    model_hash: str,
    power: PowerIteration | None = None,
    jacobian_windows: int = DEFAULT_WINDOWS,
    memory: int | None = None,
    record: dict[str, Any] | None = None,
) -> Sensitivity:
    """Measure all pairs of neighbouring layers, and write `sensitivity.csv` and `sensitivity.json`.

    Started again on the same folder it goes on where it was, by `sensitivity.jsonl`.

    Args:
        power: how operator norms are found.
        jacobian_windows: on how many windows, spread over all of them.
        memory: a limit in bytes on the memory of the whole process; Jacobians take one window, whatever it is.
        record: provenance to begin `sensitivity.json` with.

    Raises:
        ValueError: if the model is an edited one, has only one layer, its streams are not finite (naming the
            sublayer), the folder holds results of something else, or the memory limit is too small.
        OSError: if the folder cannot be written to.
    """
    require_unedited(model)
    num_layers = model.config.num_hidden_layers
    if num_layers < 2:
        raise ValueError(f"the model has {num_layers} layer; a pair in parallel needs at least 2")
    if jacobian_windows < 1:
        raise ValueError(f"the number of windows for Jacobians must be at least 1, not {jacobian_windows}")
    power = power or PowerIteration()
    chosen = spread(len(windows.ids), jacobian_windows)
    identity = {
        "model_hash": model_hash,
        "data": windows.digest,
        "choice of windows for Jacobians": chosen,
        "number of iterations": power.iterations,
        "tolerance": power.tolerance,
        "seed": power.seed,
    }
    with SensitivityJournal(folder, identity, len(windows.ids)) as journal:
        damage = _Damage(model, windows, journal, memory)
        damage.measure_missing()
        local = _Local(model, windows, chosen, power, journal)
        local.compute_missing()
    table = _table(local, damage)
    correlations = _correlations(table)
    within = [one["terms"]["error"] <= one["terms"]["bound"] for one in journal.layers.values() if one["terms"]]
    record = (record or {}) | {
        "jacobian_windows": chosen,
        "iterations": power.iterations,
        "tolerance": power.tolerance,
        "base_perplexity": damage.base_perplexity,
        "errors_within_bound": sum(within),
        "errors": len(within),
        "correlations": correlations.replace({math.nan: None}).to_dict("records"),
    }
    found = Sensitivity(table, correlations, record=record)
    found.write(folder)
    return found


def spread(windows: int, wanted: int) -> list[int]:
    """The numbers of up to this many windows, spread evenly over all of them."""
    return sorted({int(place) for place in np.linspace(0, windows - 1, min(wanted, windows)).round()})


class SensitivityJournal(ProgramJournal):
    """What a folder's sensitivity has found: damage of pairs, and what is computed for each layer by itself.

    Attributes:
        layers: by window and layer, what `_line` makes.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], windows: int) -> None:
        self.layers: dict[tuple[int, int], dict[str, Any]] = {}
        super().__init__(folder, JOURNAL, "sensitivity", {"format": FORMAT} | identity, windows)

    def take(self, line: Any) -> None:
        if "layer" in line:
            self.layers[line["window"], line["layer"]] = line
        else:
            super().take(line)


class _Local:
    """What is computed for each pair by itself: terms of equation 12, and each layer's factor in equation 13."""

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Windows,
        chosen: Sequence[int],
        power: PowerIteration,
        journal: SensitivityJournal,
    ) -> None:
        self.model, self.windows, self.chosen, self.power, self.journal = model, windows, chosen, power, journal
        self.found = journal.layers
        self.num_layers: int = model.config.num_hidden_layers

    def compute_missing(self) -> None:
        with progress("jacobians", len(self.chosen) * self.num_layers, "layers", len(self.found)) as ran:
            for line in self._missing():
                self.journal.keep(line)
                ran(1)

    def _missing(self) -> Iterator[dict[str, Any]]:
        for window in self.chosen:
            todo = [layer for layer in range(self.num_layers) if (window, layer) not in self.found]
            if not todo:
                continue
            with differentiable():
                walk = Walk(self.model, self.windows.ids[window : window + 1])
                stream = walk.start
                for layer in range(todo[-1] + 1):
                    passed = walk.dense_layer(layer, stream)
                    if layer in todo:
                        terms = pair_terms(walk, layer, passed, self.power) if layer + 1 < self.num_layers else None
                        # No pair has the first two layers after it.
                        gain = layer_norm(walk, layer, stream, self.power) if layer > 1 else None
                        norms = [*(terms.norms if terms else []), *([gain] if gain else [])]
                        yield _line(window, layer, terms.values if terms else None, gain, norms)
                    stream = passed.after

    def terms(self, first: int) -> list[dict[str, float]]:
        """Of a pair, one dictionary per window."""
        return [self.found[window, first]["terms"] for window in self.chosen]

    def amplification(self, first: int) -> Values:
        """The decimal logarithm of equation 13's product over the layers after a pair, (windows,)."""
        after = range(first + 2, self.num_layers)
        gains = [[self.found[window, layer]["gain"] for layer in after] for window in self.chosen]
        with np.errstate(divide="ignore"):
            sums: Values = np.log10(np.array(gains, dtype=np.float64)).sum(1)
        return sums

    def effort(self, first: int) -> tuple[int, bool]:
        """Of the operator norms computed with a pair: the most iterations, and whether all converged."""
        lines = [self.found[window, first] for window in self.chosen]
        return max(line["iterations"] for line in lines), all(line["converged"] for line in lines)


def _line(
    window: int, layer: int, terms: dict[str, float] | None, gain: OperatorNorm | None, norms: list[OperatorNorm]
) -> dict[str, Any]:
    return {
        "window": window,
        "layer": layer,
        "terms": terms,
        "gain": gain.value if gain else None,
        "iterations": max((norm.iterations for norm in norms), default=0),
        "converged": all(norm.converged for norm in norms),
    }


class _Damage:
    """What each pair in parallel does to the model's predictions, on all windows."""

    def __init__(
        self, model: PreTrainedModel, windows: Windows, journal: SensitivityJournal, memory: int | None
    ) -> None:
        self.model, self.ids, self.journal, self.memory = model, windows.ids, journal, memory
        self.everything = range(len(windows.ids))
        self.dense = program_of(model)
        num_pairs = model.config.num_hidden_layers - 1
        self.programs = [pair(self.dense, range(first, first + 2)) for first in range(num_pairs)]

    def measure_missing(self) -> None:
        plan, is_done = share([self.dense, *self.programs]), self.journal.is_done
        at_once = windows_at_once(self.model, plan, self.ids, self.memory)
        done = sum(plan.sublayers[p] for p in self.programs if is_done(p, self.everything))
        with progress("damage", plan.total_sublayers, "sublayers", done) as ran:
            options = MeasureOptions(at_once, is_done, ran, memory=self.memory, folder=self.journal.folder)
            measured = measure(self.model, self.ids, plan, options)
            self.journal.add_new(measured, self.everything)

    def columns(self, first: int) -> dict[str, float]:
        """The measured columns of a pair."""
        found = estimate(*self.journal.values(self.programs[first], self.everything))
        columns = ("perplexity", "divergence", "divergence_low", "divergence_high")
        ratio = float(np.log(found.perplexity / self.base_perplexity))
        return {name: getattr(found, name) for name in columns} | {"log_perplexity_ratio": ratio}

    @property
    def base_perplexity(self) -> float:
        """Of the unedited model."""
        return perplexity(self.journal.values(self.dense, self.everything)[0])


def _table(local: _Local, damage: _Damage) -> pd.DataFrame:
    rows = []
    for first in range(local.num_layers - 1):
        by_window = pd.DataFrame(local.terms(first), columns=list(TERMS))
        row: dict[str, Any] = {"first": first, "last": first + 1, **by_window.mean()}
        for name in ("bound", "first_order", "error"):
            row[f"relative_{name}"] = (by_window[name] / by_window["stream_norm"]).mean()
        amplification = local.amplification(first)
        with np.errstate(divide="ignore"):
            output_bound = amplification + np.log10(by_window["bound"].to_numpy())
        row |= {"log10_amplification": amplification.mean(), "log10_output_bound": output_bound.mean()}
        iterations, converged = local.effort(first)
        rows.append(row | damage.columns(first) | {"iterations": iterations, "converged": converged})
    return pd.DataFrame(rows)


def _correlations(table: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for predictor in PREDICTORS:
        for damage in DAMAGES:
            if predictor != damage:
                found = rank_correlation(table[predictor], table[damage])
                rows.append((predictor, damage, found.rho, found.p, found.n))
    return pd.DataFrame(rows, columns=["predictor", "damage", "rho", "p", "n"])
