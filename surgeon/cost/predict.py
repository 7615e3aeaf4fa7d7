"""Predictions of a program on described hardware: first token, every further one, memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from surgeon.cost.deployment import Deployment
from surgeon.cost.hardware import Hardware
from surgeon.cost.passes import PassCost, PredictedRanks
from surgeon.cost.plans import Room, plan_on_paper, room
from surgeon.cost.work import Forward
from surgeon.cost.workload import Workload
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.plan.specification import Plan


@dataclass(frozen=True)
class Prediction:
    """Costs of a program.

    Attributes:
        prefill: the pass over all prompts, which brings the first token.
        decode: the mean pass of one token of each text; None if only one token is asked for.
        memory: of the rank that needs most.
    """

    plan: Plan
    workload: Workload
    prefill: PassCost
    decode: PassCost | None
    memory: Room

    @property
    def first_token(self) -> float:
        """Seconds until every text has its first new token."""
        return self.prefill.seconds

    @property
    def per_token(self) -> float:
        """Seconds of each further token of every text, the mean; NaN if there is none."""
        if self.decode:
            return self.decode.seconds
        return float("nan")

    @property
    def total(self) -> float:
        return self.first_token + (self.per_token * (self.workload.new - 1) if self.decode else 0.0)

    @property
    def rate(self) -> float:
        return self.workload.batch * self.workload.new / self.total

    @property
    def share(self) -> float:
        """The part of all time in which ranks wait for collectives."""
        later = self.decode.exposed * (self.workload.new - 1) if self.decode else 0.0
        return (self.prefill.exposed + later) / self.total


def predict(
    shapes: ModelShapes, program: Program, hardware: Hardware, workload: Workload, deployment: Deployment
) -> Prediction:
    """Predict a program's costs; whether it fits into memory is noted, not enforced.

    Raises:
        ValueError: if the program, the ranks or the texts' length do not fit the model, or the hardware lacks a figure,
            a link or a device that is asked for.
    """
    dtype = deployment.dtype or hardware.dtype(shapes.dtype)
    plan = plan_on_paper(shapes, program, deployment.ranks, workload.length, dtype, deployment.low_rank, deployment.kv)
    ranks = PredictedRanks(shapes, plan, hardware, deployment)
    prefill = ranks.forward(Forward(workload.batch, workload.prompt, asked=1), graphs=False)
    decode = mean_decode(ranks, workload) if workload.new > 1 else None
    memory = room(shapes, plan, hardware, workload.batch, workload.prompt)
    return Prediction(plan, workload, prefill, decode, memory)


def mean_decode(ranks: PredictedRanks, workload: Workload) -> PassCost:
    """The mean of all decoding passes, by Simpson's rule of the first, the middle and the last one."""
    first = workload.prompt
    last = workload.prompt + workload.new - 2
    weights = {first: 1 / 6, (first + last) // 2: 4 / 6, last: 1 / 6}
    if last <= first + 1:
        weights = dict.fromkeys((first, last), 1 / (last - first + 1))
    passes = {before: ranks.forward(Forward(workload.batch, 1, before), ranks.captured) for before in weights}
    means = {
        name: sum(weight * getattr(passes[before], name) for before, weight in weights.items())
        for name in ("seconds", "compute", "launches", "exposed", "communication")
    }
    return replace(passes[first], **means)
