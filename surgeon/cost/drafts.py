"""Drafting by the cost model: an edited program proposes, the unedited one verifies.

As in the runtime, a draft's pass adds one token to each text, and a verifying pass costs as much as one of so many more
texts. A draft's steps lie on ranks as the model's keys and values do; it has a pass over prompts if it keeps keys of
its own. `runtime.batching.ahead` finds the best number of tokens ahead, here the same for all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from surgeon.cost.hardware import Hardware
from surgeon.cost.plans import plan_on_paper, room
from surgeon.cost.predict import Prediction, mean_decode
from surgeon.cost.sweep import MS, SweepCell, explain_memory
from surgeon.cost.work import Forward
from surgeon.findings.speeds import DRAFT_COLUMNS
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
    model: Prediction, draft: Program, acceptances: Sequence[float]
) -> list[DraftedPrediction]:
    """Predict drafting of a program for a predicted one at each of several acceptances."""
    read_chances(acceptances)
    drafting = DraftPrices(model)
    beside = drafting.beside(draft)
    seconds = drafting.seconds(beside.plan)
    prompts = drafting.prompts(beside)
    return [drafting.at(acceptance, seconds, prompts) for acceptance in acceptances]


@dataclass(frozen=True)
class DraftPrices:
    """A predicted model that verifies drafts of any programs over its weights; checked as it is made."""

    model: Prediction
    _verification_times: dict[int, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.model.workload.new < 2:
            raise ValueError(
                "the first new token comes of the prompt's pass; to draft, ask for at least 2"
            )

    def plan(self, draft: Program) -> Plan:
        """Plan a draft that uses the model's keys and values only."""
        return draft_on_paper(self.model.plan, self.model.ranks.shapes, draft)

    def beside(self, draft: Program) -> DraftPlan:
        """Plan any draft beside the model."""
        ranks = self.model.ranks
        found = _beside(ranks.plan, ranks.shapes, draft)
        load = self.model.workload
        needed = room(
            ranks.shapes, replace(ranks.plan, draft=found), ranks.hardware, load.batch, load.prompt
        )
        if self.model.memory.fits and not needed.fits:
            raise ValueError(
                f"the model and its draft need {show_size(needed.needed)} on a rank, and {ranks.hardware.name} has "
                f"{show_size(needed.there)} for it; use more ranks, or fewer or shorter texts"
            )
        return found

    def prompts(self, draft: DraftPlan) -> float:
        """Seconds of a draft's pass over all prompts, for keys of its own; 0 if it keeps none."""
        if not draft.keeps_own:
            return 0.0
        load = self.model.workload
        forward = Forward(load.batch, load.prompt, asked=1)
        return replace(self.model.ranks, plan=draft.plan).forward(forward, graphs=False).seconds

    def seconds(self, draft: Plan) -> float:
        """Mean seconds of a draft's pass."""
        return mean_decode(replace(self.model.ranks, plan=draft), self.model.workload).seconds

    def verifying(self, tokens: int) -> float:
        """Seconds of a pass of the model over so many tokens of each text."""
        if tokens not in self._verification_times:
            load = replace(self.model.workload, batch=self.model.workload.batch * tokens)
            self._verification_times[tokens] = mean_decode(self.model.ranks, load).seconds
        return self._verification_times[tokens]

    def at(self, acceptance: float, draft: float, prompts: float = 0.0) -> DraftedPrediction:
        """Price drafting at an acceptance."""
        (ahead,), rate = best_ahead([acceptance], [MOST_AHEAD], lambda _: draft, self.verifying)
        per_token = 1 / rate + (prompts / (self.model.workload.new - 1) if ahead else 0.0)
        if prompts and per_token > self.verifying(1):
            ahead = 0
            per_token = self.verifying(1)
        return DraftedPrediction(
            self.model, acceptance, ahead, draft, self.verifying(ahead + 1), per_token
        )


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
    load = plain.workload
    ranks = plain.deployment.ranks
    draft = alone.candidate.program(ranks)
    sizes = ranks, load.batch, load.prompt, load.new
    dense = plain.prediction.rate
    lossy = alone.prediction.rate
    rows = []
    for found in predict_drafting(plain.prediction, draft, acceptances):
        times = found.draft * MS, found.verify * MS, found.per_token * MS
        values = (
            *sizes,
            found.acceptance,
            found.ahead,
            *times,
            dense,
            found.rate,
            lossy,
            found.rate / dense,
            lossy / dense,
        )
        rows.append(dict(zip(DRAFT_COLUMNS, values, strict=True)))
    return rows
