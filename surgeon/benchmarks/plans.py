"""Plans of what is measured: what ranks load of each candidate."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from surgeon.analysis.factors.factor_plan import plan_factors
from surgeon.cost.candidates import Candidate
from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import HalvesMode, Plan, Ways, require_low_rank


@dataclass(frozen=True)
class Needs:
    """What all that is measured has in common.

    Attributes:
        tokens: of prompt and output together.
        device: "cpu" or "cuda".
        ways: how it is computed; a `kv` of "lowrank" is for those that can.
    """

    ranks: int
    tokens: int
    device: str
    ways: Ways = field(default_factory=Ways)

    def plan(self, model: str | Path | Model, program: Program | str | None = None, halves: HalvesMode = "off") -> Plan:
        text = None
        if program is not None:
            text = str(program)
        lowrank = self.ways.get("kv") == "lowrank"
        ways: Ways = {**self.ways, "kv": "auto"} if lowrank else self.ways
        plan = make_plan(model, self.ranks, self.tokens, text, self.device, halves=halves, **ways)
        if lowrank and plan.can_be_low_rank:
            return replace(plan, kv="lowrank")
        return plan


def plan_candidates(candidates: Iterable[Candidate], needs: Needs) -> dict[str, Plan]:
    """The candidates' plans, by name."""
    plans = {}
    for one in candidates:
        plans[one.name] = needs.plan(one.model, one.program(needs.ranks), one.halves)
        if one.recipe is not None and not plan_factors(one.recipe, one.model).is_of_weights:
            warnings.warn(
                f"{one.recipe.source}: ranks run factors, heads and neurons by the weights alone, not those that the "
                "recipe chooses: as fast, but not as good; export it and measure the checkpoint to run its own",
                stacklevel=2,
            )
    if needs.ways.get("kv") == "lowrank":
        require_low_rank(*plans.values())
    return plans
