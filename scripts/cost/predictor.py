"""Seconds of a paper's run by the cost model, quickly: from a few layers, as all of a kind are alike.

A pass over L layers is linear in them once the first few are behind it, so that two short models give the long one's
time, to a few parts in a thousand of a whole prediction's, which a test holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig

from scripts.cost.cases import Run
from scripts.cost.constants import CONSTANTS, fitted
from scripts.cost.models import CONFIGS, LOW_RANK, program_of
from surgeon.cost.deployment import Deployment, plan_on_paper
from surgeon.cost.hardware import Hardware, load_hardware
from surgeon.cost.predict import PredictedRanks
from surgeon.cost.work import Forward
from surgeon.language.sublayer import LayerShapes
from surgeon.models.shapes import ModelShapes

Values = Mapping[str, float]
UNFUSED = ("eager", "forward")  # PyTorch's modules: an addition and a norm are launched apart
# Seconds of a pass come first, then what of them is computing, waiting for launches, waiting for collectives.
Times = NDArray[np.float64]


@cache
def config_of(model: str) -> Any:
    """The configuration of a model of the papers."""
    sizes = dict(CONFIGS[model])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


@cache
def shapes_of(model: str, layers: int | None = None) -> ModelShapes:
    """Its shapes, with fewer or more layers where that is said."""
    shapes = ModelShapes.of(model, config_of(model))
    if layers is None:
        return shapes
    return replace(shapes, layers=layers)


@cache
def layer_shapes_of(model: str) -> LayerShapes:
    """Those of its layers."""
    config = config_of(model)
    return shapes_of(model).family.layer_shapes(config)


@cache
def hardware_of(name: str) -> Hardware:
    """As shipped."""
    return load_hardware(name)


class Predictor:
    """Predicts runs with any values of the constants, and remembers what it has predicted."""

    def __init__(self) -> None:
        self._known: dict[Any, Times] = {}

    def __call__(self, run: Run, values: Values) -> float:
        """Seconds of what the run's row shows: of a pass, of all tokens (for a rate), or of a part of a layer."""
        if run.per_layers:
            return self._part_of_layers(run, values)
        if run.measure == "first":
            return float(self._pass(run, values, prefill=True)[0])
        decode = float(self._pass(run, values, prefill=False)[0])
        if run.measure == "token":
            return decode
        return float(self._pass(run, values, prefill=True)[0]) + (run.new - 1) * decode

    def _part_of_layers(self, run: Run, values: Values) -> float:
        prefill = run.new == 1 and run.prompt * run.batch > 1 and run.stack == "deinfer"
        layers = shapes_of(run.model).layers
        whole = self._pass(run, values, prefill, layers)
        difference = whole - self._pass(run, values, prefill, layers - run.per_layers)
        seconds, compute, launches, exposed = map(float, difference)
        return {"exchange": exposed, "total": seconds}.get(run.measure, compute + launches)

    def _pass(self, run: Run, values: Values, prefill: bool, layers: int | None = None) -> Times:
        layers = layers or shapes_of(run.model).layers
        concerned = tuple(values[one.name] for one in CONSTANTS if one.concerns(run))
        key = replace(run, measure="token"), run.measure == "first", prefill, layers, concerned
        if key not in self._known:
            hardware = fitted(hardware_of(run.hardware), run, values)
            self._known[key] = self._long(run, hardware, prefill, layers)
        return self._known[key]

    def _long(self, run: Run, hardware: Hardware, prefill: bool, layers: int) -> Times:
        name, *numbers = run.system.split(":")
        if name == "lp":
            pairs = min(int(numbers[0]), layers // 2)
            plain = self._long(replace(run, system="dense"), hardware, prefill, layers - 2 * pairs)
            few, more = (
                self._short(replace(run, system=f"lp:{n}:{2 * n}"), hardware, prefill, 2 * n)
                for n in (2, 4)
            )
            return plain + (more - few) * (pairs / 2)
        unit = int(numbers[0]) if name == "tracks" else 4
        first = self._short(run, hardware, prefill, unit)
        second = self._short(run, hardware, prefill, 2 * unit)
        return first + (second - first) * (1 / unit) * (layers - unit)

    def _short(self, run: Run, hardware: Hardware, prefill: bool, layers: int) -> Times:
        shapes = shapes_of(run.model, layers)
        program = program_of(run.system, layers, layer_shapes_of(run.model))
        deployment = deployment_of(run)
        plan = plan_on_paper(
            shapes, program, run.ranks, run.prompt + run.new, "bfloat16", deployment.low_rank, "full"
        )
        ranks = PredictedRanks(shapes, plan, hardware, deployment)
        if prefill:
            cost = ranks.forward(Forward(run.batch, run.prompt), graphs=run.stack == "graphs")
        else:
            cost = ranks.forward(Forward(run.batch, 1, run.prompt + run.new // 2), run.graphs)
        return np.array([cost.seconds, cost.compute, cost.launches, cost.exposed])


def deployment_of(run: Run) -> Deployment:
    return Deployment(
        run.ranks,
        "bfloat16",
        link=run.link,
        graphs=run.graphs,
        adding=run.stack not in UNFUSED,
        low_rank=LOW_RANK.get(run.system, "auto"),  # type: ignore[arg-type]
        connected=run.system != "upper",
    )
