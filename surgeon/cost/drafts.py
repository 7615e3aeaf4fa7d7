"""Drafting by the cost model: an edited program proposes, the unedited one verifies.

As in the runtime, a draft's pass adds one token to each text, and a verifying pass costs as much as one of so many more
texts. A draft's steps lie on ranks as the model's keys and values do; it has a pass over prompts if it keeps keys of
its own. `runtime.batching.ahead` finds the best number of tokens ahead, here the same for all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from surgeon.cost.deployment import Deployment, Workload
from surgeon.cost.hardware import Hardware
from surgeon.cost.plans import plan_on_paper, room
from surgeon.cost.predict import PredictedRanks, Prediction, mean_decode, predict
from surgeon.cost.sweep import MS, SweepCell, explain_memory
from surgeon.cost.work import Forward
from surgeon.findings.prediction import DRAFT_COLUMNS
from surgeon.language.program import Program
from surgeon.machine import show_size
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.batching.ahead import MOST_AHEAD, best_ahead
from surgeon.runtime.plan.drafts import draft_beside, require_shared
from surgeon.runtime.plan.specification import DraftPlan, Plan


@dataclass(frozen=True)
class DraftedPrediction:
    """Drafting for all texts of a load, with the best number of tokens ahead.

    Attributes:
        model: the unedited program without drafts.
        acceptance: the chance of a drafted token to be right, given that those before it are.
        ahead: tokens drafted for each text; 0 where drafts do not pay.
        draft: seconds of one pass of the draft.
        verify: seconds of a pass of the model over ahead + 1 tokens of each text.
        per_token: seconds of each further token of every text, the mean, with the draft's time for prompts.
    """

    model: Prediction
    acceptance: float
    ahead: int
    draft: float
    verify: float
    per_token: float

    @property
    def speedup(self) -> float:
        """Times the tokens per second without drafts, behind the prompts."""
        return self.model.per_token / self.per_token

    @property
    def rate(self) -> float:
        """New tokens per second of all texts, prompts included."""
        load = self.model.workload
        return load.batch * load.new / (self.model.first_token + self.per_token * (load.new - 1))


def predict_drafting(
    shapes: ModelShapes,
    programs: tuple[Program, Program],
    hardware: Hardware,
    workload: Workload,
    deployment: Deployment,
    acceptances: Sequence[float],
) -> list[DraftedPrediction]:
    """Predict drafting at each of several acceptances."""
    read_chances(acceptances)
    drafting = DraftPrices(shapes, programs[0], hardware, workload, deployment)
    beside = drafting.beside(programs[1])
    draft = drafting.seconds(beside.plan)
    prompts = drafting.prompts(beside)
    return [drafting.at(acceptance, draft, prompts) for acceptance in acceptances]


@dataclass(frozen=True)
class DraftPrices:
    """A model that verifies drafts of any programs over its weights; checked as it is made.

    Attributes:
        program: the one that verifies.
    """

    shapes: ModelShapes
    program: Program
    hardware: Hardware
    workload: Workload
    deployment: Deployment

    def __post_init__(self) -> None:
        if self.workload.new < 2:
            raise ValueError(
                "the first new token comes of the prompt's pass; to draft, ask for at least 2"
            )
        _ = self.model

    @cached_property
    def model(self) -> Prediction:
        return predict(self.shapes, self.program, self.hardware, self.workload, self.deployment)

    def plan(self, draft: Program) -> Plan:
        """Plan a draft that uses the model's keys and values only."""
        return draft_on_paper(self.model.plan, self.shapes, draft)

    def beside(self, draft: Program) -> DraftPlan:
        """Plan any draft beside the model."""
        found = _beside(self.model.plan, self.shapes, draft)
        load = self.workload
        needed = room(
            self.shapes, replace(self.model.plan, draft=found), self.hardware, load.batch, load.prompt
        )
        if self.model.memory.fits and not needed.fits:
            raise ValueError(
                f"the model and its draft need {show_size(needed.needed)} on a rank, and {self.hardware.name} has "
                f"{show_size(needed.there)} for it; use more ranks, or fewer or shorter texts"
            )
        return found

    def prompts(self, draft: DraftPlan) -> float:
        """Seconds of a draft's pass over all prompts, for keys of its own; 0 if it keeps none."""
        if not draft.keeps_own:
            return 0.0
        ranks = PredictedRanks(self.shapes, draft.plan, self.hardware, self.deployment)
        return ranks.forward(
            Forward(self.workload.batch, self.workload.prompt, asked=1), graphs=False
        ).seconds

    def seconds(self, draft: Plan) -> float:
        """Mean seconds of a draft's pass."""
        ranks = PredictedRanks(self.shapes, draft, self.hardware, self.deployment)
        return mean_decode(ranks, self.workload).seconds

    def verifying(self, tokens: int) -> float:
        """Seconds of a pass of the model over so many tokens of each text."""
        if tokens not in self._verification_times:
            ranks = PredictedRanks(self.shapes, self.model.plan, self.hardware, self.deployment)
            load = replace(self.workload, batch=self.workload.batch * tokens)
            self._verification_times[tokens] = mean_decode(ranks, load).seconds
        return self._verification_times[tokens]

    def at(self, acceptance: float, draft: float, prompts: float = 0.0) -> DraftedPrediction:
        """Price drafting at an acceptance."""
        (ahead,), rate = best_ahead([acceptance], [MOST_AHEAD], lambda _: draft, self.verifying)
        per_token = 1 / rate + (prompts / (self.workload.new - 1) if ahead else 0.0)
        if prompts and per_token > self.verifying(1):
            ahead = 0
            per_token = self.verifying(1)
        return DraftedPrediction(
            self.model, acceptance, ahead, draft, self.verifying(ahead + 1), per_token
        )

    @cached_property
    def _verification_times(self) -> dict[int, float]:
        return {}


def draft_on_paper(plan: Plan, shapes: ModelShapes, draft: Program) -> Plan:
    """Plan a draft beside a model that costs passes only."""
    return require_shared(
        _beside(plan, shapes, draft), "for those it computes prompts, too, which has no price here"
    )


def _beside(plan: Plan, shapes: ModelShapes, draft: Program) -> DraftPlan:
    ways = plan.ranks, plan.max_tokens, plan.dtype, plan.low_rank, plan.kv
    found = draft_beside(plan, shapes, partial(plan_on_paper, shapes, draft, *ways))
    return replace(found, plan=replace(found.plan, mixtures=plan.mixtures))


def read_chances(acceptances: Sequence[str | float]) -> list[float]:
    """Read acceptances as chances."""
    chances = []
    for acceptance in acceptances:
        try:
            chances.append(float(acceptance))
        except ValueError:
            raise ValueError(
                f"{acceptance!r} is no chance; give acceptances from 0 to 1, e.g. 0.6,0.8"
            ) from None
        if not 0 <= chances[-1] <= 1:
            raise ValueError(f"an acceptance is a chance from 0 to 1, not {acceptance}")
    return chances


def draft_cells(
    plain: SweepCell, alone: SweepCell, hardware: Hardware, acceptances: Sequence[float]
) -> list[dict[str, float]]:
    """Make a row of `DRAFT_COLUMNS` for each acceptance: drafting beside the model without drafts and the draft alone.

    Args:
        plain, alone: the model's cell and the draft's, of the same ranks and load.
    """
    for one in (plain, alone):
        if one.refused:
            raise ValueError(one.refused if one.prediction is None else explain_memory(one, hardware))
    assert plain.prediction is not None
    assert alone.prediction is not None
    shapes = plain.candidate.model.shapes
    load = plain.workload
    ranks = plain.deployment
    programs = plain.candidate.program(ranks.ranks), alone.candidate.program(ranks.ranks)
    sizes = {"ranks": ranks.ranks, "batch": load.batch, "prompt": load.prompt, "new": load.new}
    dense = plain.prediction.rate
    lossy = alone.prediction.rate
    rows = []
    for found in predict_drafting(shapes, programs, hardware, load, ranks, acceptances):
        times = found.draft * MS, found.verify * MS, found.per_token * MS
        values = (
            found.acceptance,
            found.ahead,
            *times,
            dense,
            found.rate,
            lossy,
            found.rate / dense,
            lossy / dense,
        )
        rows.append(sizes | dict(zip(DRAFT_COLUMNS[4:], values, strict=True)))
    return rows
