"""Programs as drafts: a search goes by the time of a token where they draft for the unedited model.

The time of a program's pass beside the model's keys and values is predicted, and its acceptance measured on the text
of the search; `runtime.batching.ahead` makes the number of tokens ahead of these, and the time of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from surgeon.analysis.factors.factor_plan import plan_factors
from surgeon.benchmarks.measure import MeasuredDrafts
from surgeon.cost.deployment import plan_on_paper
from surgeon.cost.predict import DraftedPrediction, draft_on_paper
from surgeon.findings.trials import DRAFT_TIME
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.models.edit import program_of, restore
from surgeon.models.verified import NoVerifiedKeys, draft_on_text
from surgeon.opened import Model, streamed_layers
from surgeon.processes.files import finite
from surgeon.quality.head import OWN, VERIFIED, logits_of, text_quality
from surgeon.quality.summary import ACCEPTANCES, Quality
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import DRAFT_PASS, Aspect, show_seconds
from surgeon.words import plural

REFUSED = 0.5  # of the root of a divergence: what share of drafted tokens it costs at the least
AHEAD = "ahead"  # what trials have, by this name: the tokens that are best drafted ahead


def draft_obstacle(model: Model, ranks: int) -> Callable[[Recipe, Program], str]:
    """Make a `Mixture.obstacle`: the reason why a recipe's program makes no draft on these ranks."""
    shapes = model.shapes
    plan = cache(lambda: plan_on_paper(shapes, model.program, ranks, 1, shapes.dtype, "auto", "full"))

    def obstacle(recipe: Recipe, program: Program) -> str:
        if not plan_factors(recipe, model).is_of_weights:
            return "heads, neurons or factors go by a text, and a draft has those that the model's matrices alone tell"
        try:
            draft_on_paper(plan(), shapes, program)
        except ValueError as error:
            return str(error)
        return ""

    return obstacle


@dataclass(frozen=True)
class DraftValue:
    """The value of programs as drafts.

    Attributes:
        objective: names the hardware.
        by: which of their acceptances counts.
    """

    pricing: Pricing
    objective: Aspect
    by: str

    def at(self, acceptance: float, program: Program) -> DraftedPrediction | None:
        """Predict drafting at an acceptance; None where the program cannot, or it is not known."""
        assert self.objective.on is not None
        seconds = self.pricing.price(Aspect(DRAFT_PASS, self.objective.on), program)
        if math.isnan(acceptance) or math.isinf(seconds):
            return None
        return self.pricing.drafting(self.objective.on).at(acceptance, seconds)

    def by_quality(self, program: Program, measured: Quality) -> DraftedPrediction | None:
        return self.at(getattr(measured, self.by), program)

    def promise(self, program: Program, divergence: float) -> float:
        """Estimate the time of a token by a program's divergence, in parts of that without drafts.

        A token that is drawn is refused with the total variation of both predictions as its chance, which is at most
        sqrt(divergence / 2) (Pinsker's inequality), and was half of the root for programs of any damage; greedy tokens
        are refused about as often.
        """
        found = self.at(max(0.0, 1 - REFUSED * math.sqrt(max(0.0, divergence))), program)
        return math.inf if found is None else 1 / found.speedup

    def add_value(self, program: Program, measured: Quality) -> Quality:
        """Add a program's value as a draft to its quality.

        A window's time of a token is taken to first order around that of all windows, so that the mean over windows is
        the time predicted for the mean acceptance, and its interval is that of the delta method. With k tokens ahead
        and T the time of a round, that time is T / f, f = 1 + a + ... + a^k, and falls by f' / f of itself with a.
        """
        found = self.by_quality(program, measured)
        if found is None:
            return measured
        time = found.per_token / found.model.per_token
        a = found.acceptance
        tokens = math.fsum(a**place for place in range(found.ahead + 1))
        more = math.fsum(place * a ** (place - 1) for place in range(1, found.ahead + 1))
        times = time * (1 - more / tokens * (measured.by_window(self.by) - a))
        values = {
            DRAFT_TIME: time,
            str(self.objective): self.objective.natural(time),
            AHEAD: found.ahead,
        }
        windows = {**measured.windows, DRAFT_TIME: tuple(times.tolist())}
        return replace(measured, windows=windows, more={**measured.more, **values})


def by_verified_keys(
    evaluator: Evaluator, measured: Mapping[Program, Quality]
) -> tuple[Mapping[Program, Quality], str]:
    """Measure acceptances again by the model's keys and values of earlier tokens.

    Returns:
        The qualities with these acceptances, and nothing; or the same ones, and the reason.
    """
    model = evaluator.model
    dense = evaluator.dense
    if streamed_layers(model) is not None:
        return measured, "the model's weights are streamed"
    if dense != program_of(model):
        return measured, "the model is an edited one"
    found = dict(measured)
    try:
        for program in [one for one in measured if one != dense]:
            draft = draft_on_text(model, program, evaluator.factors)
            own = measured[program]
            verified = text_quality(logits_of(model), evaluator.windows.ids, draft=draft)
            acceptances = [name for name in ACCEPTANCES if own.knows(name)]
            windows = {**own.windows, **{name: verified.windows[name] for name in acceptances}}
            means: dict[str, Any] = {
                name: float(verified.by_window(name).mean()) for name in acceptances
            }
            found[program] = replace(own, windows=windows, **means)
    except NoVerifiedKeys as error:
        return measured, str(error)
    finally:
        restore(model)
    return found, ""


@dataclass(frozen=True)
class FoundDraft:
    """A search's winner as a draft.

    Attributes:
        by: which acceptance counts.
        predicted: by the acceptance on the text of the search, and on held-out text if there is some.
        measured: on this machine.
        keys: whose keys and values of earlier tokens it reads on held-out text (`by_verified_keys`).
        why_own: the reason for its own.
    """

    by: str
    predicted: Sequence[DraftedPrediction]
    measured: MeasuredDrafts | None = None
    keys: str = OWN
    why_own: str = ""

    def lines(self) -> list[str]:
        one = self.predicted[-1]
        kind = self.by.partition("_")[0]
        whose = "the model's" if self.keys == VERIFIED else "its own"
        names = "on the text of the search, by its own keys", f"on held-out text, by {whose} keys"
        texts = zip(self.predicted, names, strict=False)
        found = [
            f"{kind} acceptance {', '.join(f'{each.acceptance:.3f} {text}' for each, text in texts)}"
        ]
        if self.why_own:
            found.append(f"a lower estimate, as drafts read the model's keys: {self.why_own}")
        times = (
            f"a pass of the draft takes {show_seconds(one.draft)}, "
            f"one of the model {show_seconds(one.model.per_token)}"
        )
        if one.ahead:
            found.append(
                f"{plural(one.ahead, 'token')} ahead: {one.speedup:.3g}x is predicted; {times}, one that verifies "
                f"{show_seconds(one.verify)}"
            )
        else:
            found.append(f"none ahead: drafts are not predicted to pay; {times}")
        if self.measured is not None:
            found.append(f"measured in turns with no drafts: {self.measured}")
        return found

    def to_json(self) -> dict[str, Any]:
        names = ("acceptance", "ahead", "speedup", "draft", "verify", "per_token")
        predicted = {}
        for text, one in zip(("searched", "held_out"), self.predicted, strict=False):
            numbers = {name: getattr(one, name) for name in names}
            predicted[text] = numbers | {"dense_per_token": one.model.per_token}
        found = {"acceptance": self.by, "held_out_keys": self.keys, "predicted": predicted}
        if self.measured is not None:
            found["measured"] = finite(asdict(self.measured))
        return found | {"sentences": self.lines()}
