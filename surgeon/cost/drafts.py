"""What drafting costs and brings by the model of costs: an edited program proposes, the unedited one verifies.

As in the runtime, a draft's pass adds one token to each text, and a verifying pass has a row of each token, so that it
costs what a pass of so many more texts does. A draft has no prompt pass of its own, and its steps lie on ranks as the
model's keys and values do. How many tokens ahead are best says `runtime.batching.ahead`, here the same for all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from surgeon.cost.hardware import Hardware
from surgeon.cost.plans import plan_on_paper
from surgeon.cost.predict import Deployment, PredictedRanks, Prediction, mean_decode, predict
from surgeon.cost.sweep import MS, SweepCell, explain_memory
from surgeon.cost.workload import Workload
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.results.drafts import DRAFT_COLUMNS
from surgeon.runtime.batching.ahead import MOST_AHEAD, best_ahead
from surgeon.runtime.plan.drafts import draft_beside
from surgeon.runtime.plan.specification import Plan


@dataclass(frozen=True)
class DraftedPrediction:
    """Drafting for all texts of a load, with the best number of tokens ahead.

    Attributes:
        model: what the unedited program costs without drafts.
        acceptance: the chance of a drafted token to be right, given that those before it are.
        ahead: tokens drafted for each text; 0 where drafts do not pay.
        draft: seconds of one pass of the draft.
        verify: seconds of a pass of the model over ahead + 1 tokens of each text.
        per_token: seconds of each further token of every text, the mean.
    """

    model: Prediction
    acceptance: float
    ahead: int
    draft: float
    verify: float
    per_token: float

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
    """Drafting at each of several acceptances.

    Args:
        programs: the one that verifies, and the one that drafts.

    Raises:
        ValueError: as `predict`; and if there is no token to draft, an acceptance is no chance, or the draft's
            attentions have no keys and values to read.
    """
    check_chances(acceptances)
    if workload.new < 2:
        raise ValueError("the first new token comes of the prompt's pass; to draft, ask for at least 2")
    if deployment.kv == "lowrank":
        raise ValueError("drafts read the keys and values of the model's own program; use kv full, not lowrank")
    model = predict(shapes, programs[0], hardware, workload, deployment)
    plan = model.plan

    def paper(sliced: bool) -> Plan:
        return plan_on_paper(
            shapes, programs[1], plan.ranks, plan.max_tokens, plan.dtype, plan.low_rank, "full", sliced
        )

    draft_plan = replace(draft_beside(plan, shapes, paper).plan, mixtures=plan.mixtures)
    verifier, drafter = (PredictedRanks(shapes, one, hardware, deployment) for one in (plan, draft_plan))
    draft = mean_decode(drafter, workload).seconds

    @cache
    def verifying(tokens: int) -> float:
        return mean_decode(verifier, replace(workload, batch=workload.batch * tokens)).seconds

    found = []
    for acceptance in acceptances:
        (ahead,), rate = best_ahead([acceptance], [MOST_AHEAD], lambda _: draft, verifying)
        found.append(DraftedPrediction(model, acceptance, ahead, draft, verifying(ahead + 1), 1 / rate))
    return found


def check_chances(acceptances: Sequence[float]) -> Sequence[float]:
    """Acceptances, if they are chances.

    Raises:
        ValueError: if one is none.
    """
    for acceptance in acceptances:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"an acceptance is a chance from 0 to 1, not {acceptance:g}")
    return acceptances


def draft_cells(
    plain: SweepCell, alone: SweepCell, hardware: Hardware, acceptances: Sequence[float]
) -> list[dict[str, float]]:
    """A row of `DRAFT_COLUMNS` for each acceptance: drafting beside the model without drafts and the draft alone.

    Args:
        plain, alone: the model's cell and the draft's, of the same ranks and load.

    Raises:
        ValueError: if one of both is refused, or as `predict_drafting`.
    """
    for one in (plain, alone):
        if one.refused:
            raise ValueError(one.refused if one.prediction is None else explain_memory(one, hardware))
    assert plain.prediction is not None
    assert alone.prediction is not None
    shapes, load, ranks = plain.candidate.model.shapes, plain.workload, plain.deployment
    programs = plain.candidate.program(ranks.ranks), alone.candidate.program(ranks.ranks)
    sizes = {"ranks": ranks.ranks, "batch": load.batch, "prompt": load.prompt, "new": load.new}
    dense, lossy = plain.prediction.rate, alone.prediction.rate
    rows = []
    for found in predict_drafting(shapes, programs, hardware, load, ranks, acceptances):
        times = found.draft * MS, found.verify * MS, found.per_token * MS
        values = found.acceptance, found.ahead, *times, dense, found.rate, lossy, found.rate / dense, lossy / dense
        rows.append(sizes | dict(zip(DRAFT_COLUMNS[4:], values, strict=True)))
    return rows
